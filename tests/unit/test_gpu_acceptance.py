"""tests/gpu and scripts/gpu_acceptance.sh: failing checks, the table of results, time limit and exit status."""

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gpu_speed
import pytest
import torch
from gpu import gpu_checks, test_gpu
from gpu.conftest import Machine, shareable
from launch import REPOSITORY

from hvd_bert.model.attention import by_window

SCRIPT = ["bash", str(REPOSITORY / "scripts" / "gpu_acceptance.sh")]
WRONG = {
    "no borders of windows": lambda q, k, v, w, *rest: by_window(q, k, v, replace(w, lengths=[len(q)]), *rest),
    "without dropout": lambda q, k, v, w, dropout, scaling: by_window(q, k, v, w, 0.0, scaling),
    "other dropout in the backward pass": lambda *all: (
        (output := by_window(*all)) - output.detach() + by_window(*all).detach()
    ),
    "more dropout": lambda q, k, v, w, dropout, scaling: by_window(q, k, v, w, dropout, scaling) * 0.9,
    "NaN in a gradient": lambda q, *rest: by_window(q, *rest) + 0 * (q - q.detach()).sqrt(),
}


@pytest.mark.parametrize("kernel", WRONG.values(), ids=WRONG)
def test_wrong_kernels_are_found_next_to_right_ones(monkeypatch, kernel):
    kernel.__name__ = "by_mistake"
    monkeypatch.setattr(gpu_checks, "kernels", lambda *_: [(by_window, None), (kernel, None)])
    monkeypatch.setattr(gpu_checks, "set_precision", lambda _: None)  # it would change this test process
    right, text, _ = gpu_checks.attention("fp32", "cpu")
    assert not right and text.startswith("wrong: by_mistake")


@pytest.mark.parametrize(("factor", "right"), [(1, True), (math.nan, False), (1 + 2**-7, False)])
def test_wrong_sums_of_horovod_are_found(factor, right):
    hvd = SimpleNamespace(Sum=None, Average=None, synchronize=lambda handle: None)
    hvd.allreduce = lambda tensor, prescale_factor=1.0, **_: tensor * prescale_factor * factor
    hvd.grouped_allreduce = lambda tensors, **_: [tensor * factor for tensor in tensors]
    hvd.allreduce_async_ = lambda tensor, prescale_factor, **_: tensor.mul_(prescale_factor * factor)
    assert set(gpu_checks.sums(hvd, torch.device("cpu"), gpu_checks.DTYPES).values()) == {right}


def machine(tmp_path, device="cpu", gpus=0):
    return Machine(device, gpus, tmp_path, time.monotonic() + 900, lines=[{}])


