"""Record steps of a training: Horovod's timeline, torch's profiler, and all ranks on one clock."""
