"""Horovod's settings tried by short trainings under the user's own launcher: `python -m hvd_bert.tune`."""
