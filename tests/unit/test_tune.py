"""Tuning: the search with known speeds, knobs without effect, the command. No rank is started."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from documented import undocumented
from made_runs import PretendedRuns, make_run
from msgspec.structs import replace
from tables import each, refused

from hvd_bert.config.command_line import parse
from hvd_bert.tools.bench import launching, one_run
from hvd_bert.tools.bench.launching import Launching, Machine
from hvd_bert.tools.bench.one_run import Stopped
from hvd_bert.tools.bench.points import Point as Launched
from hvd_bert.tools.runs import reading
from hvd_bert.tools.runs.run import Run
from hvd_bert.tools.tune import __main__ as tune
from hvd_bert.tools.tune import search as knobs
from hvd_bert.tools.tune.search import FASTER, NO_TIME, NOT_FASTER, SLOWER, Pair, Search, Setting, Trial

CYCLE, GROUPS, FUSION = "HOROVOD_CYCLE_TIME=", "--num_groups=", "HOROVOD_FUSION_THRESHOLD="
CANDIDATES = [[f"{CYCLE}0.3", f"{CYCLE}3", f"{CYCLE}10"], [f"{GROUPS}2", f"{GROUPS}8"], [f"{FUSION}8388608"]]


# The search


@dataclass
class SimulatedMachine:
    """A simulated machine. Each part of a setting multiplies the speed by its effect, and `jitter` adds normal noise.
    Every run is 1 % slower than the one before it."""

    effects: Mapping[str, float]
    jitter: float = 0.0
    seed: int = 0
    time_for: int = 1000
    measured: list[tuple[str, Setting, int]] = field(default_factory=list)
    decided: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random, self.now = random.Random(self.seed), 1.0

    def speed(self, setting: Setting) -> float:
        self.now *= 0.99
        speed = self.now * self.random.gauss(1, self.jitter)
        for word in setting:
            speed *= self.effects.get(word, 1.0)
        return speed

    def measure(
        self, kind: str, candidate: Setting, baseline: Setting, repeat: int, then: int | None = None
    ) -> Pair | None:
        if then is not None and len(self.measured) + 1 + then > self.time_for:
            return None
        self.measured.append((kind, candidate, repeat))
        if len(self.measured) % 2:  # in alternating order, like the real one
            return Pair(1 / (self.speed(baseline) / self.speed(candidate)))
        return Pair(self.speed(candidate) / self.speed(baseline))

    def search(self, pairs: int = 6) -> Search:
        return Search(self.measure, pairs, self.decided.append)


def test_the_fastest_settings_are_found_and_combined() -> None:
    machine = SimulatedMachine(
        {f"{CYCLE}3": 1.08, f"{CYCLE}10": 1.04, f"{GROUPS}8": 1.06, f"{GROUPS}2": 0.9}, jitter=0.004
    )
    search = machine.search()
    assert 0.01 <= search.measure_noise() < 0.03  # the drift is part of it
    best = search.run(CANDIDATES)
    assert best == (f"{CYCLE}3", f"{GROUPS}8")
    compared = search.compare(best)
    assert compared.verdict == FASTER and len(compared.ratios) == 6
    assert compared.gain == pytest.approx(1.08 * 1.06 - 1, abs=0.01)
    # Groups were tested on top of the best cycle, and compared with it.
    assert {point.baseline for point in machine.decided[3:]} == {(f"{CYCLE}3",), best}


def test_without_any_effect_the_defaults_are_kept() -> None:
    wrong = 0
    for seed in range(100):
        search = SimulatedMachine({}, 0.02, seed).search()
        search.measure_noise()
        best = search.run(CANDIDATES)
        wrong += bool(best) and search.compare(best).verdict == FASTER
    assert wrong <= 2  # all six pairs are faster by chance: 1 in 64, if anything was chosen


def test_a_gain_within_the_noise_does_not_count() -> None:
    search = SimulatedMachine({f"{CYCLE}3": 1.02}).search()
    for noise, verdict in ((0.03, NOT_FASTER), (0.015, FASTER)):
        search.noise = noise
        compared = search.compare((f"{CYCLE}3",))
        assert min(compared.ratios) > 1 and compared.verdict == verdict


def test_bad_points_end_early_and_the_final_comparison_has_its_time() -> None:
    effects = {f"{CYCLE}10": 0.7, f"{CYCLE}0.3": 0.985, f"{CYCLE}3": 1.5, f"{GROUPS}8": 1.5}
    machine = SimulatedMachine(effects, time_for=13)  # 6 pairs are reserved for the end
    search = machine.search()
    search.noise = 0.04
    assert search.run([[f"{CYCLE}10", f"{CYCLE}0.3", f"{CYCLE}3"], [f"{GROUPS}8"]]) == (f"{CYCLE}3",)
    verdicts = [(point.verdict, len(point.ratios)) for point in machine.decided]
    assert verdicts == [(SLOWER, 1), (NOT_FASTER, 2), (FASTER, 3), (NO_TIME, 1)]
    search.compare((f"{CYCLE}3",))
    assert len(machine.measured) == 13


# The knobs


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of 4 ranks on the CPUs of one host, with 4 MB of gradients."""
    return reading.read(make_run(tmp_path / "run", "horovod", 4))


