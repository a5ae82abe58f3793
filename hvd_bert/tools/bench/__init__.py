"""Throughput benchmark and sweeps: `hvd-bert bench`."""
