"""HTML pages, text tables and the plot style that several commands share."""
