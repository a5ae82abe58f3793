"""Layouts and mistakes of published data sets: with the flags of the recipes, the windows get the right answers."""
# ruff: noqa: RUF001  # texts in other writing systems

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import documented
import pytest
from refusals import refused
from test_squad import write
from test_tokenization import answer_of, to_windows

from hvd_bert.config import command_line
from hvd_bert.data.sources import squad
from hvd_bert.tasks.question_answering import open_split

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


def mrqa(entries: list[Entry], context: str) -> str:
    """Make MRQA's lines."""
    qas = [{**entry, "qid": entry.pop("id"), "detected_answers": entry["answers"], "answers": []} for entry in entries]
    for answer in (answer for entry in qas for answer in entry["detected_answers"]):
        start = answer.pop("answer_start")
        answer["char_spans"] = [[start, start + len(answer["text"]) - 1]]
    return "".join(json.dumps(line) + "\n" for line in ({"header": {"dataset": "t"}}, {"context": context, "qas": qas}))


def chaii(entries: list[Entry], context: str) -> str:
    """Make chaii's CSV."""
    out = io.StringIO()
    csv.writer(out).writerows(
        [
            ["id", "context", "question", "answer_text", "answer_start", "language"],
            *([e["id"], context, e["question"], *e["answers"][0].values(), "hindi"] for e in entries),
        ]
    )
    return out.getvalue()


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
    "AdversarialQA": Published(flat, "Ada met Bernadette.", (["Ada"], ["Bernadette"]), other_keys={"metadata": {}}),
    "MRQA": Published(mrqa, "Ada met Bernadette.", (["Ada"], ["Bernadette"])),
    "CUAD": Published(
        nested, "This Agreement is between Ada and Otto.", (["Ada", "Otto"], []), ("c__Parties", "c__Notice"), v2=True
    ),
    "PolicyQA": Published(
        nested,
        "We collect your name.",
        (["your name", "name"], ["We"]),
        other_keys={"index": 2, "summary": [""]},
    ),
    "COVID-QA": Published(nested, "It was mild.", (["mild"], ["It"]), (300, 301), other_keys={"document_id": 630}),
    "FQuAD": Published(nested, "Elle naît à Paris.", (["Paris"], ["Elle"])),
    "KorQuAD 1.0": Published(nested, "서울 은 한국 의 수도", (["서울"], ["수도"]), ("6566495-0-0", "6566495-0-1")),
    "SberQuAD": Published(flat, "Москва стоит на реке", (["Москва"], ["реке"]), (60544, 60545)),
    "SQuAD-es": Published(
        nested,
        "Ada ganó en 2015.",
        (["2015"], ["Ada", ""]),
        change=lambda answer: answer.update(answer_start=answer["answer_start"] if answer["text"] else -1),
        mistake="empty answer",
    ),
    "UIT-ViQuAD 1.0": Published(nested, "Ada sinh ở Hà Nội.", (["Hà Nội"], ["Ada"]), ("uit_1", "uit_2")),
    "UIT-ViQuAD 2.0": Published(nested, "Ada sinh ở Hà Nội.", (["Hà Nội"], []), ("uit_1", "uit_2"), v2=True),
    "chaii": Published(chaii, "वह दिल्ली में है", (["दिल्ली"], ["वह"])),
    "CMRC 2018": Published(
        nested, "东京 位于 日本 的 东部", (["东京"], ["东部"]), ("DEV_0_QUERY_0", "DEV_0_QUERY_1"), off_by(-1)
    ),
    "DRCD": Published(nested, "聖經 是 權威", (["聖經"], ["權威"]), answer_keys={"id": "1"}, other_keys={"id": "2"}),
    "XQuAD": Published(nested, "Ада живёт в Риме.", (["Риме"], ["Ада"])),
    "TyDi QA gold passage": Published(nested, "Ada asuu Roomassa.", (["Roomassa"], ["Ada"]), ("fi-1", "fi-2")),
    "MLQA": Published(nested, "Köln liegt am Rhein.", (["Rhein"], ["Köln"])),
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


ROWS = re.findall(r"^\| (.+?) \| (.+?) \| .+ \|$", documented.text_of("docs/guides/recipes.md"), re.MULTILINE)
FLAGS = {  # of the recipes, by data set
    name: " ".join(re.findall("`(.+?)`", flags)).split()
    for names, flags in ROWS
    for name in names.split(", ")
    if flags == "none" or flags.startswith("`--")
}


def test_the_recipes_name_these_data_sets():
    assert FLAGS.keys() == SETS.keys()


@pytest.mark.parametrize("name", SETS)
def test_published_data_set(tmp_path, tokenizer, name):
    published = SETS[name]
    path = make_file(tmp_path, published)
    data = command_line.parse(["--train_file", str(path), "--validation_file", str(path), *FLAGS[name]]).data
    mistakes = {published.mistake: 1} if published.change else {}
    assert bool(mistakes) == (data.bad_examples != "error")
    if mistakes:
        with refused(repr(str(published.ids[1])), "--bad_examples skip"):
            squad.open_file(path, data.version_2_with_negative).questions()
    for split in ("train", "validation"):
        ((_, source),) = open_split(data, split, None)
        questions, findings = source.load()
        scored = split == "validation" and published.mistake != "unanswered question"  # scores need no positions
        repaired = data.bad_examples == "repair"
        left_out = bool(mistakes) and not scored and not repaired
        assert [question.id for question in questions] == [*map(str, published.ids)][: 2 - left_out]
        assert (findings.mistakes, findings.repaired) == (({}, 1) if repaired else (mistakes, 0))
        windows, _ = to_windows(tokenizer, questions)
        labels = [
            answer_of(*pair) if pair[1]["end_position"] else None for pair in zip(questions, windows, strict=True)
        ]
        first, second = (texts[0] if texts else None for texts in published.answers)
        assert labels == [first, None if mistakes and not repaired else second][: len(questions)]
        assert questions[0].answer_texts == tuple(published.answers[0])


def make_file(tmp_path: Path, published: Published) -> Path:
    entries: list[Entry] = []
    for id_, texts in zip(published.ids, published.answers, strict=True):
        answers = [{"text": t, "answer_start": published.context.index(t), **published.answer_keys} for t in texts]
        entry = {"id": id_, "question": "what is it?", "answers": answers}
        entries.append(entry | ({"is_impossible": not texts, "plausible_answers": []} if published.v2 else {}))
    for answer in entries[1]["answers"] if published.change else ():
        published.change(answer)
    return write(tmp_path, published.layout(entries, published.context, **published.other_keys))