def candidates_of(run: Run, environ: Mapping[str, str], *flags: str) -> list[str]:
    config = parse([*flags])
    return [word for knob in knobs.KNOBS for word in knobs.candidates(knob, knob.value(environ, config), run)]


def test_candidates_follow_from_the_hosts_and_the_users_values(run: Run) -> None:
    hierarchical = "HOROVOD_HIERARCHICAL_ALLREDUCE=1"
    on_gpus = {"places": [{"device": "cuda:0"}]}
    for found, tested in (
        (replace(run, hosts=["a", "b"], **on_gpus), True),
        (replace(run, hosts=["a", "b"]), False),  # on CPUs
        (replace(run, hosts=["a", "b", "c", "d"], **on_gpus), False),
        (replace(run, **on_gpus), False),
    ):
        assert (hierarchical in candidates_of(found, {})) == tested
    users = {"HOROVOD_CYCLE_TIME": "3.0", "HOROVOD_FUSION_THRESHOLD": str(32 * 2**20)}
    fusion = [f"HOROVOD_FUSION_THRESHOLD={size * 2**20}" for size in (128, 8, 256)]
    own = [f"{CYCLE}1", f"{CYCLE}0.3", f"{CYCLE}10", *fusion, f"{GROUPS}0", f"{GROUPS}2"]
    assert candidates_of(run, users, "--num_groups", "8") == [*own, "--fp16_allreduce=True"]
    with refused("HOROVOD_CYCLE_TIME=fast"):
        candidates_of(run, {"HOROVOD_CYCLE_TIME": "fast"})


def test_variables_reach_the_ranks_on_other_hosts() -> None:
    hosts, each = "a:1,b:1", Launched("horovod", 2, "weak", 1, 0)
    environ = knobs.environment((f"{CYCLE}3", f"{GROUPS}8"), {"PATH": "/bin"})
    assert environ == {"PATH": "/bin", "HOROVOD_CYCLE_TIME": "3"}
    launch = Launching("mpirun", (), hosts, Machine(cores=2, gpus=0, allocation=None))
    command = launch.command(each, [], knobs.exported(environ))
    assert command[command.index("-x") + 1] == "HOROVOD_CYCLE_TIME"
    assert "-x" not in launch.command(each, [], knobs.exported({}))


# The command


# Parts of a setting -> their effect on the speed of a pretended run.
SPEEDS: dict[str, float] = {}


def label_of(folder: Path, command: Sequence[str], environ: Mapping[str, str]) -> str:
    """The run's setting, without fp16."""
    words = [word for word in command if word.startswith(GROUPS)]
    return " ".join([*words, *(f"{name}={environ[name]}" for name in (CYCLE[:-1], FUSION[:-1]) if name in environ)])


def made(folder: Path, given: Mapping[str, str], label: str) -> Path:
    effects = [effect for word, effect in SPEEDS.items() if word in label.split()]
    return make_run(folder, "horovod", 2, windows_per_s=10.0 * math.prod(effects))


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> PretendedRuns:
    runs = PretendedRuns(label_of, made)
    SPEEDS.clear()
    monkeypatch.setattr(one_run, "start_and_wait", runs)
    monkeypatch.setattr(launching, "program_path", lambda name: name)
    monkeypatch.setattr(Machine, "here", lambda environ: Machine(cores=2, gpus=0, allocation=None))
    for knob in knobs.KNOBS:
        monkeypatch.delenv(knob.key, raising=False)
    return runs


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., int]:
    def begin(*flags: str) -> int:
        defaults = {"--out": str(tmp_path / "out"), "--knobs": "cycle,groups,fusion"}
        return tune.main([*(f"{name}={value}" for name, value in defaults.items() if name not in flags), *flags])

    return begin


def record(folder: Path) -> dict[str, object]:
    return json.loads((folder / "out" / "tune.json").read_text())


