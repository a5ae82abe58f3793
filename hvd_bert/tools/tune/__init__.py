"""Search for faster Horovod settings, by short trainings under the user's launcher: `hvd-bert tune`."""
