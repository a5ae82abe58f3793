"""Resource usage of a run: GPUs, processes, profiles."""
