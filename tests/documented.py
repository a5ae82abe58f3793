"""Read the documentation: pages, sections, and the commands in ```bash fences."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(p.relative_to(REPOSITORY)) for p in REPOSITORY.glob("docs/**/*.md")),
]
GUIDES = ["README.md", "docs/start/quickstart.md", *(page for page in PAGES if page.startswith("docs/guides/"))]
PLACEHOLDER = r"\b[A-Z][A-Z_]*\b"  # capital letters stand for any word

_FENCE = re.compile(
    r"(?:^<!-- needs: (?P<needs>[a-z, ]+) -->\n)?^(?P<indent> *)```bash\n(?P<content>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)


@cache
def text_of(page: str) -> str:
    return (REPOSITORY / page).read_text(encoding="utf-8")


def without_fences(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)


def code_spans(text: str) -> list[str]:
    """Return the texts between backticks, outside of fences."""
    return re.findall(r"`([^`\n]+)`", without_fences(text))


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", without_fences(text), re.MULTILINE)


def section(page: str, title: str) -> str:
    """Return the text of a page from the heading `title` to the next heading of the same level or above."""
    level, rest = re.split(rf"^(#+) {re.escape(title)}$", text_of(page), maxsplit=1, flags=re.MULTILINE)[1:]
    return re.split(rf"^#{{1,{len(level)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


@dataclass(frozen=True)
class Fence:
    """A ```bash block. `needs`: the words of the comment `<!-- needs: ... -->` above it."""

    page: str
    line: int
    needs: tuple[str, ...]
    content: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The block's commands, each on one line, without comments."""
        lines = self.content.replace("\\\n", " ").splitlines()
        stripped = (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)
        return [" ".join(line.split()) for line in stripped if line]


def fences(page: str) -> list[Fence]:
    text = text_of(page)
    return [
        Fence(
            page,
            text[: match.start("content")].count("\n"),
            tuple(match["needs"].split(", ")) if match["needs"] else (),
            match["content"],
        )
        for match in _FENCE.finditer(text)
    ]


def undocumented(record: Any, *titles: str, without: tuple[str, ...] = ()) -> list[str]:
    """Return the keys of a JSON value, at any depth, that sections of docs/reference/output-files.md do not describe.

    `titles`: the sections. `without`: keys whose values have data as keys, such as the ids of questions.
    """
    spans = [span for title in titles for span in code_spans(section(OUTPUT_FILES, title))]
    described = [re.sub("[A-Z]{3,}", r"\\w+", re.escape(span)) for span in spans]
    known = re.compile("|".join(described))
    return sorted({key for key in _keys(record, without) if not known.fullmatch(key)})


def _keys(value: Any, without: tuple[str, ...]) -> set[str]:
    if isinstance(value, dict):
        nested = (_keys(content, without) for key, content in value.items() if key not in without)
        return set(value).union(*nested)
    if isinstance(value, list):
        return set().union(*(_keys(element, without) for element in value))
    return set()


OUTPUT_FILES = "docs/reference/output-files.md"


def custom_task() -> str:
    """Return the Python example in the guide to tasks."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", text_of("docs/guides/tasks.md"), re.DOTALL | re.MULTILINE)
    return str(code)
