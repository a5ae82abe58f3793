"""The ranks: what the launcher says, the world they join, how their processes start and end."""
