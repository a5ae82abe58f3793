"""How fast this trainer is here: `python -m hvd_bert.bench`."""
