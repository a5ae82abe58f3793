"""Ranks: detecting their launcher, joining a world, and starting and ending their processes."""
