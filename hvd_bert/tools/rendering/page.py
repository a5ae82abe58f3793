"""A report as blocks of text, tables and charts, rendered as one HTML page or for a terminal."""

from __future__ import annotations

import base64
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

from jinja2 import Environment
from markupsafe import Markup

from hvd_bert.errors import visible
from hvd_bert.tools.rendering import DASH
from hvd_bert.tools.rendering.charts import Chart, scripts

WIDTH = 100  # characters per line on a terminal
MAX_CELL = 16  # characters per line of a cell in LaTeX


@dataclass(frozen=True)
class Text:
    """A paragraph, or a heading if `level` is from 1 to 3. The page's navigation shows headings of level 2."""

    text: str
    level: int = 0


@dataclass(frozen=True)
class Status:
    """A state in one or two words, with an explanation."""

    label: str
    text: str
    tone: Literal["good", "busy", "bad"]


@dataclass(frozen=True)
class Figures:
    """The main figures: pairs of name and value."""

    items: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Quote:
    """A quotation with a marked part."""

    before: str
    marked: str
    after: str


@dataclass(frozen=True)
class Code:
    """Lines to copy, such as commands."""

    text: str


@dataclass(frozen=True)
class Details:
    """Blocks that are hidden until the reader opens them."""

    summary: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Listing:
    """A bulleted list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Grid:
    """A table. The first `words` columns are text, the others numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1

    def for_terminal(self) -> str:
        """Format the table as text, with numbers aligned to the right."""
        cells = [self.head, *self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = (
            "  ".join(
                cell.ljust(width) if column < self.words else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in cells
        )
        return "\n".join("  " + line.rstrip() for line in lines)

    def for_latex(self) -> str:
        """Format the table as a narrow LaTeX tabular with the rules of booktabs; titles and long texts are wrapped."""
        columns = "l" * self.words + "r" * (len(self.head) - self.words)
        above, below = zip(*(title.split(" ", 1) if " " in title else ("", title) for title in self.head), strict=True)
        lines = [" & ".join(map(_latex_cell, row)) + r" \\" for row in (above, below, *self.rows)]
        body = [r"\toprule", *lines[:2], r"\midrule", *lines[2:], r"\bottomrule"]
        return "\n".join([rf"\begin{{tabular}}{{@{{}}{columns}@{{}}}}", *body, r"\end{tabular}"])

    def without_empty(self) -> Grid:
        """Return the table without columns that contain only dashes."""
        known = [any(row[column] != DASH for row in self.rows) for column in range(len(self.head))]
        head, *rows = ([cell for cell, keep in zip(row, known, strict=True) if keep] for row in (self.head, *self.rows))
        return Grid(head, rows, self.words)


@dataclass(frozen=True)
class Picture:
    """A PNG picture. `alt`: description. `half`: whether it is half as wide as the page.

    `others`: the picture in other formats, content by file name.
    """

    name: str
    png: bytes
    alt: str
    half: bool = False
    others: Mapping[str, bytes] = field(default_factory=dict)


Block = Text | Status | Figures | Quote | Code | Details | Listing | Grid | Picture | Chart


@dataclass
class Page:
    """A report: its title and its blocks, in order."""

    title: str
    blocks: list[Block] = field(default_factory=list)

    def add(self, *blocks: Block) -> None:
        """Add blocks at the end."""
        self.blocks += blocks

    def add_section(self, title: str, *blocks: Block) -> None:
        """Add a section with the blocks that are not empty. Adds nothing if all are empty."""
        shown = [block for block in blocks if not _is_empty(block)]
        self.blocks += [Text(title, 2), *shown] if shown else []

    @property
    def pictures(self) -> list[Picture]:
        """All pictures of the page, except those inside `Details`."""
        return [block for block in self.blocks if isinstance(block, Picture)]

    def as_text(self) -> str:
        """Format the texts, lists and tables of the page for a terminal. Omits other blocks."""
        shown = [_plain(block) for block in self.blocks if isinstance(block, Text | Listing | Grid)]
        return visible("\n\n".join([self.title, *shown]))

    def as_html(self) -> str:
        """Render the page as one self-contained HTML file."""
        folder = resources.files("hvd_bert.tools.rendering")
        template, style = (folder.joinpath(f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css"))
        headings = [block for block in self.blocks if isinstance(block, Text) and block.level == 2]
        environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_finalize)
        environment.filters["kind"] = lambda block: type(block).__name__
        environment.filters["base64"] = lambda content: base64.b64encode(content).decode("ascii")
        return environment.from_string(template).render(
            title=self.title,
            blocks=self.blocks,
            headings=headings,
            style=Markup(style),
            scripts=scripts() if any(isinstance(block, Chart) for block in self.blocks) else [],
        )


def _is_empty(block: Block) -> bool:
    """Return whether a text, code, list or chart has no content. Other blocks are never empty."""
    match block:
        case Text(text="") | Code(text="") | Listing(items=[]) | Chart(series=[]):
            return True
    return False


def _finalize(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _plain(block: Text | Listing | Grid) -> str:
    if isinstance(block, Grid):
        return block.for_terminal()
    if isinstance(block, Listing):
        return "\n".join(
            textwrap.fill(item, WIDTH, initial_indent="  - ", subsequent_indent="    ") for item in block.items
        )
    return f"{block.text}\n{'-' * len(block.text)}" if block.level else textwrap.fill(block.text, WIDTH)


# LaTeX's special characters -> their escapes.
_WORDS = {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
_LATEX = str.maketrans({mark: f"\\{mark}" for mark in "&%$#_{}"} | {mark: f"${mark}$" for mark in "<>|"} | _WORDS)


def latex(text: str) -> str:
    """Escape LaTeX's special characters, and replace white space by single spaces."""
    return " ".join(visible(text).split()).translate(_LATEX).replace("--", "-{}-")


def _latex_cell(text: str) -> str:
    """Escape a table's cell; a long text is set in several lines."""
    cell = latex(text)
    return rf"\parbox[t]{{0.18\linewidth}}{{\raggedright {cell}\strut}}" if len(text) > MAX_CELL else cell
