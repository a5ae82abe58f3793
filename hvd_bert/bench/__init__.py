"""Throughput benchmark and sweeps: `python -m hvd_bert.bench`."""
