"""benchmarks/gpu_acceptance.py: its table and exit status, and that each kind of check can fail."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import acceptance_attention
import acceptance_horovod
import acceptance_place
import acceptance_speed
import acceptance_steps
import acceptance_training
import gpu_acceptance
import pytest
import torch
from acceptance_place import NotHere, Outcome, OutOfTime, Place
from refusals import refused

from hvd_bert.errors import UserError
from hvd_bert.model.attention import by_window

ROOT, ROUNDS = Path(__file__).resolve().parents[2], 2


def place(tmp_path: Path, device: str = "cpu", gpus: int = 0, seconds: float = 900, gpu: str = "") -> Place:
    return Place(device, gpus, gpu, tmp_path, time.monotonic() + seconds, ROUNDS)


def raises(error: Exception) -> Any:
    def check(_: Place) -> Outcome:
        raise error

    return check


CHECKS = {
    "right": ("> 1", lambda _: Outcome("2", figures={"value": 2})),
    "wrong": ("> 1", lambda _: Outcome("0", False)),
    "raises": ("> 1", raises(UserError("line 1\nRuntimeError: no | kernel\nended with status 1"))),
    "of two": ("> 1", raises(NotHere("needs 2 GPUs"))),
    "without a goal": ("-", lambda _: Outcome("3", None)),
    "late": ("> 1", raises(OutOfTime("no time was left"))),
}


def test_every_check_is_a_line_and_a_failure_keeps_none_from_running(tmp_path, capsys):
    words = ["--device", "cpu", "--out"]
    assert gpu_acceptance.main([*words, str(tmp_path / "out")], CHECKS) == 1
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.replace("\\|", "/").split("|")[1:-1]] for line in table]
    assert [row[3] for row in rows[2:]] == ["pass", "FAIL", "FAIL", "not here", "-", "out of time"]
    assert rows[4][2] == "UserError: RuntimeError: no / kernel"
    record = json.loads((tmp_path / "out/gpu_acceptance.json").read_text())
    assert record["lines"][0]["figures"] == {"value": 2}
    assert record["lines"][2]["figures"]["error"].startswith("line 1\n")
    assert record["versions"]["torch"] == version("torch")  # of a CUDA build it lacks "+cu130"
    assert gpu_acceptance.main([*words, str(tmp_path / "new"), "--only", "right", "without"], CHECKS) == 0
    assert "0 of 2 checks failed" in capsys.readouterr().out
    assert gpu_acceptance.main([*words, str(tmp_path / "late"), "--only", "late"], CHECKS) == 1
    with refused("not empty"):
        gpu_acceptance.main([*words, str(tmp_path)], CHECKS)


def test_without_a_gpu_one_line_and_status_3(tmp_path, capsys, monkeypatch):
    for program, words in (
        ("print('[]')", "no GPU: torch"),
        ("raise RuntimeError('device is busy')", "cannot use it: RuntimeError: device is busy"),
    ):
        monkeypatch.setattr(gpu_acceptance, "GPU_NAMES", program)
        assert gpu_acceptance.main(["--out", str(tmp_path / "out")], CHECKS) == 3
        said = capsys.readouterr()
        assert words in said.err and said.err.count("\n") == 1 and not said.out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "program", ["sleep 60", "trap '' TERM; sleep 60 & wait; sleep 60"], ids=["ends at SIGTERM", "ignores it"]
)
def test_a_command_is_ended_at_the_limit_and_its_line_is_out_of_time(tmp_path, monkeypatch, program):
    monkeypatch.setattr(acceptance_place, "GRACE_S", 1.0)
    machine = place(tmp_path, seconds=3)
    lines = [
        gpu_acceptance.run_check(name, "-", lambda it: it.run("it", ["bash", "-c", program]), machine) for name in "ab"
    ]
    assert [line.result for line in lines] == ["out of time"] * 2
    assert -2 < machine.left_s() < 1.5 and lines[1].seconds < 0.5


def test_rounds_that_were_measured_count_when_the_time_ends(tmp_path, monkeypatch):
    def measure(*_: object) -> dict[str, Any]:
        if next(calls) == 5:
            raise OutOfTime("at the limit")
        return {"figures": {}}

    calls = itertools.count(1)
    monkeypatch.setattr(acceptance_speed, "measure_ours", measure)
    monkeypatch.setattr(acceptance_speed, "has_peer", lambda: False)
    rounds, machine = acceptance_speed.Rounds(), replace(place(tmp_path), rounds=3)
    assert [len(rounds.read(machine, name)) for name in acceptance_speed.OURS] == [2, 2]
    with pytest.raises(OutOfTime):
        rounds.read(machine, next(iter(acceptance_speed.PEERS)))


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_the_script_needs_a_driver_before_it_installs_anything():
    words = ["bash", str(ROOT / "scripts/gpu_acceptance.sh")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.count("\n") == 1 and "no NVIDIA driver" in done.stderr


WRONG = {
    "sees no borders of windows": lambda q, k, v, w, dropout, scaling: by_window(
        q, k, v, replace(w, lengths=[sum(w.lengths)]), dropout, scaling
    ),
    "without dropout": lambda q, k, v, w, dropout, scaling: by_window(q, k, v, w, 0.0, scaling),
    "drops others in the backward pass": lambda *given: (
        (kept := by_window(*given)) - kept.detach() + by_window(*given).detach()
    ),
    "of more dropout": lambda q, k, v, w, dropout, scaling: by_window(q, k, v, w, dropout, scaling) * 0.9,
    "NaN in a gradient": lambda q, k, v, w, dropout, scaling: (
        by_window(q, k, v, w, dropout, scaling) + 0 * (q - q.detach()).sqrt()
    ),
}


@pytest.mark.parametrize("kernel", WRONG, ids=list(WRONG))
def test_wrong_kernels_are_found_next_to_right_ones(monkeypatch, kernel):
    tested = [("right", by_window, None), ("it", WRONG[kernel], None)]
    monkeypatch.setattr(acceptance_attention, "kernels", lambda *_: tested)
    outcome = acceptance_attention.check("cpu", "fp32")
    assert outcome.passed is False and outcome.found.startswith("wrong: it")


class Horovod:
    """In place of Horovod: `change` is what its sums make of the right ones; without it the hooks send nothing."""

    Sum = Average = None

    def __init__(self, change: Any) -> None:
        self.change = change or (lambda tensor: tensor)
        self._handles = [0, 1] if change else []
        self._register_hooks = lambda: None
        self.skip_synchronize = contextlib.nullcontext

    def allreduce(self, tensor: Any, prescale_factor: float = 1.0, **__: Any) -> Any:
        return self.change(tensor * prescale_factor)

    def grouped_allreduce(self, tensors: Any, **_: Any) -> Any:
        return [self.change(tensor) for tensor in tensors]

    def allreduce_async_(self, tensor: Any, prescale_factor: float, **_: Any) -> None:
        tensor.copy_(self.change(tensor * prescale_factor))

    def DistributedOptimizer(self, optimizer: Any, named_parameters: Any) -> Any:
        self.parameters = [parameter for _, parameter in named_parameters]
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad
        return self

    def synchronize(self, *handles: Any) -> None:
        for parameter in [] if handles else self.parameters:
            parameter.grad = self.change(parameter.grad)


@pytest.mark.parametrize(
    ("change", "right"),
    [
        (lambda tensor: tensor.clone(), [True, True, True]),
        (lambda tensor: tensor * math.nan, [False, False, False]),
        (lambda tensor: tensor * (1 + 2**-20), [False, False, False]),
        (None, [True, True, False]),
    ],
    ids=["right", "NaN", "off by a little", "hooks that send nothing"],
)
def test_wrong_sums_and_hooks_of_horovod_are_found(change, right):
    hvd, device = Horovod(change), torch.device("cpu")
    sums = acceptance_horovod.sums(hvd, device, torch.float32)
    waits = acceptance_horovod.waits_for_products(hvd, device)
    assert [sums, waits, acceptance_horovod.hooks(hvd, device)] == right


@pytest.mark.slow
def test_horovods_sums_and_hooks_are_right_here_and_not_needed(tmp_path, monkeypatch):
    pytest.importorskip("horovod")
    outcome = acceptance_horovod.check_apart(place(tmp_path))
    assert outcome.passed and outcome.found.count("exact") == 2
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotHere):
        acceptance_horovod.check_apart(place(tmp_path))


def test_torchs_reports_of_waits_are_counted(monkeypatch):
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with acceptance_steps.counted_waits() as waits:
        warnings.warn("called a synchronizing CUDA operation (warn_or_error_on_sync)", stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation (warn_or_error_on_sync)", stacklevel=1)
        warnings.warn("another", stacklevel=1)
    assert (len(waits), modes) == (2, ["warn", "default"])


def test_measurements_fail_below_their_goals_and_pass_at_them(tmp_path, monkeypatch):
    """The figures of the programs are written here: 2 H100, with the speed of `speed` times the goals."""
    monkeypatch.setattr(acceptance_speed, "has_peer", lambda: True)
    monkeypatch.setattr(acceptance_speed, "window_flops", lambda place: 2e11)
    for speed, waits, result in ((1.0, 0, "pass"), (0.99, 1, "FAIL"), (math.nan, 1, "FAIL")):
        machine = place(tmp_path / str(speed), "cuda", 2, gpu="NVIDIA H100 80GB HBM3")
        machine.out.mkdir()
        rounds = acceptance_speed.Rounds()
        rounds._measured = True
        figures = {
            "windows_per_s": 900,
            "useful_gflops": speed * 650 * 2e11 / 1e9,
            "mfu": 0.5,
            "tokens_per_s": 1300 * speed,
        }
        for name in acceptance_speed.OURS:
            rounds.records[name] = [{"figures": {key: {"median": value} for key, value in figures.items()}}] * 3
        for name in acceptance_speed.PEERS:
            rounds.records[name] = [{"figures": {"tokens_per_s": {"median": 1000.0}}}] * 3
        steps = {"waits": waits, "steps": 9, "training_per_s": 900.0, "evaluation_per_s": 1350 * speed}
        scaling = {"figures": {"windows_per_s": {"median": 2 * 0.97 * 900 * speed}}}
        for name, record in {"steps": steps, "scaling": scaling}.items():
            machine.file(name).write_text(json.dumps(record))
        checks = {
            "throughput": partial(acceptance_speed.throughput, rounds=rounds, name=next(iter(acceptance_speed.OURS))),
            "peer": partial(acceptance_speed.over_peer, rounds=rounds),
            "scaling": partial(acceptance_speed.scaling, rounds=rounds),
            "waits": acceptance_speed.host_waits,
            "evaluation": acceptance_speed.evaluation,
        }
        lines = {name: gpu_acceptance.run_check(name, "-", check, machine) for name, check in checks.items()}
        assert {name: line.result for name, line in lines.items()} == dict.fromkeys(checks, result), lines


def test_what_needs_two_gpus_is_not_run_on_one(tmp_path):
    machine = place(tmp_path, "cuda", 1)
    for name, (goal, check) in gpu_acceptance.all_checks().items():
        if "all GPUs" in name or "2 GPUs" in name:
            assert gpu_acceptance.run_check(name, goal, check, machine).result == "not here"
    assert not list(tmp_path.iterdir())


def test_a_line_passes_at_the_first_stage_and_names_the_next():
    stages = acceptance_speed.find_stages("NVIDIA H100 80GB HBM3")
    for values, passed, said in (
        ([780, 500, 900], True, "it: stage 1 of 3 (650), next 1,150"),
        ([1700, 1600], True, "it: stage 3 of 3 (1,600)"),
        ([1700, math.nan, 1700], False, "it: stage 0 of 3, next 650"),
    ):
        outcome = acceptance_speed.staged("it", values, stages, {})
        assert (outcome.passed, outcome.found) == (passed, said)
    assert acceptance_speed.staged("it", [1700], (), {}).passed is None


@pytest.mark.parametrize(
    ("losses", "skips", "passed"),
    [
        ([4.0, 3.1, 2.0], 0, True),
        ([4.0, 3.4, 2.0], 3, False),
        ([None, 3.25, 2.0], 3, True),
        ([None, 3.0, 2.0], 0, False),
        ([None, None, None], 3, False),
        ([4.0, math.nan, 2.0], 0, False),
    ],
)
def test_skipped_steps_are_not_compared_and_all_others_must_agree(losses, skips, passed):
    assert acceptance_training.compared([4.0, 3.0, 2.0], losses, 0.05, skips).passed is passed


@pytest.mark.parametrize("reference", [[], [4.0, None], [4.0]])
def test_a_reference_must_have_all_losses(reference):
    with pytest.raises(UserError):
        acceptance_training.compared(reference, [4.0, 3.0] if reference else [], 0.05, 3)


def test_the_users_choice_of_gpus_holds(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,GPU-abc")
    machine = place(tmp_path, "cuda", 3)
    assert machine.ranks == 2
    assert machine.environment("cuda", 2)["CUDA_VISIBLE_DEVICES"] == "5,7"
    assert machine.environment("cpu", 1)["CUDA_VISIBLE_DEVICES"] == ""
    assert str(ROOT) in machine.environment("cuda", 1)["PYTHONPATH"].split(os.pathsep)


@pytest.mark.campaign  # it starts some 20 commands; the tests above have all of it but the commands
def test_all_checks_on_this_cpu(tmp_path):
    pytest.importorskip("accelerate", reason="needs env/setup.sh --bench")
    words = [sys.executable, str(ROOT / "benchmarks/gpu_acceptance.py"), "--device", "cpu", "--minutes", "30"]
    done = subprocess.run([*words, "--out", str(tmp_path / "out")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
