"""BERT for question answering: the network, its attention, the work it does."""
