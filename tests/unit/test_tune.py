"""Tuning: the settings to search, the search with known speeds and scores, the command. No rank is started."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from documented import undocumented
from made_runs import PretendedRuns, make_run
from msgspec.structs import replace
from refusals import check_refusal, refused

from hvd_bert.config import command_line
from hvd_bert.tools.runs import launching, one_run, reading
from hvd_bert.tools.runs.launching import Machine
from hvd_bert.tools.runs.one_run import Stopped
from hvd_bert.tools.tune import __main__ as tune

optuna = pytest.importorskip("optuna")
FloatDistribution = optuna.distributions.FloatDistribution
spaces = pytest.importorskip("hvd_bert.tools.tune.spaces")
HOROVOD, TRAINING = spaces.HOROVOD, spaces.TRAINING
trials = pytest.importorskip("hvd_bert.tools.tune.trials")
CYCLE, GROUPS, FUSION = "HOROVOD_CYCLE_TIME=", "--num_groups=", "HOROVOD_FUSION_THRESHOLD="
RATE = "--learning_rate="


def parameters(space: str, *texts: str, flags: Sequence[str] = (), **environ: str) -> list[Any]:
    names = texts or [name for name in spaces.RANGES[space] if name != "fp16"]
    config = command_line.parse([*flags])
    return [spaces.make_parameter(text, space, flags, config, environ, 4) for text in names]


def values_of(space: str, *texts: str, **given: Any) -> dict[str, object]:
    found = parameters(space, *texts, **given)
    return {each.name: each.choices or (each.distribution.low, each.distribution.high) for each in found}


def test_candidates_of_horovods_settings_follow_from_the_users_values() -> None:
    users = {"HOROVOD_CYCLE_TIME": "3.0", "HOROVOD_FUSION_THRESHOLD": str(32 * 2**20)}
    fusion = tuple(size * 2**20 for size in (32, 128, 8, 256))
    found = values_of(HOROVOD, flags=["--num_groups", "8"], **users)
    assert found == {"hierarchical": (0, 1), "cycle": (3, 1, 0.3, 10), "fusion": fusion, "groups": (8, 0, 2)}
    assert values_of(HOROVOD, "fp16", "cycle=5") == {"fp16": ("False", "True"), "cycle": (1, 5)}
    with refused("HOROVOD_CYCLE_TIME=fast"):
        values_of(HOROVOD, HOROVOD_CYCLE_TIME="fast")


def test_ranges_of_the_training() -> None:
    learning_rate, batch, *_ = parameters(TRAINING, flags=["--per_device_train_batch_size=4"])
    assert (learning_rate.now, learning_rate.distribution) == (5e-5, FloatDistribution(1e-5, 1e-4, log=True))
    assert (batch.now, batch.choices) == (16, (16, 32, 64))
    seed, schedule = values_of(TRAINING, "seed=1:9", "lr_scheduler_type=linear,cosine").values()
    assert (seed, schedule) == ((1, 9), ("linear", "cosine"))


def test_hierarchical_allreduce_is_tested_where_it_has_an_effect(tmp_path: Path) -> None:
    (hierarchical,) = parameters(HOROVOD, "hierarchical")
    run, on_gpus = reading.read(make_run(tmp_path / "run", "horovod", 4)), {"places": [{"device": "cuda:0"}]}
    for found, tested in (
        (replace(run, hosts=["a", "b"], **on_gpus), True),
        (replace(run, hosts=["a", "b"]), False),  # on CPUs
        (replace(run, hosts=["a", "b", "c", "d"], **on_gpus), False),
        (replace(run, **on_gpus), False),
    ):
        assert hierarchical.has_effect(found) == tested


# Parts of a setting -> their effect on the speed of a pretended run.
SPEEDS: dict[str, float] = {}


def label_of(folder: Path, command: Sequence[str], environ: Mapping[str, str]) -> str:
    """The run's setting, without fp16."""
    words = [word for word in command if word.startswith((GROUPS, RATE))]
    return " ".join([*words, *(f"{name}={environ[name]}" for name in (CYCLE[:-1], FUSION[:-1]) if name in environ)])


