"""What the package computes on GPUs is right, and how fast it is next to the Hugging Face Trainer."""

import json
import math
import re
import sys
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import resuming
from commands import losses, read_lines
from compare_peers import VARIANTS, peer_command, prepare_random, timing
from launch import SAMPLE, SAMPLE_DEV
from shared import in_turns, spread
from transformers import BertConfig, BertForQuestionAnswering

from hvd_bert.checkpoint.files import checkpoint_name
from hvd_bert.model.flops import forward_flops
from hvd_bert.tools.bench.host_time import FIGURES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(0)]  # commands have limits of their own
# Relative differences of a loss in 20 steps from the same weights.
SAME_SUMS, SAME_PRECISION = 1e-4, 1e-3
OTHER_ROUNDING = 5e-2  # bf16, fp16; also next to compiled kernels, which round in other places
MAX_SKIPPED = 3  # steps of fp16, until the first scale of the loss fits
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
ASYNC = {"HOROVOD_ENABLE_ASYNC_COMPLETION": "1"}
HOOKED = """import runpy, sys; from hvd_bert.strategies.horovod import HorovodStrategy as made
init, wait = made.__init__, made.synchronize
def hooked(self, *given): init(self, *given); self.optimizer._register_hooks()
def waited(self): assert self.optimizer._handles, "no gradient was sent"; wait(self)
made.__init__, made.synchronize = hooked, waited; runpy.run_module(sys.argv.pop(1), None, "__main__", True)"""
HOOKS = {"ranks": 1, "program": ["-c", HOOKED]}  # of Horovod's optimizer, which a world of 1 lacks
COMPILE, GRAPHS, BATCH = "--torch_compile", "--torch_compile_mode reduce-overhead", "--per_device_train_batch_size"
# Function and arguments, and variables.
PROGRAM = str(Path(__file__).with_name("gpu_checks.py"))
CHECKS = {f"attention kernels in {name}": (f"attention {name}", {}) for name in ("fp32", "bf16", "fp16")}
CHECKS |= {"sums of horovod, world of 1": ("horovod", {}), "sums of horovod, asynchronous": ("horovod", ASYNC)}
# A run: its flags, how it is started, and the run with the same losses, to a tolerance.
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
    "graphs of bf16": (f"--bf16 {GRAPHS}", {}, "losses of bf16", OTHER_ROUNDING),
    "graphs, horovod's hooks": (f"--bf16 {GRAPHS} --strategy horovod", HOOKS, "graphs of bf16", SAME_SUMS),
    "graphs, horovod, all GPUs": (
        f"--bf16 {GRAPHS} --strategy horovod",
        {"ranks": "all"},
        "losses of bf16",
        OTHER_ROUNDING,
    ),
    "graphs, ddp, all GPUs": (f"--bf16 {GRAPHS} --strategy ddp", {"ranks": "all"}, "losses of bf16", OTHER_ROUNDING),
}


@pytest.mark.parametrize("name", CHECKS)
def test_values(name, machine):
    """fp64's, to 24 roundings of the largest value, in bf16 and fp16 9; both passes drop the same; sums are exact."""
    words, variables = CHECKS[name]
    machine.result(*machine.record(name, [PROGRAM, *words.split(), machine.device], **variables))


@pytest.mark.parametrize("ranks", ["one", "all GPUs"])
def test_preflight(ranks, machine):
    """`hvd-bert doctor` finds no failure; on all GPUs sums are right, by NCCL."""
    words = f"-m hvd_bert.tools.doctor --verbose --output_dir . --size {machine.sized(400, 1)}".split()
    printed = machine.run(
        f"doctor-{ranks}", [sys.executable, *words], ranks=0 if ranks == "one" else "all"
    ).splitlines()
    rows = [" ".join(re.sub(r"^\[[\d,]+\]<\w+>:", "", line).split()) for line in printed if "Horovod, " in line]
    warnings = [line for line in printed if re.search(r"\bwarning\b", line, re.IGNORECASE)]
    right = ranks == "one" or (rows and machine.sized("NCCL", "") in rows[0])
    machine.result(bool(right), "; ".join([f"{len(warnings)} warning(s)", *rows]), warnings)