def test_users_choice_of_gpus_is_respected(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,GPU-abc")
    assert machine(tmp_path, "cuda", 3).run("it", ["printenv", "CUDA_VISIBLE_DEVICES"], gpus="all") == "5,7\n"


@pytest.mark.slow
def test_hooks_that_send_nothing_are_found(tmp_path):
    pytest.importorskip("horovod")
    program = ["-c", test_gpu.HOOKED.replace("self.optimizer._register_hooks()", "pass")]
    with pytest.raises(pytest.fail.Exception, match="no gradient was sent"):
        machine(tmp_path).train("it", "--strategy horovod --max_steps 1", program=program)


SKIPPED = [("- 3.25 2", 3, True), ("- 3 2", 0, False), ("- - -", 3, False)]
OTHER = [("4 3.1 2", 0, True), ("4 3.4 2", 3, False), ("4 nan 2", 0, False), ("4 3", 3, False)]


@pytest.mark.parametrize(("losses", "skips", "right"), SKIPPED + OTHER)
def test_skipped_steps_are_not_compared_and_all_others_must_agree(losses, skips, right):
    found = [None if loss == "-" else float(loss) for loss in losses.split()]
    assert test_gpu.compared(found, [4.0, 3.0, 2.0], 0.05, skips)[0] is right
    assert test_gpu.compared(found, [4.0, None, 2.0], 0.05, skips)[0] is False


@pytest.mark.parametrize(("speed", "right"), [(1.0, True), (0.99, False), (math.nan, False)])
def test_measurements_fail_below_their_goals_and_pass_at_them(tmp_path, monkeypatch, speed, right):
    """Use made-up measurements of two H100s that are `speed` times the goals."""
    made = {"useful_gflops": speed * 650 * 200, "mfu": 0.5, "tokens_per_s": 1300 * speed, "windows_per_s": 900}
    record = {"device_name": "NVIDIA H100 80GB HBM3", "memory_bytes": [1], "kernels": []}
    record |= dict.fromkeys(gpu_speed.FIGURES, 1) | {"memory_reserved_bytes": [1]}
    record |= {"evaluation_windows_per_s": 1350 * speed, "host_waits": [] if right else ["loop.py:1"]}
    record |= {"figures": {name: {"median": value} for name, value in made.items()}}
    two = record | {"figures": {name: {"median": 2 * 0.97 * speed * value} for name, value in made.items()}}
    peer = {"figures": {"tokens_per_s": {"median": 1000}}}
    monkeypatch.setattr(gpu_speed, "forward_flops", lambda _: SimpleNamespace(training=lambda _: 2e11))
    rounds = {name: [peer if "HF" in name else record] * 3 for name in gpu_speed.MODES | gpu_speed.PEERS}
    monkeypatch.setattr(gpu_speed, "in_rounds", lambda _: (rounds, {}))
    monkeypatch.setattr(Machine, "bench", lambda *_, **__: two)
    two_gpus, results = machine(tmp_path, "cuda", 2), []
    monkeypatch.setattr(Machine, "result", lambda _, right, *__: results.append(right))
    gpu_speed.test_speed("eager", two_gpus)
    gpu_speed.test_speed("ddp, 2 GPUs", two_gpus)
    gpu_speed.test_over_the_HF_Trainer(two_gpus)
    gpu_speed.test_evaluation_over_training(two_gpus)
    test_gpu.test_host_waits("none", two_gpus)
    assert results == [right] * 5


MADE = """
def test_right(machine):
    "> 1."
    machine.result(True, "2", {"value": 2})
def test_wrong(machine):
    machine.result(False, "0")
def test_raises(machine):
    machine.run("it", ["bash", "-c", "echo 'RuntimeError: no | kernel'; exit 1"])
def test_of_two(machine):
    machine.require(2, "cuda")
def test_without(machine):
    machine.result(None, "3")
def test_late(machine):
    machine.run("late", ["bash", "-c", "trap '' TERM; sleep 600 & wait; sleep 600"])
"""


def run_made(tmp_path, *words):
    (tmp_path / "conftest.py").write_text("from gpu.conftest import pytest_addoption, pytest_configure")
    (tmp_path / "test_made.py").write_text(MADE)
    command = [sys.executable, "-m", "pytest", str(tmp_path), "-q", "-p", "no:cacheprovider", *words]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_table_time_limit_and_exit_status(tmp_path):
    done = run_made(tmp_path, "--device=cpu", "--minutes=0.2", f"--out={tmp_path / 'out'}")
    rows = [line.replace("\\|", "/").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    results = ["pass", "FAIL", "FAIL", "not here", "-", "out of time"]
    assert (done.returncode, [row[3] for row in rows]) == (1, results), done
    assert rows[0][:3] == ["| right", "> 1", "2"] and rows[2][2] == "RuntimeError: no / kernel"
    text = (tmp_path / "out" / "gpu_acceptance.json").read_text()
    assert not [path for path in (REPOSITORY, tmp_path / "out", sys.prefix) if f"{path}/" in text]
    record = json.loads(text)
    assert record["lines"][0]["figures"] == {"value": 2} and record["versions"]["torch"]
    done = run_made(tmp_path, "--device=cpu", "--minutes=0", "--only", "late", f"--out={tmp_path / 'new'}")
    assert done.returncode == 1 and "1 ran out of time" in done.stdout
    done = run_made(tmp_path, f"--out={tmp_path / 'none'}")
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (30, 1, "") and "no GPU: torch" in done.stderr
    script = [*SCRIPT, "--no-set-up", "--python", sys.executable, "--device=cpu", f"--out={tmp_path / 'out'}"]
    assert subprocess.run(script, capture_output=True, timeout=120, check=False).returncode == 2  # --out is not empty


def test_the_record_has_no_names_of_host_and_user():
    names = {"/home/ada": "~", "/home/ada/clone": "CLONE", "ada": "USER", "vm": "HOST"}
    found = shareable({"vm": ("-I/home/ada/clone/x [vm:1] nvml /scratch/ada adam", 2)}, names)
    assert found == {"vm": ["-ICLONE/x [HOST:1] nvml /scratch/USER adam", 2]}


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_script_checks_for_a_driver_before_it_installs_anything():
    done = subprocess.run(SCRIPT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1) and "no NVIDIA driver" in done.stderr


@pytest.mark.campaign  # starts about 60 commands
def test_all_checks_on_this_cpu(tmp_path):
    words = ["--no-set-up", "--python", sys.executable, "--device=cpu", "--minutes=60", f"--out={tmp_path / 'out'}"]
    done = subprocess.run([*SCRIPT, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
