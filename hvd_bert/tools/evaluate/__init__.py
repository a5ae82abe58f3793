"""The command `evaluate`: `__main__.py` parses the flags, `running.py` evaluates and writes the results."""
