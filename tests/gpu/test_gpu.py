"""Check the values that the package computes on GPUs; benchmarks/gpu_speed.py measures the speed."""

import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import resuming
from commands import losses, read_lines
from gpu.conftest import ASYNC, COMPILE, GRAPHS
from launch import SAMPLE_DEV

from hvd_bert.checkpoint.files import checkpoint_name

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(0)]  # each command has its own time limit
# Maximum relative difference of a step's loss, in 20 steps from the same weights.
SAME_SUMS, SAME_PRECISION = 1e-4, 1e-3
OTHER_ROUNDING = 5e-2  # bf16 and fp16, with and without compiled kernels
MAX_SKIPPED = 3  # steps of fp16, until the loss scale is low enough
HALF = f"--bf16 {GRAPHS}"
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
HOOKED = """import runpy, sys; from hvd_bert.strategies.horovod import HorovodStrategy as made
init, wait = made.__init__, made.synchronize
def hooked(self, *given): init(self, *given); self.optimizer._register_hooks()
def waited(self): assert self.optimizer._handles, "no gradient was sent"; wait(self)
made.__init__, made.synchronize = hooked, waited; runpy.run_module(sys.argv.pop(1), None, "__main__", True)"""
HOOKS = {"ranks": 1, "program": ["-c", HOOKED]}  # hooks of Horovod's optimizer, which a world of 1 does not register
# Name -> arguments of gpu_checks.py, and environment variables.
PROGRAM = str(Path(__file__).with_name("gpu_checks.py"))
CHECKS = {f"attention kernels in {name}": (f"attention {name}", {}) for name in ("fp32", "bf16", "fp16")}
CHECKS |= {"sums of horovod, world of 1": ("horovod", {}), "sums of horovod, asynchronous": ("horovod", ASYNC)}
# Name of a run -> flags, arguments of `Machine.run`, name of the run whose losses it must equal, and tolerance.
RUNS = {
    "losses of the CPU": ("", ON_CPU, "", 0),
    "losses of fp32": ("", {}, "losses of the CPU", SAME_PRECISION),
    "losses of bf16": ("--bf16", {}, "losses of fp32", OTHER_ROUNDING),
    "losses of fp16": ("--fp16", {}, "losses of fp32", OTHER_ROUNDING),
    "horovod, world of 1": ("--strategy horovod", {"ranks": 1}, "losses of fp32", SAME_SUMS),
    "horovod's hooks, world of 1": ("--strategy horovod", HOOKS, "losses of fp32", SAME_SUMS),
    "asynchronous hooks, world of 1": ("--strategy horovod", HOOKS | ASYNC, "losses of fp32", SAME_SUMS),
    "ddp, world of 1": ("--strategy ddp", {}, "losses of fp32", SAME_SUMS),
    "fsdp, world of 1": ("--strategy fsdp", {}, "losses of fp32", SAME_SUMS),
    "horovod, world of all GPUs": ("--strategy horovod", {"ranks": "all"}, "losses of fp32", SAME_PRECISION),
    "ddp, world of all GPUs": ("--strategy ddp", {"ranks": "all"}, "losses of fp32", SAME_PRECISION),
    "dp, all GPUs": ("--strategy dp", {"gpus": "all"}, "losses of fp32", SAME_PRECISION),
    "compiled fp32": (COMPILE, {}, "losses of fp32", SAME_PRECISION),
    "compiled bf16": (f"--bf16 {COMPILE}", {}, "losses of bf16", OTHER_ROUNDING),
    "graphs of fp32": (GRAPHS, {}, "losses of fp32", SAME_PRECISION),
    "graphs of bf16": (HALF, {}, "losses of bf16", OTHER_ROUNDING),
    "graphs, horovod's hooks": (f"{GRAPHS} --strategy horovod", HOOKS, "graphs of fp32", SAME_SUMS),
    "graphs, horovod, all GPUs": (f"{HALF} --strategy horovod", {"ranks": "all"}, "losses of bf16", OTHER_ROUNDING),
    "graphs, ddp, all GPUs": (f"{HALF} --strategy ddp", {"ranks": "all"}, "losses of bf16", OTHER_ROUNDING),
}


@pytest.mark.parametrize("name", CHECKS)
def test_values(name, machine):
    """Equal to fp64 up to 24 roundings (bf16, fp16: 9); both passes drop the same elements; sums are exact."""
    words, variables = CHECKS[name]
    machine.result(*machine.record(name, [PROGRAM, *words.split(), machine.device], **variables))


