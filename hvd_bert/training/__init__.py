"""The trainer: `loop.py` has the training loop, `api.py` the function `train` for Python programs."""
