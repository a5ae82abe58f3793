"""Timelines with a byte order mark, with steps that are left out, and of one rank."""

from __future__ import annotations

import codecs

import pytest
from made_timelines import Timeline, training

from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_OK
from hvd_bert.timeline import __main__ as command


def test_a_byte_order_mark_is_ignored(tmp_path, capsys):
    path = training(steps=4).write(tmp_path / "t.json")
    expected = command.read(path)
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    seen = command.read(path)
    assert (seen.events, seen.step, seen.phases) == (expected.events, expected.step, expected.phases)
    path.write_bytes(codecs.BOM_UTF8 + b"[\n]")
    assert command.main([str(path)]) == EXIT_BAD_INPUT
    assert "has no events" in capsys.readouterr().err


def test_a_step_with_few_tensors_lengthens_no_other(tmp_path):
    """Steps of 1 ms. One of them sends only a metric and is left out, and the one before it has no known end."""
    made = Timeline()
    for step in range(12):
        start = 1000 * step
        for tensor in ("a",) if step == 6 else ("a", "b", "c"):
            made.negotiate(tensor, (start, start))
            made.send([tensor], start, start + 100)
    seen = command.read(made.write(tmp_path / "t.json"))
    assert seen.step is not None and seen.curves is not None
    assert (seen.step.steps, seen.step.step_s, seen.step.p99_s) == (10, pytest.approx(1e-3), pytest.approx(1e-3))
    shown, took = seen.curves.timed()
    assert (shown.number.tolist(), set(took)) == ([1, 2, 3, 4, 7, 8, 9, 10], {1000})


def test_one_rank_is_not_called_unknown_and_gets_no_advice_on_the_network(tmp_path, capsys):
    path = training(steps=12, ranks=1).write(tmp_path / "t.json")
    assert command.main([str(path)]) == EXIT_OK
    text = capsys.readouterr().out
    assert " events of 1 rank in " in text and "unknown number" not in text
    assert "name ranks" not in text and "There is one rank, so none waits for another." in text
    assert "one rank sends nothing" in text and "MB/s" not in text
    assert text.endswith("- One rank sends nothing. Record a run of several ranks for advice on communication.\n")
    assert command.main([str(path), "--hosts", "2"]) == EXIT_BAD_INPUT
    assert "--hosts 2: the file has only 1 rank." in capsys.readouterr().err
