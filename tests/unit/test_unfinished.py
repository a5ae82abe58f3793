"""The answers of an unfinished prediction: kept, resumed, refused, and written as JSON, JSON Lines and CSV."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from tables import each, refused

from hvd_bert.errors import UserError
from hvd_bert.predict.unfinished import Unfinished
from hvd_bert.storage import written

RUN = {"the model": "m", "a setting": "s", "the input": "i"}


def row(number: int) -> dict[str, Any]:
    nbest = [{"text": "Zoë, “the” first", "start": 3}]
    return {
        "id": f"q{number}",
        "answer": 'Zoë, "a"\nb',
        "line": "a\rb",
        "start": None,
        "null_odds": 0.5,
        "nbest": nbest,
    }


ROWS = [row(number) for number in range(5)]


def answered(output: Path) -> None:
    """Three blocks, not in their order, in two runs."""
    first = Unfinished(output, RUN)
    assert first.done == set()
    first.add(2, ROWS[4:])
    first.add(0, ROWS[:2])
    first.close()
    second = Unfinished(output, RUN)
    assert second.done == {0, 2}
    second.add(1, ROWS[2:4])
    second.finish()


@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv"])
def test_output(tmp_path, suffix):
    output = tmp_path / "new" / f"answers.{suffix}"
    answered(output)
    assert sorted(path.name for path in output.parent.iterdir()) == [written.RECORD, output.name]
    assert written.names(output.parent, "predict") == {output.name}
    text = output.read_text(encoding="utf-8")
    if suffix == "csv":
        with output.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [{**found, "nbest": json.loads(found["nbest"])} for found in rows] == [
            {**expected, "start": "", "null_odds": "0.5"} for expected in ROWS
        ]
    else:
        assert (json.loads(text) if suffix == "json" else [json.loads(line) for line in text.splitlines()]) == ROWS
        assert "Zoë" in text
    answered(output)  # again, over the first
    assert output.read_text(encoding="utf-8") == text


def test_an_incomplete_line_is_cut_off(tmp_path):
    output = tmp_path / "answers.json"
    killed = Unfinished(output, RUN)
    killed.add(0, ROWS[:1])
    killed.add(1, ROWS[1:2])
    killed.close()
    whole = killed.path.read_bytes()
    for size in (len(whole) - 1, whole.rindex(b"1\t") + 1):
        killed.path.write_bytes(whole[:size])
        resumed = Unfinished(output, RUN)
        assert resumed.done == {0}
        resumed.add(1, ROWS[1:2])
        resumed.close()
        assert killed.path.read_bytes() == whole
    killed.path.write_bytes(whole[:5])
    assert Unfinished(output, RUN).done == set()


@each("change", [(b'{"the', b"{the"), (b"{", b"[", 1), (b"0\t", b"x\t"), (b"0\t[", b"0\t]")])
def test_a_damaged_file_is_refused(tmp_path, change):
    output = tmp_path / "answers.json"
    first = Unfinished(output, RUN)
    first.add(0, ROWS)
    first.close()
    first.path.write_bytes(first.path.read_bytes().replace(*change))
    with refused("answers.json.unfinished"):
        Unfinished(output, RUN).finish()
    assert not output.exists()


def test_answers_of_another_run_are_refused(tmp_path):
    output = tmp_path / "answers.json"
    first = Unfinished(output, RUN)
    first.add(0, ROWS)
    first.close()
    kept = first.path.read_bytes()
    for changed, words in (
        ({"the model": ""}, "the model"),
        ({"a setting": "", "the input": ""}, "a setting and the input"),
    ):
        with pytest.raises(
            UserError, match=f"answers.json.unfinished has the answers of .* since then {words} changed"
        ):
            Unfinished(output, RUN | changed)
    assert first.path.read_bytes() == kept


def test_two_runs_at_once_are_refused(tmp_path):
    output = tmp_path / "answers.json"
    first = Unfinished(output, RUN)
    with refused(output):
        Unfinished(output, RUN)
    first.close()
    Unfinished(output, RUN).close()


@pytest.mark.parametrize("name", ["answers.json", "answers.json.unfinished"])
def test_files_of_others_stay(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(FileExistsError, match=f"did not write \\({name}\\)"):
        Unfinished(tmp_path / "answers.json", RUN)
    assert (tmp_path / name).read_text() == "mine"
