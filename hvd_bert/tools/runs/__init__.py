"""Reads the folder and the log of a run; bench, doctor, report and tune share it."""
