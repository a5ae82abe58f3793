"""Layouts and mistakes of published data sets: the windows get the right answers."""
# ruff: noqa: RUF001  # texts in other writing systems

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from refusals import refused
from test_tokenization import answer_of, to_windows

from hvd_bert.data.sources import squad
from hvd_bert.data.sources.squad import Reading

Entry = dict[str, Any]


def nested(entries: list[Entry], context: str, **keys: Any) -> Any:
    """Make SQuAD's nested layout. `keys`: additional keys of the paragraph."""
    return {"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": entries, **keys}]}]}


def flat(entries: list[Entry], context: str, **keys: Any) -> Any:
    """Make the hub's flat layout, a row per question. `keys`: additional columns."""
    columns = ("text", "answer_start")
    return [
        {**entry, **keys, "context": context, "answers": {key: [a[key] for a in entry["answers"]] for key in columns}}
        for entry in entries
    ]


def off_by(number: int) -> Callable[[Entry], None]:
    """Return a function that shifts an answer's start by `number` characters."""

    def change(answer: Entry) -> None:
        answer["answer_start"] += number

    return change


def text(change_text: Callable[[str], str]) -> Callable[[Entry], None]:
    """Return a function that applies `change_text` to an answer's text."""

    def change(answer: Entry) -> None:
        answer["text"] = change_text(answer["text"])

    return change


class Published(NamedTuple):
    """Two questions on `context` in the format of a published data set.

    `answers`: answer texts per question. `change`: function that introduces `mistake` into each answer of the second
    question. `answer_keys`: additional keys of answers. `other_keys`: additional keys of paragraphs or rows.
    """

    layout: Callable[..., Any]
    context: str
    answers: tuple[list[str], list[str]]
    ids: tuple[Any, Any] = ("a1", "a2")
    change: Callable[[Entry], None] | None = None
    answer_keys: Mapping[str, Any] = MappingProxyType({})
    other_keys: Mapping[str, Any] = MappingProxyType({})
    v2: bool = False
    mistake: str = "misplaced answer"


SETS = {
    "SQuAD 1.1": Published(nested, "In 1858 Ada met Bernadette.", (["1858", "In 1858"], ["Bernadette"])),
    "SQuAD 2.0": Published(nested, "In 1858 Ada met Bernadette.", (["1858"], []), v2=True),
    "JaQuAD": Published(
        flat,
        "東京 都知事 は 2020 年",
        (["東京"], ["2020"]),
        ("tr-0", "tr-1"),
        text(lambda year: year.replace("0", "０")),
        answer_keys={"answer_type": "Location"},
    ),
    "ARCD": Published(
        nested, "جمال عبد الناصر رئيس مصر.", (["جمال"], ["رئيس مصر"]), (969331847642, 115150665555), off_by(1)
    ),
    "SQuAD-it": Published(
        nested,
        "La squadra vinse nel 2015.",
        (["2015"], ["squadra"]),
        change=text(lambda _: ""),
        mistake="unanswered question",
    ),
    "TQuAD": Published(nested, "Fatih 1453 yılında aldı.", (["1453"], ["Fatih"]), change=off_by(400)),
    "PIAF": Published(nested, "Il naît à Paris.", (["Il"], ["Paris"]), ("p1", "p2"), text(lambda city: f"{city} ")),
    "GermanQuAD": Published(
        nested,
        "Köln liegt am Rhein.",
        (["Rhein"], ["Köln"]),
        (38544, 38545),
        other_keys={"document_id": 43958},
        answer_keys={"answer_id": 53778, "document_id": 43958, "answer_category": None},
    ),
}


@pytest.mark.parametrize("name", SETS)
def test_published_data_set(tmp_path, tokenizer, name):
    published = SETS[name]
    path = write(tmp_path, published)
    mistakes = {published.mistake: 1} if published.change else {}
    if mistakes:
        with refused(repr(str(published.ids[1])), "--bad_examples skip"):
            squad.open_file(path, published.v2).questions()
    for purpose in ("training", "evaluation"):
        reading = Reading(bad_examples="skip" if mistakes else "error", purpose=purpose)
        questions, findings = squad.open_file(path, published.v2, reading).load()
        scored = purpose == "evaluation" and "misplaced answer" in mistakes  # scores do not need an answer's position
        assert [question.id for question in questions] == [*map(str, published.ids)][
            : 2 if scored or not mistakes else 1
        ]
        assert findings.mistakes == mistakes
        windows, _ = to_windows(tokenizer, questions)
        labels = [
            answer_of(*pair) if pair[1]["end_position"] else None for pair in zip(questions, windows, strict=True)
        ]
        first, second = (texts[0] if texts else None for texts in published.answers)
        assert labels == [first, None if mistakes else second][: len(questions)]
        assert questions[0].answer_texts == tuple(published.answers[0])


def write(tmp_path: Path, published: Published) -> Path:
    entries: list[Entry] = []
    for id_, texts in zip(published.ids, published.answers, strict=True):
        answers = [{"text": t, "answer_start": published.context.index(t), **published.answer_keys} for t in texts]
        entry = {"id": id_, "question": "what is it?", "answers": answers}
        entries.append(entry | ({"is_impossible": not texts, "plausible_answers": []} if published.v2 else {}))
    for answer in entries[1]["answers"] if published.change else ():
        published.change(answer)
    path = tmp_path / "published.json"
    path.write_text(json.dumps(published.layout(entries, published.context, **published.other_keys)))
    return path
