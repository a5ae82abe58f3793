"""Checkpoints and the output folder: write, verify, resume."""
