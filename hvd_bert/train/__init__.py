"""The training command: `__main__.py` reads the command line, `loop.py` trains."""
