"""Checkpoints: write, verify, resume."""
