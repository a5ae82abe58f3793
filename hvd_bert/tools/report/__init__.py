"""Report on finished runs: speed-ups over a baseline, and a projection to more devices."""