def made(folder: Path, given: Mapping[str, str], label: str) -> Path:
    """A finished run. Its F1 is best with a learning rate of 3e-5."""
    effects = [effect for word, effect in SPEEDS.items() if word in label.split()]
    f1 = 80 - 10 * abs(math.log(float(given.get("learning_rate", 5e-5)) / 3e-5))
    facts = {"best": {"metric": "f1"}, "lower_is_better": ["eval_loss"], "processes": [{"real_s": 30.0}]}
    speed = 10.0 * math.prod(effects)
    return make_run(folder, "horovod", 2, windows_per_s=speed, scores={"f1": f1, "total": 15}, **facts)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> PretendedRuns:
    runs = PretendedRuns(label_of, made)
    SPEEDS.clear()
    monkeypatch.setattr(one_run, "start_and_wait", runs)
    monkeypatch.setattr(launching, "program_path", lambda name: name)
    monkeypatch.setattr(Machine, "here", lambda environ: Machine(cores=2, gpus=0, allocation=None))
    for word, *_ in spaces.KNOBS.values():
        monkeypatch.delenv(word.removesuffix("="), raising=False)
    return runs


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., int]:
    def begin(*flags: str) -> int:
        space = () if "--space" in flags else ("--range=cycle", "--range=groups", "--range=fusion")
        return tune.main([f"--out={tmp_path / 'out'}", *(() if "--range" in flags else space), *flags])

    return begin


def record(folder: Path) -> dict[str, object]:
    return json.loads((folder / "out" / "tune.json").read_text())


def test_the_settings_to_use_are_printed(pretended, start, tmp_path, capsys) -> None:
    SPEEDS.update({f"{CYCLE}3": 1.1, f"{GROUPS}2": 1.05, f"{FUSION}8388608": 0.5, f"{CYCLE}10": 0.5})
    SPEEDS.update({f"{FUSION}{size * 2**20}": 0.99 for size in (32, 256)})
    assert start("--launcher", "mpirun") == 0
    output, warnings = capsys.readouterr()
    assert "    export HOROVOD_CYCLE_TIME=3\n    python -m hvd_bert.train ... --num_groups=2\n" in output
    assert "it gains +15.5 % (+15.5 % to +15.5 %, 6 pairs) over the defaults" in output and "once in 64 times" in output
    assert "    mpirun -x HOROVOD_CYCLE_TIME ...\n" in output and "Tune with your own" in warnings
    first, *pairs = pretended.started
    assert first == "" and pairs[:4] == ["", f"{CYCLE}0.3", f"{CYCLE}0.3", ""], "in alternating order"
    assert pairs.count(f"{FUSION}8388608") == 1, "ended early, after the first pair"
    assert undocumented(record(tmp_path), "tune.json", "sweep.json", without=("same",)) == []
    result = record(tmp_path)["result"]
    assert result["set"] == [f"{CYCLE}3", f"{GROUPS}2"] and len(result["ratios"]) == 6
    assert not list((tmp_path / "out").rglob("model.safetensors"))
    page = (tmp_path / "out" / "tune.html").read_text()
    assert "ended early" in page and page.count("data:image/png") == 4


@pytest.mark.parametrize(
    ("ratios", "gains"),
    [  # two pairs of the defaults with themselves, then new ones; None: the run fails
        ((1.0, 1.0, 1.02, 1.02, 1.02), True),
        ((1.0, 0.97, 1.02, 1.02, 1.02), False),  # within the noise
        ((1.0, 1.0, 1.009, 1.009, 1.009), False),  # less than a percent
        ((1.0, 1.0, 1.09, 0.99, 1.09), False),
        ((1.0, 1.0, 1.09, None), False),
    ],
)
def test_a_gain_counts_if_it_is_above_the_noise_in_every_new_pair(ratios, gains) -> None:
    def pair(setting: object, number: int) -> float:
        if (ratio := next(left)) is None:
            raise trials.TrialFailed("killed")
        return ratio

    left, launched = iter(ratios), SimpleNamespace(launcher=lambda point: "horovodrun")
    runs = SimpleNamespace(pair=pair, first=lambda: None, point=None, launching=launched)
    study = optuna.create_study(direction="maximize")
    study.add_trial(optuna.create_trial(value=1.1))
    result, text = trials.Speed(runs, 3).answer(study, (f"{CYCLE}3",))
    assert bool(result["set"]) == gains == ("export HOROVOD_CYCLE_TIME=3" in text) == ("Keep the defaults" not in text)
    assert trials.Speed(runs, 3).answer(study, ())[1] == "Keep the defaults: no setting was faster."


