"""A report of runs that can be believed: speed-ups beside their baseline, and a projection to more devices."""