def test_the_settings_to_use_are_printed(pretended, start, tmp_path, capsys) -> None:
    SPEEDS.update({f"{CYCLE}3": 1.1, f"{GROUPS}2": 1.05, f"{FUSION}8388608": 0.5})
    assert start("--launcher", "mpirun") == 0
    output, warnings = capsys.readouterr()
    assert "    export HOROVOD_CYCLE_TIME=3\n    python -m hvd_bert.train ... --num_groups=2\n" in output
    assert "it gains +15.5 % (+15.5 % to +15.5 %, 6 pairs) over the defaults" in output and "once in 64 times" in output
    assert "    mpirun -x HOROVOD_CYCLE_TIME ...\n" in output and "Not tested: --fp16_allreduce" in output
    assert "tune with your own" in warnings
    assert pretended.started.count(f"{CYCLE}3 {FUSION}8388608") == 1  # dropped after the first pair
    assert undocumented(record(tmp_path), "tune.json", "sweep.json", without=("same",)) == []
    result = record(tmp_path)["result"]
    assert result["set"] == [f"{CYCLE}3", f"{GROUPS}2"] and len(result["compared"]["ratios"]) == 6
    assert not list((tmp_path / "out").rglob("model.safetensors"))


def test_keep_the_defaults(pretended, start, tmp_path, capsys) -> None:
    SPEEDS.update({f"{CYCLE}3": 1.004})  # less than a percent
    assert start("--knobs", "cycle") == 0
    output = capsys.readouterr().out
    assert f"Keep the defaults: {CYCLE}3 (the best found) gains +0.4 %" in output and "export" not in output
    assert record(tmp_path)["result"]["set"] == []


def test_an_interrupted_tuning_resumes(pretended, start, tmp_path, capsys) -> None:
    SPEEDS.update({f"{CYCLE}3": 1.1})
    pretended.ends = {f"{GROUPS}8": Stopped("SIGINT")}
    assert start() == 75
    assert "Stopped by SIGINT. Rerun the same command to resume." in capsys.readouterr().out
    measured = record(tmp_path)["pairs"]
    pretended.started, pretended.ends = [], {}
    assert start() == 0
    assert f"{len(measured)} pairs from an earlier start" in capsys.readouterr().out
    # Both runs of the interrupted pair are run again, but not the runs before it.
    assert set(pretended.started[:2]) == {f"{CYCLE}3", f"{GROUPS}8 {CYCLE}3"} and f"{CYCLE}10" not in pretended.started
    assert record(tmp_path)["pairs"][: len(measured)] == measured
    found = record(tmp_path)["result"]
    assert start("--minutes", "0") == 0 and record(tmp_path)["result"] == found  # nothing is left to run
    assert start("--steps", "20") == 2
    assert "holds a tuning with other settings: the trainer's flags was" in capsys.readouterr().err


def test_a_failing_setting_is_a_row(pretended, start, tmp_path, capsys) -> None:
    pretended.ends = {f"{GROUPS}8": 1, f"{CYCLE}10": None}
    assert start() == 0
    output = capsys.readouterr().out
    assert "failed: bad input (" in output and "failed: it took longer than" in output
    pretended.ends, pretended.started = {}, []
    assert start() == 0
    assert f"{GROUPS}8" in pretended.started and f"{CYCLE}10" not in pretended.started  # a timeout is not retried


def test_failing_defaults_end_the_tuning(pretended, start, capsys) -> None:
    for status, words in ((1, "a run with the defaults failed: bad input ("), (2, "hvd_bert: bad input\n")):
        pretended.ends = {"": status}
        assert start() == status and words in capsys.readouterr().err


@each(
    ("flags", "named"),
    [
        (["--ranks", "1"], "--ranks 1"),
        (["--knobs", "speed"], "--knobs speed"),
        (["--strategy", "ddp"], "--strategy"),
        (["--num_group", "2"], "--num_groups?"),
        (["--HOROVOD_AUTOTUNE"], "HOROVOD_AUTOTUNE=1"),
        (["--launcher", "none"], "--launcher none"),
        (["--train_file", "nowhere.json"], "--train_file nowhere.json"),
    ],
)
def test_bad_input(pretended, start, capsys, monkeypatch, flags: list[str], named: str) -> None:
    if flags[0] == "--HOROVOD_AUTOTUNE":
        monkeypatch.setenv("HOROVOD_AUTOTUNE", "1")
    assert start(*flags) == 2
    assert named in capsys.readouterr().err and not pretended.started