def test_an_interrupted_tuning_resumes(pretended, start, tmp_path, capsys) -> None:
    SPEEDS.update({f"{CYCLE}3": 1.1})
    pretended.ends = {f"{GROUPS}8": Stopped("SIGINT")}
    assert start() == 75
    assert "Stopped by SIGINT. Rerun the same command to resume." in capsys.readouterr().out
    pretended.started, pretended.ends = [], {f"{GROUPS}8": 1, f"{GROUPS}2": None}
    assert start() == 0
    output = capsys.readouterr().out
    assert "5 of 20 trials are done" in output and "bad input (" in output and "it took longer than" in output
    assert f"{GROUPS}8" in pretended.started and f"{CYCLE}10" not in pretended.started
    found, pretended.started = record(tmp_path)["result"], []
    assert start("--minutes", "0") == 0 and record(tmp_path)["result"] == found and not pretended.started
    assert start("--steps", "20") == 2
    assert "holds a tuning with other settings: the trainer's flags was" in capsys.readouterr().err


@pytest.mark.parametrize("space", ["horovod", "training"])
@pytest.mark.parametrize(("flag", "value"), [("--minutes", "0.0001"), ("--trials", "1")])
def test_a_search_without_any_trial_gives_no_advice(pretended, start, tmp_path, capsys, space, flag, value) -> None:
    assert start("--space", space, flag, value) == 2
    output, message = capsys.readouterr()
    assert f"{flag} {value}: " in message and "Keep" not in output
    assert record(tmp_path)["result"] is None and len(pretended.started) == 1


def test_failing_defaults_end_the_tuning(pretended, start, capsys) -> None:
    for status, words in ((1, "a run with the defaults failed: bad input ("), (2, "hvd_bert: bad input\n")):
        pretended.ends = {"": status}
        assert start() == status and words in capsys.readouterr().err


TRAIN = ("--space", "training", "--trials=12", "--range=learning_rate=1e-5:1e-4:log", "--range=num_train_epochs=2,3")


def after_an_epoch(folder: Path, given: Mapping[str, str]) -> None:
    """What a run of several epochs has written after its first: F1 is half of the final one."""
    f1 = 40 - 5 * abs(math.log(float(given.get("learning_rate", 5e-5)) / 3e-5))
    rows = [{"step": 10, "epoch": 1.0, "eval_f1": f1}, {"step": 11, "loss": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 12, "eval_f1')


def tried(folder: Path) -> list[object]:
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "study.log"))
    storage = optuna.storages.JournalStorage(backend)
    found = optuna.load_study(study_name=None, storage=storage).get_trials()
    return [(trial.params, trial.state.name, trial.values) for trial in found if trial.values]


def test_the_best_training_is_found_and_bad_ones_end_early(pretended, start, tmp_path, capsys) -> None:
    pretended.during = after_an_epoch
    assert start(*TRAIN) == 0
    result, output = record(tmp_path)["result"], capsys.readouterr().out
    (rate, *_) = [word for word in result["set"] if word.startswith(RATE)]
    assert 2e-5 < float(rate.removeprefix(RATE)) < 4e-5 and result["value"] > result["without_tuning"]
    assert undocumented(record(tmp_path), "tune.json", "sweep.json", without=("same",)) == []
    assert len(list((tmp_path / "out").rglob("model.safetensors"))) == 1 and rate in output
    states = [state for _, state, _ in tried(tmp_path / "out")]
    assert states[:5] == ["COMPLETE"] * 5 and "PRUNED" in states and len(states) == 12


def test_lists_of_values_are_tried_in_all_combinations(pretended, start, tmp_path) -> None:
    words = ("--space", "training", "--range=learning_rate=1e-5,3e-5", "--range=num_train_epochs=2,3,4")
    assert (start(*words, "--trials=5"), start(*words, "--trials=9")) == (0, 0)
    assert len({tuple(params.items()) for params, _, _ in tried(tmp_path / "out")}) == 6


def test_the_first_trials_cover_each_range(pretended, start, tmp_path) -> None:
    ranges = ("learning_rate=1e-5:1e-4:log", "num_train_epochs=2:9", "global_batch=16,32,64")
    assert start("--space", "training", "--pruner=none", "--trials=9", *(f"--range={text}" for text in ranges)) == 0
    _, *found = [params for params, *_ in tried(tmp_path / "out")]
    assert sorted(int(8 * math.log10(params["learning_rate"] / 1e-5)) for params in found) == [*range(8)]
    assert sorted(params["num_train_epochs"] for params in found) == [*range(2, 10)]
    assert sorted(Counter(params["global_batch"] for params in found).values())[0] == 2


