"""BERT for question answering: the network, its attention, its FLOP."""
