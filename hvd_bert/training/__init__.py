"""Parts of the training loop: inputs, optimizer, state, step times, metrics."""
