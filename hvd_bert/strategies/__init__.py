"""Strategies for training a model on several ranks. The training loop uses only `base.Strategy`'s methods."""
