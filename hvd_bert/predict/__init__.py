"""The command that answers questions: `__main__.py` reads the command line, `answering.py` does the rest."""
