"""Checkpoints: schedule, write, verify and resume them."""
