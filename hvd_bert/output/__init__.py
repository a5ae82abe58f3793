"""The output folder of a run: its files, records and model card."""
