"""Fine-tunes BERT for question answering (SQuAD) over many ranks with Horovod."""

__version__ = "0.1.0"