@pytest.mark.parametrize("ranks", [0, "all"], ids=["one", "all GPUs"])
def test_preflight(ranks, machine):
    """`hvd-bert doctor` finds no failure; on all GPUs sums by NCCL are correct."""
    words = f"-m hvd_bert.tools.doctor --verbose --output_dir . --size {machine.sized(400, 1)}".split()
    printed = machine.run(f"doctor-{ranks}", [sys.executable, *words], ranks=ranks).splitlines()
    rows = [" ".join(re.sub(r"^\[[\d,]+\]<\w+>:", "", line).split()) for line in printed if "Horovod, " in line]
    warnings = [line for line in printed if re.search(r"\bwarning\b", line, re.IGNORECASE)]
    right = not ranks or (rows and machine.sized("NCCL", "") in rows[0])
    machine.result(bool(right), "; ".join([f"{len(warnings)} warning(s)", *rows]), warnings)


def compared(found, right, tolerance, max_skipped=0):
    """Return whether losses agree, a text, and the losses.

    A skipped step has no loss and puts the weights a step behind, so each skipped step raises the tolerance.
    """
    pairs = [(loss, other) for loss, other in zip(found, right, strict=False) if loss is not None]
    skipped = len(right) - len(pairs)
    if not pairs or None in right or len(found) != len(right) or skipped > max_skipped:
        return False, f"{len(pairs)} losses of {len(right)} steps, of which at most {max_skipped} may be skipped", found
    one, other = np.array(pairs, dtype=float).T
    worst, allowed = float(np.abs(one / other - 1).max()), tolerance * (1 + skipped)  # NaN if any loss is NaN
    return worst <= allowed, f"{len(pairs)} losses, {skipped} skipped: to {worst:.1e} of {allowed:g}", found


@pytest.mark.parametrize("name", list(RUNS)[1:])
def test_20_steps(name, machine):
    """Losses equal those of another run up to a tolerance: one process in fp32, or the CPU."""
    steps = "--max_steps 20 --logging_steps 1 --save_steps 0 --strategy none"
    both = (losses(machine.train(run, f"{steps} {RUNS[run][0]}", **RUNS[run][1])) for run in (name, RUNS[name][2]))
    machine.result(*compared(*both, RUNS[name][3], MAX_SKIPPED if "fp16" in name else 0))


@pytest.mark.parametrize("flags", ["", "--bf16", f"--bf16 {COMPILE}", HALF], ids=["fp32", "bf16", "compiled", "graphs"])
def test_resume(flags, machine):
    """Weights, optimizer and losses are equal bit for bit; with reduce-overhead, losses up to 5e-2."""
    graphs = GRAPHS in flags
    words = f"{flags} --strategy none --deterministic --dropout {0.1 * (not graphs)}"
    words += " --max_steps 10 --save_steps 5 --logging_steps 1"
    whole = machine.train(f"whole{flags}", words)
    resumed = machine.train(f"resumed{flags}", f"{words} --resume_from_checkpoint {whole / checkpoint_name(5)}")
    right, text, _ = compared(losses(resumed), losses(whole)[-5:], OTHER_ROUNDING * graphs)
    wrong = [what for what in resuming.differences(whole, resumed) if ".safetensors: " in what]
    machine.result(right and (graphs or not wrong), f"{text}; {len(wrong)} tensors differ", wrong)


def test_answers(machine):
    """Answers equal the CPU's for 98 % of the questions, with probabilities up to 1e-3."""
    model = machine.train("evaluated", "--strategy none --max_steps 60")
    words = [sys.executable, "-m", "hvd_bert.predict", str(model), "--input", str(SAMPLE_DEV), "--output"]
    machine.run("predict-cpu", [*words, "cpu.jsonl"], **ON_CPU)
    machine.run("predict-gpu", [*words, "gpu.jsonl"])
    rows = zip(*(read_lines(machine.out / f"{name}.jsonl") for name in ("cpu", "gpu")), strict=True)
    errors = [abs(a["probability"] - b["probability"]) if a["answer"] == b["answer"] else math.inf for a, b in rows]
    same = [error for error in errors if error <= SAME_PRECISION]
    machine.result(len(same) >= 0.98 * len(errors) > 0, f"{len(same)} of {len(errors)} answers", errors)


@pytest.mark.parametrize("padding", ["none", "longest", "max_length"])
def test_host_waits(padding, machine):
    """The host does not wait for the GPU in 7 steps, one of which is logged."""
    machine.require(1, "cuda")
    waits = machine.bench(f"padding {padding}", f"--padding {padding}")["host_waits"]
    machine.result(not waits, f"{len(waits)}: {', '.join(sorted(set(waits)))}", waits)
