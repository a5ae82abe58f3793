"""Set the style of matplotlib figures, and render them. Importing this module selects a backend without a display."""

from __future__ import annotations

import io
from typing import Any

import matplotlib
from matplotlib.figure import Figure

matplotlib.use("Agg")

# The palette of the page's curves (page.css).
COLOURS = ("#0072b2", "#d55e00", "#00835f", "#b8588f", "#a87400", "#0f93ab", "#757d86")
STYLE: Any = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.alpha": 0.3,
    "lines.markersize": 4,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,  # publishers refuse the default, Type 3
    "svg.hashsalt": "hvd_bert",  # makes the ids in the file reproducible
    "text.parse_math": False,  # dollar signs in names do not enclose formulas
}
UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


def saved(figure: Figure, form: str = "png") -> bytes:
    """Render a figure to bytes in the format `form`."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, metadata=UNDATED.get(form))
    return buffer.getvalue()
