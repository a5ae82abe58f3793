"""What the training loop is made of: inputs, optimizer, state, step times, metrics."""
