"""The command `predict`: `__main__.py` reads the command line, `answering.py` answers the questions."""
