"""Analyze Horovod timelines: phases, messages, steps, stragglers (`hvd-bert timeline FILE`)."""
