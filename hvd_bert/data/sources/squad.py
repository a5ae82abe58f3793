"""Opens data files and hub data sets as sources of checked `Question`s.

A file is SQuAD's JSON, JSON Lines, CSV or Parquet. Its content determines the format, not its name. Opening a file only
hashes its content. `Source.load` parses and checks it, on the ranks that need it.

Character offsets count Unicode code points from the start of the unstripped context, since some of SQuAD's contexts
begin with a space.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from hvd_bert import hub
from hvd_bert.config.parser import checked_path
from hvd_bert.data.sources import files
from hvd_bert.data.sources.entries import LEVELS, read_questions
from hvd_bert.data.sources.questions import MRQA, SHORT, WORDS, Findings, Found, Mistake, Question, Reading, checked
from hvd_bert.errors import UserError
from hvd_bert.storage.reading import sha256_of

__all__ = ["Findings", "Question", "Reading", "Source", "from_questions", "open_file", "open_hub"]

_DEFAULT = Reading()


@dataclass(frozen=True)
class Source:
    """A source of questions.

    `name`: name in messages, a path or `squad[train]`. `digest`: SHA-256 of the content and the reading settings; equal
    digests mean equal questions. `load`: parses and checks the content at each call. The questions are not kept in
    memory, since only tokenization needs them. Raises UserError if the content is wrong.
    """

    name: str
    digest: str
    load: Callable[[], tuple[list[Question], Findings]] = field(repr=False, compare=False)

    def questions(self) -> list[Question]:
        """Load the questions without the findings."""
        return self.load()[0]


def open_file(path: str | os.PathLike[str], version_2_with_negative: bool, reading: Reading = _DEFAULT) -> Source:
    """Open a data file and hash it. Raises UserError if it cannot be read. `Source.load` checks the content."""
    name = checked_path("data file", os.fspath(path))
    with files.opened(name) as opened:
        digest = sha256_of(opened)
    columns = Columns(name, reading)

    def parsed() -> Iterable[files.Located]:
        with files.opened(name) as file:
            content = file.read()
        if hashlib.sha256(content).hexdigest() != digest:
            raise UserError(f"{name}: the file changed while it was being read. Run the command again.")
        return files.parsed(name, files.unpacked(name, content), columns.choose, whole_ids=True)

    return _source(columns, digest, parsed, version_2_with_negative)


def open_hub(
    dataset_name: str,
    split: str,
    version_2_with_negative: bool,
    dataset_config_name: str | None = None,
    cache_dir: str | None = None,
    reading: Reading = _DEFAULT,
) -> Source:
    """Open a split of a data set from the hub or its local cache. Raises UserError if a split or column is missing."""
    columns = Columns(f"{dataset_name}[{split}]", reading)
    rows = hub.load_split(dataset_name, split, dataset_config_name, cache_dir)
    rows = rows.select_columns(columns.choose(rows.column_names))

    def located() -> Iterable[files.Located]:
        return ((f"row {number}", row) for number, row in enumerate(rows))

    return _source(columns, hub.digest(rows), located, version_2_with_negative)


def _source(
    columns: Columns, digest: str, located: Callable[[], Iterable[files.Located]], version_2_with_negative: bool
) -> Source:
    name, reading = columns.name, columns.reading

    def load() -> tuple[list[Question], Findings]:
        found = (item for where, node in located() for item in found_in(where, node, reading))
        questions, findings = checked(name, columns.with_answers(found), version_2_with_negative, reading)
        return questions, replace(findings, columns=columns.used)

    return Source(name, reading.digest(digest, version_2_with_negative), load)


def found_in(where: str, node: Any, reading: Reading) -> Iterable[Found]:
    """Return the questions and mistakes in what `files.parsed` found at the path `where`."""
    return [(where, node)] if isinstance(node, Mistake) else read_questions(where, node, reading)


def from_questions(name: str, questions: Iterable[Question]) -> Source:
    """Make a source of in-memory questions. They are not checked."""
    given = list(questions)
    content = json.dumps([astuple(question) for question in given]).encode()
    return Source(name, hashlib.sha256(content).hexdigest(), lambda: (given, Findings()))


def joined(sources: Sequence[Source], limit: int | None = None) -> Source:
    """Join the first `limit` questions of each source; None means all. A single source is returned unchanged."""
    if len(sources) == 1:
        return sources[0]
    digest = hashlib.sha256(" ".join(source.digest for source in sources).encode()).hexdigest()
    name = ", ".join(source.name for source in sources)

    def load() -> tuple[list[Question], Findings]:
        return [question for source in sources for question in source.questions()[:limit]], Findings()

    return Source(name, digest, load)


def check_ids(sources: Sequence[Source], questions: Sequence[Sequence[Question]]) -> None:
    """Raise UserError if questions of two sources have the same id, since ids are the keys of predictions."""
    first: dict[str, str] = {}
    for source, some in zip(sources, questions, strict=True):
        other = next((q for q in some if first.setdefault(q.id, source.name) != source.name), None)
        if other:
            shared = f"{first[other.id]} and {source.name} share the id {SHORT.repr(other.id)}"
            raise UserError(f"{shared}. Give all questions different ids.")


@dataclass
class Columns:
    """Chooses the columns of flat rows.

    `used`: description of the chosen columns, set by `choose`; "" if they have SQuAD's names. `refusal`: message of
    `with_answers` if only the column of answers is missing.
    """

    name: str
    reading: Reading
    used: str = ""
    refusal: str = ""

    def choose(self, present: list[str]) -> list[str]:
        """Return those of the columns `present` that are to be read; all of them if the rows are nested.

        Raises UserError if a required column is missing or occurs twice.
        """
        names = self.reading.names
        if names["question"] not in present and not set(LEVELS).isdisjoint(present):
            return present  # the rows are nested
        optional = ("answers",) if self.reading.purpose == "prediction" else ()
        needed = [names[field] for field in ("context", "question", "answers") if field not in optional]
        wrong = [column for column in needed if present.count(column) != 1]
        if wrong:
            ways_out = "Name the columns with --question_column, --context_column and --answer_column."
            if len(present) < 2:
                ways_out = "Give JSON, JSON Lines, Parquet, or CSV with commas, tabs or semicolons."
            found = ", ".join(map(SHORT.repr, present[:20])) or "none"
            needs = f"needs one column {' and one '.join(wrong)} (found {found})"
            self.refusal = f"{self.name}: not in SQuAD's format: {needs}. {ways_out}"
            if wrong != [names["answers"]]:
                raise UserError(self.refusal)
        unread = () if MRQA[0] in present else MRQA
        used = {field: column for field, column in names.items() if column in present and field not in unread}
        index = [*filter(files.is_index, present)]
        if index or any(field != column for field, column in used.items()):
            self.used = ", ".join(c if c == field else f"{c} as {field}" for field, c in used.items())
            self.used += f"; the index column {index[0]!r} is ignored" if index else ""
        return list(dict.fromkeys(used.values()))

    def with_answers(self, found: Iterable[Found]) -> Iterator[Found]:
        """Yield what was found. Raises UserError if no column has answers, except for words, a mistake of their own."""
        for where, item in found:
            if self.refusal and not (isinstance(item, Mistake) and item.kind == WORDS):
                raise UserError(self.refusal)
            yield where, item
