"""Search for the flags of a training with the best score: `hvd-bert tune`."""
