"""Tasks: what is trained, on what, and how it is evaluated. `base.py` is the interface, `dataset.py` a base for own
tasks (`--task MODULE:CLASS`); `TASKS` in config/data.py lists those of the package."""
