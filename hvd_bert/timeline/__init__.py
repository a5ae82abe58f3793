"""What Horovod's timeline says: phases, messages, steps, slow ranks (`python -m hvd_bert.timeline FILE`)."""
