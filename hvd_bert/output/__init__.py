"""Output of a run: the output folder, metrics, reporters, callbacks and model card."""
