"""Ranks: their launcher, the world they join, how their processes start and end."""
