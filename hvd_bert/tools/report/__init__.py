"""Report on runs: the page of a run, and speed-ups over a baseline."""
