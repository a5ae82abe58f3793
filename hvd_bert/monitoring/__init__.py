"""What a run uses and where its time goes: GPUs, processes, profiles."""
