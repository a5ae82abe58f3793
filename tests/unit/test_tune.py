"""Tuning: parameter ranges, a search with known scores, and the command. No ranks are started."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from documented import undocumented
from made_runs import PretendedRuns, make_run
from refusals import check_refusal

from hvd_bert.tools.runs import launching, one_run
from hvd_bert.tools.runs.launching import Machine
from hvd_bert.tools.runs.one_run import Stopped
from hvd_bert.tools.tune import __main__ as tune

optuna = pytest.importorskip("optuna")
RANGES = ("learning_rate=1e-5:1e-4:log", "num_train_epochs=2:3", "global_batch=16,32")
WORDS = [f"--range={text}" for text in RANGES]


def f1_of(given: Mapping[str, str]) -> float:
    """Return a made-up F1, whose maximum is at a learning rate of 3e-5."""
    return 80 - 10 * abs(math.log(float(given.get("learning_rate", 1e-4)) / 3e-5))


def made(folder: Path, given: Mapping[str, str], label: str) -> Path:
    facts = {"best": {"metric": "f1"}, "lower_is_better": ["eval_loss"]}
    return make_run(folder, "horovod", 2, scores={"f1": f1_of(given)}, **facts)


def after_an_epoch(folder: Path, given: Mapping[str, str]) -> None:
    """Write a run's metrics.jsonl as after its first epoch, with half of the final F1."""
    rows = [{"step": 10, "epoch": 1.0, "eval_f1": f1_of(given) / 2}, {"step": 11, "loss": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 12, "eval_f1')


def label_of(folder: Path, command: Sequence[str], environ: Mapping[str, str]) -> str:
    return " ".join(word for word in command if word.startswith(("--learning_rate=", "--num_train_epochs=")))


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> PretendedRuns:
    runs = PretendedRuns(label_of, made)
    monkeypatch.setattr(one_run, "start_and_wait", runs)
    monkeypatch.setattr(launching, "program_path", lambda name: name)
    monkeypatch.setattr(Machine, "here", lambda environ: Machine(cores=2, gpus=0, allocation=None))
    return runs


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., int]:
    return lambda *flags: tune.main([f"--out={tmp_path / 'out'}", *flags])


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out" / "tune.json").read_text())


def trials(folder: Path) -> list[Any]:
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "out" / "study.log"))
    return optuna.load_study(study_name=None, storage=optuna.storages.JournalStorage(backend)).trials


def test_the_best_training_is_found_and_bad_ones_end_early(pretended, start, tmp_path, capsys) -> None:
    pretended.during = after_an_epoch
    assert start(*WORDS, "--trials=12") == 0
    result, (output, warnings) = record(tmp_path)["result"], capsys.readouterr()
    (rate, *_) = result["set"]
    assert 2e-5 < float(rate.removeprefix("--learning_rate=")) < 4e-5 and result["value"] > result["without_tuning"]
    assert f"    python -m hvd_bert.train ... {rate}" in output and "Tune with your own" in warnings
    assert undocumented(record(tmp_path), "tune.json", "sweep.json", without=("same",)) == []
    (model,) = (tmp_path / "out").rglob("model.safetensors")
    found = trials(tmp_path)
    best = max((trial for trial in found if trial.state.name == "COMPLETE"), key=lambda trial: trial.value)
    assert len(found) == 12 and "PRUNED" in {trial.state.name for trial in found[5:]}, "after the pruner's first trials"
    assert model.parent.name == f"trial-{best.number:03}" and found[0].value == result["without_tuning"]
    assert found[0].params == {"learning_rate": 1e-4, "num_train_epochs": 3, "global_batch": 16}
    rates, epochs, batches = found[0].distributions.values()
    assert (rates.low, rates.high, rates.log, epochs.high, batches.choices) == (1e-5, 1e-4, True, 3, (16, 32))
    page = (tmp_path / "out" / "tune.html").read_text()
    assert "ended early" in page and page.count("data:image/png") == 4


