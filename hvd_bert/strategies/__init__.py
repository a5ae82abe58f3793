"""Strategies add data parallelism to a model. The training loop uses only the methods of `base.Strategy`."""
