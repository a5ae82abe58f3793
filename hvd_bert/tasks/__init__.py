"""Tasks: model, data, loss and evaluation. `base.py` is the interface, `dataset.py` the base class of custom tasks."""
