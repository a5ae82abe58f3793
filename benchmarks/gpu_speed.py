"""Measure the speed on GPUs, and compare it with the HF Trainer. scripts/gpu_acceptance.sh runs this with tests/gpu."""

import json
import math
import sys
from functools import cache
from statistics import median

import pytest
from compare_peers import VARIANTS, peer_command, prepare_random, timing
from gpu.conftest import ASYNC, BATCH, COMPILE, GRAPHS, SMALL, Machine
from shared import in_turns, spread
from transformers import BertConfig, BertForQuestionAnswering

from hvd_bert.model.flops import forward_flops
from hvd_bert.tools.bench.host_time import FIGURES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(0)]  # each command has its own time limit
STAGES = {"A100": (400, 560, 690), "H100": (650, 1150, 1600), "H200": (650, 1150, 1600)}
ROUND_S = 600.0  # minimum of remaining seconds to start another round: 250 for the round, the rest for later tests
WARMUP = 10  # untimed steps of the peer, which recompiles for new lengths
# The peer prepares batches in worker processes; this trainer does so in a thread.
PEER_ON_GPU = "--tf32 True --dataloader_num_workers 2 --dataloader_persistent_workers True"
# torch before 2.9 reads the second name.
EXPANDABLE = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")
MODES = {"eager": "", "compiled": COMPILE, "reduce-overhead": GRAPHS}
PEERS = {"HF Trainer": "", "HF Trainer compiled": "--torch_compile True"}
# Other measurements by `hvd-bert bench`: name -> flags, number of GPUs, environment variables.
OTHERS = {f"{way}, {gpus} GPUs": (f"--strategy {way}", gpus, {}) for gpus in (2, 4, 8) for way in ("horovod", "ddp")}
OTHERS |= {"horovod, 2 GPUs, asynchronous completion": ("--strategy horovod", 2, ASYNC)}
OTHERS |= {"expandable segments": ("", 1, EXPANDABLE)}
for size in (8, 64):
    OTHERS |= {f"{mode}, {size} windows": (f"{MODES[mode]} {BATCH} {size}", 1, {}) for mode in MODES}


def bench_peer(machine, name, flags):
    """Measure the HF Trainer with its best flags, on random windows like those of `hvd-bert bench`."""
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
    """Measure all variants in turns. Returns two mappings: variant -> one record per round, and variant -> error."""
    found, errors = {}, {}
    for number in range(machine.rounds):
        for variant, flags in in_turns(list((MODES | PEERS).items()), number):
            if number and (variant in errors or machine.left_s() < ROUND_S):
                continue
            measure = bench_peer if variant in PEERS else Machine.bench
            try:
                found.setdefault(variant, []).append(measure(machine, f"{variant} {number}", flags))
            except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
                errors[variant] = error
    return found, errors


def measured(machine, *variants):
    """Return the records of the variant with the most tokens/s. Raises the first variant's error if there are none."""
    found, errors = in_rounds(machine)
    if not (records := [found[variant] for variant in variants if variant in found]):
        raise errors[variants[0]]
    return max(records, key=lambda rounds: median(medians(rounds, "tokens_per_s")))


def medians(records, figure="windows_per_s"):
    return [record["figures"][figure]["median"] for record in records]


def staged(values, stages, text):
    """Return whether the median reaches the first stage (None without stages), a text, and the values.

    NaN and infinity do not reach a stage.
    """
    middle = median(values) if all(map(math.isfinite, values)) else math.nan
    reached = sum(middle >= stage for stage in stages)
    return (reached > 0, f"{text}: {reached} of the stages {stages}", values) if stages else (None, text, values)


def described(machine, records):
    """Return padded-equivalent windows/s (FLOP/s over the FLOP of a 384-token window), and a text with all figures."""
    config = machine.sized(BertConfig(), BertConfig.from_json_file(SMALL))
    flops, record = forward_flops(BertForQuestionAnswering(config)).training([384]), records[0]
    padded = [1e9 * rate / flops for rate in medians(records, "useful_gflops")]
    done, digits = ("mfu", 3) if "mfu" in record["figures"] else ("useful_gflops", 1)
    parts = [f"{spread(medians(records))} windows/s", f"{spread(medians(records, done), digits)} {done}"]
    parts += [f"{record[name]:,.1f} {name}" for name in FIGURES if record[name]]
    memory = {"used": record["memory_bytes"], "reserved": record["memory_reserved_bytes"]}
    parts += [f"{max(values) / 2**30:.2f} GiB {name}" for name, values in memory.items() if values]
    parts += [row["name"][:40] for row in record["kernels"] or []][:3]
    return padded, ", ".join([*parts, f"{spread(padded)} padded-equivalent"])


@pytest.mark.parametrize("name", MODES | OTHERS)
def test_speed(name, machine):
    """Goals in padded-equivalent windows/s: A100 400, 560, 690; H100, H200 650, 1,150, 1,600.

    Goal with 2 GPUs: at least 0.97 of a single GPU's windows/s per GPU.
    """
    flags, gpus, variables = OTHERS.get(name, ("", 1, {}))
    machine.require(gpus if name in OTHERS else 0, "cuda" if gpus == 1 else "cpu")
    variables = variables | ({"ranks": gpus} if gpus > 1 else {})
    records = measured(machine, name) if name in MODES else [machine.bench(name, flags, **variables)]
    values, text = described(machine, records)
    # MIG instances and a GH200 have no published peak, so they have neither an MFU nor goals.
    gpu = records[0]["device_name"] if name in MODES and "mfu" in records[0]["figures"] else ""
    stages = next((stages for model, stages in STAGES.items() if model in gpu), ())
    share = median(medians(records)) / gpus / median(medians(measured(machine, "eager")))
    if machine.gpus and name.endswith(", 2 GPUs"):
        values, stages = [share], (0.97,)
    machine.result(*staged(values, stages, f"{share:.3f} of eager steps per GPU, {text}"))


def test_over_the_HF_Trainer(machine):
    """Goals: 1.3, 1.5 and 2 times the useful tokens/s of the faster HF Trainer variant."""
    # Compare tokens/s, not windows/s: the peer groups windows by length, so its timed windows have other lengths.
    mine, theirs = (medians(measured(machine, *variants), "tokens_per_s") for variants in (MODES, PEERS))
    ratios = [ours / peers for ours, peers in zip(mine, theirs, strict=False)]
    text = f"{spread(theirs)} useful tokens/s, this trainer {spread(ratios, 2)} x"
    machine.result(*staged(ratios, machine.sized((1.3, 1.5, 2), ()), text))


def test_evaluation_over_training(machine):
    """Goal: evaluation has 1.5 times the windows/s of training."""
    record = measured(machine, "eager")[0]
    ratio = record["evaluation_windows_per_s"] / medians([record])[0]
    machine.result(*staged([ratio], machine.sized((1.5,), ()), f"{ratio:.2f} x"))
