"""Files that processes share or that must survive a crash: locks, atomic writes, size-limited reads."""
