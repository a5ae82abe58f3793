"""Analysis of Horovod timelines: phases, messages, steps, stragglers (`python -m hvd_bert.timeline FILE`)."""
