"""Files that several processes share or that a crash must not damage: locks, atomic writes, the cache folder."""
