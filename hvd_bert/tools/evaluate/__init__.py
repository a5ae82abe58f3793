"""The command `evaluate`: `__main__.py` starts the ranks, `running.py` evaluates, `content.py` makes the tables."""
