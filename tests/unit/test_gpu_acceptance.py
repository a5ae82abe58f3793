"""benchmarks/gpu_acceptance.py: its table and exit status, its commands, and its checks of the kernels on a CPU."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import math
import os
import shlex
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import acceptance_attention
import acceptance_horovod
import acceptance_place
import acceptance_speed
import acceptance_steps
import acceptance_training
import compare_peers
import gpu_acceptance
import pytest
import torch
from acceptance_place import STEPS, NotHere, Outcome, OutOfTime, Place
from tables import each, refused

from hvd_bert.config import command_line
from hvd_bert.errors import UserError
from hvd_bert.model.attention import by_window
from hvd_bert.tools.bench import __main__ as bench_flags

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


@each("program", ["sleep 60", "trap '' TERM; sleep 60 & wait; sleep 60"], ids=["ends at SIGTERM", "ignores it"])
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
    monkeypatch.setattr(acceptance_speed, "ours", measure)
    monkeypatch.setattr(acceptance_speed, "has_peer", lambda: False)
    rounds, machine = acceptance_speed.Rounds(), replace(place(tmp_path), rounds=3)
    assert [len(rounds.of(machine, name)) for name in acceptance_speed.OURS] == [2, 2]
    with pytest.raises(OutOfTime):
        rounds.of(machine, next(iter(acceptance_speed.PEERS)))


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_the_script_needs_a_driver_before_it_installs_anything():
    words = ["bash", str(ROOT / "scripts/gpu_acceptance.sh")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.count("\n") == 1 and "no NVIDIA driver" in done.stderr


@pytest.mark.slow
@each("precision", acceptance_attention.DTYPES)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_kernels_are_right_on_this_cpu(precision):
    assert acceptance_attention.check("cpu", precision).passed


WRONG = {
    "sees no borders of windows": lambda q, k, v, w, dropout, scaling: by_window(
        q, k, v, replace(w, lengths=[sum(w.lengths)]), dropout, scaling
    ),
    "without dropout": lambda q, k, v, w, dropout, scaling: by_window(q, k, v, w, 0.0, scaling),
    "drops others in the backward pass": lambda *given: (
        (kept := by_window(*given)) - kept.detach() + by_window(*given).detach()
    ),
    "of more dropout": lambda q, k, v, w, dropout, scaling: by_window(q, k, v, w, dropout, scaling) * 0.9,
    "NaN without dropout": lambda q, k, v, w, dropout, scaling: (
        by_window(q, k, v, w, dropout, scaling) * (1.0 if dropout else torch.nan)
    ),
    "NaN in a gradient": lambda q, k, v, w, dropout, scaling: (
        by_window(q, k, v, w, dropout, scaling) + 0 * (q - q.detach()).sqrt()
    ),
}


@each("kernel", WRONG)
def test_wrong_kernels_are_found(monkeypatch, kernel):
    monkeypatch.setattr(acceptance_attention, "kernels", lambda *_: [("it", WRONG[kernel], None)])
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


@each(
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


def test_horovods_sums_and_hooks_are_right_here_and_not_needed(tmp_path, monkeypatch):
    pytest.importorskip("horovod")
    outcome = acceptance_horovod.check_apart(place(tmp_path))
    assert (
        outcome.passed
        and outcome.found.count("exact") == 2
        and set(outcome.figures["with"]["right"].values()) == {True}
    )
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


def test_steps_and_evaluation_are_measured(tmp_path):
    out, model = tmp_path / "steps.json", str(acceptance_speed.SAMPLE / "six_layers.json")
    words = [sys.executable, str(ROOT / "benchmarks/acceptance_steps.py"), "--out", str(out), "--steps", "2"]
    words += ["--strategy", "none", "--max_seq_length", "32", "--per_device_train_batch_size", "2", "--model", model]
    subprocess.run(words, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, check=True, timeout=120)
    record = json.loads(out.read_text())
    assert record["waits"] is None and record["evaluation_per_s"] > record["training_per_s"] > 0


class Commands:
    """Stands for the runs: keeps their words, and writes what each would leave."""

    def __init__(self, speed: float = 1.0, losses: dict[str, float] | None = None, has_peer=True, waits=0) -> None:
        self.words: list[list[str]] = []
        self.has_peer, self.waits = has_peer, waits
        self.visible: list[str] = []
        self.speed, self.losses = speed, losses or {}

    def __call__(self, words: list[str], env: dict[str, str], log: Path, timeout_s: float, grace_s: float) -> None:
        self.words.append(list(words))
        self.visible.append(env.get("CUDA_VISIBLE_DEVICES", "all"))
        assert timeout_s > 0
        log.write_text("435.6 MB  Horovod, NCCL, GPU memory  12.3 ms\n")
        name = log.stem
        if "hvd_bert.train" in words:
            config = command_line.parse(words[words.index("hvd_bert.train") + 1 :])
            folder = Path(str(config.train.output_dir))
            folder.mkdir()
            loss = self.losses.get(name, 5.0)
            folder.joinpath("metrics.jsonl").write_text(f'{{"loss": {loss}}}\n' * STEPS)
            folder.joinpath("model.safetensors").write_text("weights")
        elif "hvd_bert.tools.bench" in words:
            flags, _ = bench_flags.parse(words[words.index("hvd_bert.tools.bench") + 1 :])
            speed = self.speed * (2 if "horovodrun" in words[0] else 1)
            speed *= 0.75 if "HOROVOD_ENABLE_ASYNC_COMPLETION" in env else 1
            figures = {"windows_per_s": 900 * speed, "useful_gflops": 2e5 * self.speed, "mfu": 0.6 * self.speed}
            figures |= {"matmul_utilization": 0.7, "tokens_per_s": 2500 * self.speed}
            record: dict[str, Any] = {"figures": {key: {"median": value} for key, value in figures.items()}}
            flags.json.write_text(json.dumps(record | {"memory_bytes": [2**34], "memory_over_needed": 1.2}))
        elif words[1].endswith("hf_trainer.py"):
            row = {"step_s": 0.08, "loss": 1.0, "tokens": 100}
            Path(words[words.index("--times_file") + 1]).write_text(json.dumps([row] * 100))
        elif words[1].endswith("acceptance_steps.py"):
            bench_flags.parse(words[words.index("--out") + 2 :])
            record = {"waits": self.waits, "steps": 9, "training_per_s": 900.0, "evaluation_per_s": 2000 * self.speed}
            record["reserved_bytes"] = 2**33 if "PYTORCH_ALLOC_CONF" in env else 2**34
            Path(words[words.index("--out") + 1]).write_text(json.dumps(record))
        elif words[1].endswith("campaign.py"):
            bench_flags.parse(words[words.index("--out") + 2 :])
            kernel, counts = {"name": "flash", "share": 0.3}, {"launches_per_step": 1100.0, "busy_ms_per_step": 5.5}
            Path(words[words.index("--out") + 1]).write_text(json.dumps(counts | {"kernels": [kernel] * 10}))


def lines_of(machine: Place, monkeypatch: pytest.MonkeyPatch, commands: Commands) -> dict[str, gpu_acceptance.Line]:
    monkeypatch.setattr(compare_peers, "run", commands)
    monkeypatch.setattr(acceptance_speed, "has_peer", lambda: commands.has_peer)
    monkeypatch.setattr(acceptance_speed, "prepare_peer", lambda place: (Path("model"), Path("windows")))
    monkeypatch.setattr(acceptance_speed, "window_flops", lambda place: 2e11)
    checks = acceptance_training.CHECKS | acceptance_speed.checks()
    return {name: gpu_acceptance.run_check(name, goal, check, machine) for name, (goal, check) in checks.items()}


def test_two_a100(tmp_path, monkeypatch):
    commands = Commands()
    lines = lines_of(place(tmp_path, "cuda", 2, gpu="NVIDIA A100-SXM4-80GB"), monkeypatch, commands)
    failed = {name: line.found for name, line in lines.items() if line.result not in ("pass", "-")}
    assert not failed
    assert [name for name, line in lines.items() if line.result == "-"] == WITHOUT_A_GOAL
    assert lines["memory with expandable segments"].found == "8.00 GiB reserved, 16.00 without; 1.000 x windows/s"
    assert lines["asynchronous completion on 2 GPUs"].found.startswith("0.750 x")
    launches = lines["launches per step, kernels that dominate"].found
    assert launches.startswith("1,100 and 5.5 ms at 8 windows; 1,100 and 5.5 ms at 32 windows; 30% flash")
    assert lines["windows/s and MFU, this trainer"].figures["padded_equivalent"] == [1000.0] * ROUNDS
    ratios = lines["over the HF Trainer's best flags"].figures["ratios"]
    assert ratios == pytest.approx([2.0] * ROUNDS)
    on_two = [words for words, visible in zip(commands.words, commands.visible, strict=True) if visible == "0,1"]
    assert [shlex.join(words[1:5]) for words in on_two if "horovodrun" in words[0]] == ["-np 2 -H localhost:2"] * 5
    assert set(commands.visible) == {"", "0", "0,1"}  # "": the CPU's losses; the peer would take all that it sees
    assert sum("hvd_bert.train" in words for words in commands.words) == 14  # the runs that checks share are made once


def results(lines: dict[str, gpu_acceptance.Line], result: str) -> list[str]:
    return [name for name, line in lines.items() if line.result == result]


PEER = "over the HF Trainer's best flags"
OF_TWO = ["horovod, world of all GPUs", "ddp, world of all GPUs", "dp, all GPUs", "allreduce of all GPUs"]
OF_TWO += ["scaling from 1 to 2 GPUs", "asynchronous completion on 2 GPUs"]
WITHOUT_A_GOAL = ["memory", "memory with expandable segments", "asynchronous completion on 2 GPUs"]
WITHOUT_A_GOAL.append("launches per step, kernels that dominate")
WAITS, EVALUATION = "host waits per step", "evaluation over training"
MISSED = [f"windows/s and MFU, {name}" for name in acceptance_speed.OURS]
DIFFER = ["losses of 20 steps, bf16", "ddp, world of 1"]
SLOW = {"speed": 0.5, "losses": {"losses-bf16": 5.4, "losses-ddp-1": 5.01}, "waits": 9}


@each(
    ("commands", "gpu", "failed", "not_here"),
    [
        (SLOW, "NVIDIA H100 80GB HBM3", [*DIFFER, *MISSED, PEER, WAITS, EVALUATION], OF_TWO),
        ({"speed": 0.8}, "NVIDIA H100 80GB HBM3", [], OF_TWO),
        ({"has_peer": False, "speed": 0.8}, "NVIDIA A100-SXM4-80GB MIG 1g.10gb", [], [*OF_TWO, PEER]),  # no known peak
    ],
    ids=["slow", "H100", "part of a GPU, no accelerate"],
)
def test_one_gpu(tmp_path, monkeypatch, commands, gpu, failed, not_here):
    lines = lines_of(place(tmp_path, "cuda", 1, gpu=gpu), monkeypatch, made := Commands(**commands))
    assert results(lines, "FAIL") == failed and sorted(results(lines, "not here")) == sorted(not_here)
    assert made.has_peer or not any("hf_trainer.py" in " ".join(words) for words in made.words)


@each(
    ("values", "passed", "said"),
    [
        ([780, 500, 900], True, "it: stage 1 of 3 (650), next 1,150"),
        ([640], False, "it: stage 0 of 3, next 650"),
        ([1700, 1600], True, "it: stage 3 of 3 (1,600)"),
        ([math.nan, 1700, 1700], False, "it: stage 0 of 3, next 650"),
        ([1700, math.nan, 1700], False, "it: stage 0 of 3, next 650"),
        ([math.inf], False, "it: stage 0 of 3, next 650"),
    ],
)
def test_a_line_passes_at_the_first_stage_and_names_the_next(values, passed, said):
    stages = acceptance_speed.stages_of("NVIDIA H100 80GB HBM3")
    outcome = acceptance_speed.staged("it", values, stages, {})
    assert (outcome.passed, outcome.found) == (passed, said)
    assert acceptance_speed.staged("it", values, (), {}).passed is None


@each(
    ("losses", "skips", "passed"),
    [
        ([4.0, 3.0, 2.0], 0, True),
        ([4.0, 3.1, 2.0], 3, True),
        ([4.0, 3.4, 2.0], 3, False),
        ([None, 3.25, 2.0], 3, True),
        ([None, 3.0, 2.0], 0, False),
        ([None, None, None], 3, False),
        ([4.0, 3.0, 0.0], 3, False),
        ([math.nan, 3.0, 2.0], 0, False),
        ([4.0, math.nan, 2.0], 0, False),
        ([4.0, math.inf, 2.0], 0, False),
    ],
)
def test_skipped_steps_are_not_compared_and_all_others_must_agree(losses, skips, passed):
    assert acceptance_training._compared([4.0, 3.0, 2.0], losses, 0.05, skips).passed is passed


@each("reference", [[], [4.0, None], [4.0]])
def test_a_reference_must_have_all_losses(reference):
    with pytest.raises(UserError):
        acceptance_training._compared(reference, [4.0, 3.0] if reference else [], 0.05, 3)


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
