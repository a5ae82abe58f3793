"""Search for the training flags that give the best score: `hvd-bert tune`."""
