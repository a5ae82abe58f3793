"""The command `predict`. answering.py answers questions, rows.py runs custom tasks on rows of a file."""
