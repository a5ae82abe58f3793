"""Reads the folder of a finished run; bench, report and tune share it."""
