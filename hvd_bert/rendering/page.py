"""A report as blocks of text, tables and plots, rendered as Markdown, as one HTML page or for a terminal."""

from __future__ import annotations

import base64
import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources

from jinja2 import Environment
from markupsafe import Markup

from hvd_bert.rendering.table import table

DASH = "-"
WIDTH = 100  # of text for a terminal
GENERATOR = '<meta name="generator" content="hvd_bert">'  # marks a page as this program's (storage/written.py)


@dataclass(frozen=True)
class Text:
    """A paragraph, or a heading if `level` is 1 or 2."""

    text: str
    level: int = 0


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
        """The table as text, with numbers aligned to the right."""
        cells = [self.head, *self.rows]
        widths = [max(len(row[column]) for row in cells) for column in range(len(self.head))]
        aligned = [
            [cell if column < self.words else cell.rjust(widths[column]) for column, cell in enumerate(row)]
            for row in cells
        ]
        return table(aligned)


@dataclass(frozen=True)
class Picture:
    """A PNG; `alt` describes it."""

    name: str
    png: bytes
    alt: str

    @property
    def data_uri(self) -> str:
        """The picture as a data URI, so that the page needs no other file."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode("ascii")


Block = Text | Listing | Grid | Picture


@dataclass
class Page:
    """A title and blocks, in order."""

    title: str
    blocks: list[Block] = field(default_factory=list)

    def add(self, *blocks: Block) -> None:
        """Add blocks at the end."""
        self.blocks += blocks

    @property
    def pictures(self) -> list[Picture]:
        """All pictures of the page."""
        return [block for block in self.blocks if isinstance(block, Picture)]

    def as_markdown(self) -> str:
        """The page as Markdown; its pictures are files next to it."""
        return "\n\n".join([f"# {_escaped(self.title)}", *map(_markdown, self.blocks)]) + "\n"

    def as_text(self) -> str:
        """The page for a terminal, without its pictures."""
        return "\n\n".join([self.title, *(_plain(block) for block in self.blocks if not isinstance(block, Picture))])

    def as_html(self) -> str:
        """The page as one self-contained HTML file."""
        template = resources.files("hvd_bert.rendering").joinpath("page.html").read_text(encoding="utf-8")
        environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        blocks = [(type(block).__name__, block) for block in self.blocks]
        return environment.from_string(template).render(title=self.title, blocks=blocks, generator=Markup(GENERATOR))


def _plain(block: Text | Listing | Grid) -> str:
    if isinstance(block, Grid):
        return block.for_terminal()
    if isinstance(block, Listing):
        return "\n".join(
            textwrap.fill(item, WIDTH, initial_indent="  - ", subsequent_indent="    ") for item in block.items
        )
    return f"{block.text}\n{'-' * len(block.text)}" if block.level else textwrap.fill(block.text, WIDTH)


def _markdown(block: Block) -> str:
    if isinstance(block, Text):
        return ("#" * block.level + " " if block.level else "") + _escaped(block.text)
    if isinstance(block, Listing):
        return "\n".join(f"- {_escaped(item)}" for item in block.items)
    if isinstance(block, Picture):
        return f"![{_escaped(block.alt)}]({block.name})"
    rule = ["---" if column < block.words else "---:" for column in range(len(block.head))]
    rows = [block.head, rule, *block.rows]
    return "\n".join("| " + " | ".join(_escaped(cell) for cell in row) + " |" for row in rows)


def _escaped(text: str) -> str:
    """Escape Markdown's and HTML's special characters, for example in names of files and devices."""
    escaped = html.escape(" ".join(text.split()), quote=False)
    for mark in "\\`*_|[]":
        escaped = escaped.replace(mark, "\\" + mark)
    return escaped
