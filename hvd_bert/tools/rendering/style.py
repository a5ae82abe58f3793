"""The style of plots. Importing this module makes matplotlib draw without a display."""

from __future__ import annotations

import io
from typing import Any

import matplotlib
from matplotlib.figure import Figure

matplotlib.use("Agg")

# Palette of Okabe and Ito (2008), distinguishable with any color vision.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "savefig.dpi": 130,
    "text.parse_math": False,  # a name with dollar signs is no formula
}


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
