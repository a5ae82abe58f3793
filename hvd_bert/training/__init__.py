"""The trainer: `loop.py` trains, `api.py` is for Python programs, hvd_bert/train.py is the command."""
