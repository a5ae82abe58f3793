"""Strategies apply data parallelism from outside of the model; the training loop knows only their methods."""
