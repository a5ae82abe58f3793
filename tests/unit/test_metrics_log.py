"""metrics.jsonl and progress lines. test_reporters.py tests the reporters."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from hvd_bert.distributed import logs
from hvd_bert.output import metrics_log as module
from hvd_bert.output.metrics_log import MetricsLogger
from hvd_bert.tasks.question_answering import QuestionAnswering

SCORES = {"exact_match": 50.0, "f1": 61.25, "total": 8.0, "eval_loss": 1.5}


class Clock:
    """Replaces the module `time`; tests set the clock, `now`, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = time = monotonic


@pytest.fixture(autouse=True)
def console(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up logging as on a terminal, where lines have no times."""
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "isatty", lambda: True)
        logs.start(rank=0)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def metrics(step: int) -> dict[str, float]:
    return {"epoch": step / 4, "learning_rate": 1e-4, "loss": 4.0 / step, "windows_per_s": 12.0}


def run(folder: Path, clock: Clock, enabled: bool = True) -> None:
    """Log eight steps of 4 s each, with evaluations after steps 4 and 8."""
    metrics_logger = MetricsLogger(folder, enabled)
    metrics_logger.begin(8, step=0, steps_per_epoch=4)
    for step in range(1, 9):
        assert not enabled or len(rows(folder)) == step - 1 + (step > 4)  # written at once
        clock.now += 4.0
        metrics_logger.logged(step, metrics(step))
        if step == 4:
            metrics_logger.evaluated(SCORES, QuestionAnswering.summary(SCORES), 4)
    metrics_logger.evaluated(SCORES, QuestionAnswering.summary(SCORES), 8)
    metrics_logger.close()


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rows(tmp_path, clock):
    run(tmp_path, clock)
    evaluated = {"eval_exact_match": 50.0, "eval_f1": 61.25, "eval_total": 8.0, "eval_loss": 1.5}
    expected = [{"step": step, **metrics(step)} for step in range(1, 9)]
    expected.insert(4, {"step": 4, "epoch": 1.0, **evaluated})
    expected.append({"step": 8, "epoch": 2.0, **evaluated})
    assert rows(tmp_path) == expected


def test_progress_without_a_terminal(tmp_path, clock, capsys):
    run(tmp_path, clock)
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = shown.out.splitlines()
    # Steps 1 and 8 are always printed, the others at least ten seconds apart: here every third step.
    assert [line.split(":")[0].split()[1] for line in lines] == ["1/8", "4/8", "4/8", "7/8", "8/8", "8/8"]
    assert lines[0] == "step 1/8 (12%)  loss 4.000  lr 1.00e-04  windows/s 12.0  ETA 00:28"
    assert lines[2] == "step 4/8: EM 50.00  F1 61.25  loss 1.500  on 8 questions"
    assert lines[4].endswith("ETA 00:00")


def test_progress_on_a_terminal(tmp_path, clock, capsys, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    run(tmp_path, clock)
    out = capsys.readouterr().out
    assert "ETA" not in out  # the progress bar shows the ETA
    assert out.count("EM 50.00") == 2
    bar = terminal.getvalue().split("\r")[-1]
    assert "8/8" in bar and "loss=0.500" in bar and "lr=1.00e-04" in bar


def test_evaluations_before_training_and_of_an_earlier_step(tmp_path, clock, capsys):
    metrics_logger = MetricsLogger(tmp_path, enabled=True)
    metrics_logger.evaluated(SCORES, QuestionAnswering.summary(SCORES), 0)
    assert capsys.readouterr().out == "EM 50.00  F1 61.25  loss 1.500  on 8 questions\n"
    metrics_logger.begin(8, step=0, steps_per_epoch=4)
    metrics_logger.logged(8, metrics(8))
    metrics_logger.evaluated(SCORES, QuestionAnswering.summary(SCORES), 6)
    metrics_logger.close()
    assert [(row["step"], row["epoch"]) for row in rows(tmp_path)] == [(0, 0.0), (8, 2.0), (6, 1.5)]
    assert "step 6/8: EM 50.00" in capsys.readouterr().out


def test_scores_name_other_rules(tmp_path, capsys):
    reporter = Mock()
    metrics_logger = MetricsLogger(tmp_path, True, [reporter])
    metrics_logger.started({"answer_language": "zh"}, None)
    metrics_logger.evaluated(SCORES, "F1 61.25", 0)
    metrics_logger.close()
    assert reporter.scalars.call_args.args[1]["eval_zh/f1"] == 61.25
    assert capsys.readouterr().out == "F1 61.25  (--answer_language zh)\n"


def test_other_ranks_are_silent(tmp_path, clock, capsys):
    run(tmp_path, clock, enabled=False)
    assert os.listdir(tmp_path) == []
    assert capsys.readouterr() == ("", "")
