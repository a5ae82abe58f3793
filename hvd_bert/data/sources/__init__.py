"""Read and check questions from data files and hub data sets."""