def compared(found, right, tolerance, max_skipped=0):
    """Whether losses agree. Skipped steps have none; each puts the weights a step behind, and adds to the tolerance."""
    pairs = [(loss, other) for loss, other in zip(found, right, strict=False) if loss is not None]
    skipped = len(right) - len(pairs)
    if not pairs or None in right or len(found) != len(right) or skipped > max_skipped:
        return False, f"{len(pairs)} losses of {len(right)} steps, of which at most {max_skipped} may be skipped", found
    one, other = np.array(pairs, dtype=float).T
    worst, allowed = float(np.abs(one / other - 1).max()), tolerance * (1 + skipped)  # NaN if any loss is NaN
    return worst <= allowed, f"{len(pairs)} losses, {skipped} skipped: to {worst:.1e} of {allowed:g}", found


@pytest.mark.parametrize("name", list(RUNS)[1:])
def test_20_steps(name, machine):
    """The losses of another run, to a tolerance: of one process in fp32, and these are the CPU's."""
    steps = "--max_steps 20 --logging_steps 1 --save_steps 0 --strategy none"
    both = (losses(machine.train(run, f"{steps} {RUNS[run][0]}", **RUNS[run][1])) for run in (name, RUNS[name][2]))
    machine.result(*compared(*both, RUNS[name][3], MAX_SKIPPED if "fp16" in name else 0))


@pytest.mark.parametrize("flags", ["", "--bf16", f"--bf16 {GRAPHS}"], ids=["fp32", "bf16", "graphs"])
def test_resume(flags, machine):
    """Weights, optimizer and losses are the same to the bit; with reduce-overhead losses to 5e-2."""
    graphs = GRAPHS in flags
    words = f"{flags} --strategy none --deterministic --dropout {0.1 * (not graphs)}"
    words += " --max_steps 10 --save_steps 5 --logging_steps 1"
    whole = machine.train(f"whole{flags}", words)
    resumed = machine.train(f"resumed{flags}", f"{words} --resume_from_checkpoint {whole / checkpoint_name(5)}")
    right, text, _ = compared(losses(resumed), losses(whole)[-5:], OTHER_ROUNDING * graphs)
    wrong = [what for what in resuming.differences(whole, resumed) if ".safetensors: " in what]
    machine.result(right and (graphs or not wrong), f"{text}; {len(wrong)} tensors differ", wrong)


def test_evaluation(machine):
    """The CPU's answers to 98 % of questions, and their probabilities to 1e-3."""
    model = machine.train("evaluated", "--strategy none --max_steps 60")
    words = [sys.executable, "-m", "hvd_bert.predict", str(model), "--input", str(SAMPLE_DEV), "--output"]
    machine.run("predict-cpu", [*words, "cpu.jsonl"], **ON_CPU)
    machine.run("predict-gpu", [*words, "gpu.jsonl"])
    rows = zip(*(read_lines(machine.out / f"{name}.jsonl") for name in ("cpu", "gpu")), strict=True)
    errors = [abs(a["probability"] - b["probability"]) if a["answer"] == b["answer"] else math.inf for a, b in rows]
    same = [error for error in errors if error <= SAME_PRECISION]
    machine.result(len(same) >= 0.98 * len(errors) > 0, f"{len(same)} of {len(errors)} answers", errors)