def test_lists_of_values_are_tried_in_all_combinations_and_ties_are_named(pretended, start, tmp_path, capsys) -> None:
    words = ("--range=learning_rate=3e-5,5e-5", "--range=num_train_epochs=2,3,4")
    assert (start(*words, "--trials=5"), start(*words, "--trials=9")) == (0, 0)
    found = trials(tmp_path)
    assert len({tuple(trial.params.items()) for trial in found}) == 6
    assert len(pretended.started) == 7, "the first run has another learning rate"
    output, result = capsys.readouterr().out, record(tmp_path)["result"]
    tied = [found[number] for number in result["tied"]]
    assert [(trial.params["learning_rate"], trial.value) for trial in tied] == [(3e-5, result["value"])] * 2
    assert f"(the same as trial {tied[0].number}, trial {tied[1].number})" in output


def test_settings_that_are_no_better_are_not_recommended(pretended, start, tmp_path, capsys) -> None:
    pretended.ends = {"--learning_rate=4e-05": 1, "--learning_rate=4.5e-05": None}
    assert start("--range=learning_rate=4e-5,4.5e-5,1e-4,2e-4") == 0
    output = capsys.readouterr().out
    assert "Keep your settings" in output and record(tmp_path)["result"]["set"] == []
    reasons = sorted(trial.user_attrs["reason"] for trial in trials(tmp_path) if trial.state.name == "FAIL")
    assert "status 1" in reasons[0] and "--timeout" in reasons[1]
    assert all(reason in (tmp_path / "out" / "tune.html").read_text() for reason in reasons)


def test_an_interrupted_tuning_resumes(pretended, start, tmp_path, capsys) -> None:
    def interrupt(folder: Path, given: Mapping[str, str]) -> None:
        if folder.name == "trial-002":
            raise Stopped("SIGTERM")

    words, log = (*WORDS, "--trials=4"), tmp_path / "out" / "study.log"
    pretended.during = interrupt
    assert start(*words) == 75
    log.write_text(log.read_text() + '{"op_code":')  # a kill leaves a partial line and optuna's lock
    log.with_name("study.log.lock").symlink_to("runs/tune/study.log")
    pretended.during, interrupted = None, pretended.started[-1]
    assert start(*words) == 0
    assert pretended.started[3] == interrupted and len(set(pretended.started)) == 4, "one trial is trained again"
    found, pretended.started = record(tmp_path)["result"], []
    assert start(*words) == 0 and record(tmp_path)["result"] == found and not pretended.started
    assert start(*words, "--seed=7") == 2
    assert "--seed=7" in capsys.readouterr().err
    for damaged in (b"", log.read_bytes().partition(b"\n")[2], b"[]\n"):  # optuna would start a new study
        log.write_bytes(damaged)
        assert start(*words) == 2 and str(log) in capsys.readouterr().err and log.read_bytes() == damaged


@pytest.mark.parametrize(
    ("flags", "ends", "status", "named"),
    [
        ((), {"": 1}, 1, "bad input (status 1; "),
        ((), {"": 2}, 2, "hvd_bert: bad input\n"),
        (("--minutes", "0"), {}, 2, "--minutes 0: "),
        (("--trials", "1"), {}, 2, "--trials 1: "),
    ],
)
def test_without_any_trial_there_is_no_advice(pretended, start, tmp_path, capsys, flags, ends, status, named) -> None:
    pretended.ends = ends
    assert start(*flags) == status
    output, message = capsys.readouterr()
    assert named in message and "Keep" not in output
    assert record(tmp_path)["result"] is None and len(pretended.started) == 1


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--range", "speed=1"], "--range speed=1"),
        (["--range", "seed"], "--range seed"),
        (["--range", "per_device_train_batch_size=auto,8"], "does not work with --range"),
        (["--range", "warmup_ratio=0.1:2"], "--warmup_ratio 2"),
        (["--range", "weight_decay=0:1:log"], "weight_decay=0:1:log"),
        (["--range", "output_dir=a,b"], "--output_dir"),
        (["--range", "answer_language=zh,other"], "answer_language=zh,other"),
        (["--max_steps", "9"], "--max_steps 9"),
        (["--eval_steps", "9"], "--eval_steps"),
        (["--train_file", "nowhere.json"], "--train_file nowhere.json"),
    ],
)
def test_bad_input(pretended, start, capsys, flags: list[str], named: str) -> None:
    assert start(*flags) == 2
    check_refusal(capsys.readouterr().err.rstrip("\n").splitlines()[-1], named)
    assert not pretended.started


def test_a_missing_package(start, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert start() == 2 and "Run `pip install .[search]`." in capsys.readouterr().err
