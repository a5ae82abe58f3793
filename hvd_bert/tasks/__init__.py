"""Tasks: what is trained, on what, and how it is evaluated. `base.py` is the interface."""
