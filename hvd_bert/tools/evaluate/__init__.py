"""The command `evaluate`: `__main__.py` starts the ranks, `running.py` evaluates and makes the tables."""