STAGES = {"A100": (400, 560, 690), "H100": (650, 1150, 1600), "H200": (650, 1150, 1600)}
ROUND_S = 600.0  # a later round starts only if this many seconds are left: 250 for it, the rest for the tests below it
WARMUP = 10  # steps of the peer, which compiles again for other lengths
# This trainer makes its batches in a thread by itself.
PEER_ON_GPU = "--tf32 True --dataloader_num_workers 2 --dataloader_persistent_workers True"
SMALL = SAMPLE / "six_layers.json"  # for CPUs
# The second name is for torch before 2.9.
EXPANDABLE = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")
MODES = {"eager": "", "compiled": COMPILE, "reduce-overhead": GRAPHS}
PEERS = {"HF Trainer": "", "HF Trainer compiled": "--torch_compile True"}
# Others that `hvd-bert bench` measures: its flags, GPUs, and variables.
OTHERS = {f"{way}, {gpus} GPUs": (f"--strategy {way}", gpus, {}) for gpus in (2, 4, 8) for way in ("horovod", "ddp")}
OTHERS |= {"horovod, 2 GPUs, asynchronous completion": ("--strategy horovod", 2, ASYNC)}
OTHERS |= {"expandable segments": ("", 1, EXPANDABLE)}
for size in (8, 64):
    OTHERS |= {f"{mode}, {size} windows": (f"{MODES[mode]} {BATCH} {size}", 1, {}) for mode in MODES}


def bench(machine, name, flags, **how):
    """The record of `hvd-bert bench`: BERT-base; on the CPU a smaller one. `how`: as for `Machine.run`."""
    small = f"--model {SMALL} --max_seq_length 128 {BATCH} 4 --repeats 1"
    size = machine.sized(f"--tf32 {BATCH} 32 --repeats 5", small)
    words = f"-m hvd_bert.tools.bench --bf16 --strategy none {size} {flags} --json".split()
    return machine.record("bench-" + re.sub(r"\W+", "-", name), words, **how)


def bench_peer(machine, name, flags):
    """The HF Trainer's rates with its best flags, on windows as random as the benchmark's and as long."""
    pytest.importorskip("accelerate", reason="needs accelerate (env/setup.sh --dev)")
    steps, batch, length = machine.sized((50, 32, 384), (4, 4, 128))
    peer, out = machine.out / "peer", machine.out / name.replace(" ", "-")
    if not peer.exists():
        config = machine.sized(BertConfig(), BertConfig.from_json_file(SMALL))
        prepare_random(BertForQuestionAnswering(config), peer, batch * (WARMUP + steps), length)
    out.mkdir()
    flags += f" {machine.sized(PEER_ON_GPU, '--use_cpu')} --bf16 --output_dir {out} --max_steps {WARMUP + steps}"
    best = [*VARIANTS["hf_best"].flags, *VARIANTS["hf_best"].shuffling, *flags.split()]
    machine.run(out.name, [sys.executable, *peer_command(peer / "model", peer / "windows", out, batch), *best])
    rates = timing(json.loads((out / "times.json").read_text()), WARMUP, steps, batch)
    return {"figures": {figure: {"median": rate} for figure, rate in rates.items()}}


@cache
def in_rounds(machine):
    """variant -> a record per round, in which the variants take turns; and why some could not be measured."""
    found, errors = {}, {}
    for number in range(machine.rounds):
        for variant, flags in in_turns(list((MODES | PEERS).items()), number):
            if number and (variant in errors or machine.left_s() < ROUND_S):
                continue
            try:
                record = (bench_peer if variant in PEERS else bench)(machine, f"{variant} {number}", flags)
                found.setdefault(variant, []).append(record)
            except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
                errors[variant] = error
    return found, errors


def measured(machine, *variants):
    """The records of the fastest of these variants."""
    found, errors = in_rounds(machine)
    if not (records := [found[variant] for variant in variants if variant in found]):
        raise errors[variants[0]]
    return max(records, key=lambda rounds: median(medians(rounds, "tokens_per_s")))


def medians(records, figure="windows_per_s"):
    return [record["figures"][figure]["median"] for record in records]