def test_ties_are_called_ties(pretended, start, tmp_path, capsys) -> None:
    assert start("--space", "training", "--range=learning_rate=3e-5,5e-5", "--range=num_train_epochs=2,3,4") == 0
    output, result = capsys.readouterr().out, record(tmp_path)["result"]
    assert "(the same as 2 others on 15 questions: trial " in output and len(result["tied"]) == 2
    found = [(params["learning_rate"], values) for params, _, values in tried(tmp_path / "out")]
    assert [found[number] for number in result["tied"]] == [(3e-5, [result["value"]])] * 2


@pytest.mark.parametrize("killed", [4, -1], ids=["spread", "TPE"])
def test_a_killed_search_tries_what_an_uninterrupted_one_does(pretended, start, tmp_path, killed) -> None:
    assert start(*TRAIN) == 0
    expected, words = tried(tmp_path / "out"), pretended.started[killed]
    (tmp_path / "out").rename(tmp_path / "whole")
    pretended.ends = {words: Stopped("SIGTERM")}
    assert start(*TRAIN) == 75
    pretended.ends = {}
    with (tmp_path / "out" / "study.log").open("a") as log:
        log.write('{"op_code":')  # as if it had been killed
    (tmp_path / "out" / "study.log.lock").symlink_to("study.log")
    assert start(*TRAIN) == 0 and tried(tmp_path / "out") == expected


@pytest.mark.parametrize(
    ("finished", "damage", "status"),
    [
        pytest.param(True, lambda lines: [], 2, id="empty"),
        pytest.param(True, lambda lines: lines[1:], 2, id="first line lost"),
        pytest.param(True, lambda lines: [*lines[:3], b'{"op_code"\n', *lines[4:]], 2, id="damaged line"),
        pytest.param(False, lambda lines: [bytes(500)], 2, id="no study"),
        pytest.param(False, lambda lines: [b'{"op_code":0,"worker_id":"22'], 0, id="cut by a kill"),
    ],
)
def test_a_damaged_study_is_refused_but_not_a_cut_one(pretended, start, tmp_path, capsys, finished, damage, status):
    pretended.ends = {} if finished else {"": Stopped("SIGTERM")}
    assert start(*TRAIN, "--trials=2") == (0 if finished else 75)
    pretended.ends, before, study = {}, record(tmp_path), tmp_path / "out" / "study.log"
    damaged = b"".join(damage(study.read_bytes().splitlines(keepends=True) if finished else []))
    study.write_bytes(damaged)
    capsys.readouterr()
    assert start(*TRAIN, "--trials=2") == status
    if status:
        check_refusal(capsys.readouterr().err.rstrip("\n"), "study.log")
        assert study.read_bytes() == damaged and record(tmp_path) == before


@pytest.mark.parametrize("package", ["optuna", "scipy"])
def test_a_missing_package(start, capsys, monkeypatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert start() == 2
    assert f"{package} is not installed. Run `pip install .[search]`." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--ranks", "1"], "--ranks 1"),
        (["--range", "speed=1"], "--range speed=1"),
        (["--range", "cycle=fast"], "--range cycle=fast"),
        (["--space", "training", "--range", "seed"], "--range seed"),
        (["--space", "training", "--range", "per_device_train_batch_size=auto,8"], "does not work with --range"),
        (["--space", "training", "--range", "warmup_ratio=0.1:2"], "--warmup_ratio 2"),
        (["--space", "training", "--range", "learning_rate=0:1:log"], "learning_rate=0:1:log"),
        (["--space", "training", "--range", "output_dir=a,b"], "--output_dir"),
        (["--space", "training", "--max_steps", "9"], "--max_steps"),
        (["--space", "training", "--steps", "9"], "--steps"),
        (["--strategy", "ddp"], "--strategy"),
        (["--launcher", "none"], "--launcher none"),
        (["--train_file", "nowhere.json"], "--train_file nowhere.json"),
        (["--ranks", "2"], "HOROVOD_AUTOTUNE=1"),
    ],
)
def test_bad_input(pretended, start, capsys, monkeypatch, flags: list[str], named: str) -> None:
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "1" if "AUTOTUNE" in named else "0")
    assert start(*flags) == 2
    assert named in capsys.readouterr().err and not pretended.started
