"""Search for faster Horovod settings, by short trainings under the user's launcher: `python -m hvd_bert.tune`."""