def staged(values, stages, text):
    """A result that is right if the median reaches the first of the stages. NaN and infinity reach none."""
    middle = median(values) if all(map(math.isfinite, values)) else math.nan
    reached = sum(middle >= stage for stage in stages)
    return (reached > 0, f"{text}: {reached} of the stages {stages}", values) if stages else (None, text, values)


def described(machine, records):
    """The padded-equivalent windows/s, that is, windows/s if all had 384 tokens, by FLOP; and all figures in words."""
    config = machine.sized(BertConfig(), BertConfig.from_json_file(SMALL))
    flops, record = forward_flops(BertForQuestionAnswering(config)).training([384]), records[0]
    padded = [1e9 * rate / flops for rate in medians(records, "useful_gflops")]
    share = "mfu" if "mfu" in record["figures"] else "matmul_utilization"
    parts = [f"{spread(medians(records))} windows/s", f"{spread(medians(records, share), 3)} {share}"]
    parts += [f"{record[name]:,.1f} {name}" for name in (*FIGURES, "memory_over_needed") if record[name]]
    memory = {"used": record["memory_bytes"], "reserved": record["memory_reserved_bytes"]}
    parts += [f"{max(values) / 2**30:.2f} GiB {name}" for name, values in memory.items() if values]
    parts += [row["name"][:40] for row in record["kernels"] or []][:3]
    return padded, ", ".join([*parts, f"{spread(padded)} padded-equivalent"])


@pytest.mark.parametrize("name", MODES | OTHERS)
def test_speed(name, machine):
    """Padded-equivalent windows/s: A100 400, 560, 690; H100, H200 650, 1,150, 1,600. 2 GPUs: 0.97 of twice eager's."""
    flags, gpus, variables = OTHERS.get(name, ("", 1, {}))
    machine.require(gpus if name in OTHERS else 0, "cuda" if gpus == 1 else "cpu")
    variables |= {"ranks": gpus} if gpus > 1 else {}
    records = measured(machine, name) if name in MODES else [bench(machine, name, flags, **variables)]
    values, text = described(machine, records)
    # Parts of a GPU (MIG) and a GH200 have no published peak, and so no MFU and no goals.
    gpu = records[0]["device_name"] if name in MODES and "mfu" in records[0]["figures"] else ""
    stages = next((stages for model, stages in STAGES.items() if model in gpu), ())
    share = median(medians(records)) / gpus / median(medians(measured(machine, "eager")))
    if machine.gpus and name.endswith(", 2 GPUs"):
        values, stages = [share], (0.97,)
    machine.result(*staged(values, stages, f"{share:.3f} of eager steps per GPU, {text}"))


def test_over_the_HF_Trainer(machine):
    """1.3, 1.5, 2 times the useful tokens/s of the faster of its variants."""
    # By tokens: the peer groups windows by length, so those of its timed steps are not as long as the others'.
    mine, theirs = (medians(measured(machine, *variants), "tokens_per_s") for variants in (MODES, PEERS))
    ratios = [one / other for one, other in zip(mine, theirs, strict=False)]
    text = f"{spread(theirs)} useful tokens/s, this trainer {spread(ratios, 2)} x"
    machine.result(*staged(ratios, machine.sized((1.3, 1.5, 2), ()), text))


@pytest.mark.parametrize("padding", ["none", "longest", "max_length"])
def test_host_waits(padding, machine):
    """0 in 7 steps, one of which is logged."""
    machine.require(1, "cuda")
    waits = bench(machine, f"padding {padding}", f"--padding {padding}")["host_waits"]
    machine.result(not waits, f"{len(waits)}: {', '.join(sorted(set(waits)))}", waits)


def test_evaluation_over_training(machine):
    """1.5 times the windows/s."""
    record = measured(machine, "eager")[0]
    ratio = record["evaluation_windows_per_s"] / medians([record])[0]
    text = f"{ratio:.2f} x: {record['evaluation_windows_per_s']:.0f} windows/s"
    machine.result(*staged([ratio], machine.sized((1.5,), ()), text))
