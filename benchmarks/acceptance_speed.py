"""The measurements of gpu_acceptance.py: BERT-base at 384 tokens in bf16, next to the Hugging Face Trainer.

The variants take turns, each in a new process on one GPU, on windows of random tokens as long as SQuAD's.
Padded-equivalent windows/s: useful FLOP/s over the FLOP of a window of 384 tokens, that is, windows/s if all windows
were that long.
"""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import compare_peers
import numpy as np
from acceptance_place import NotHere, Outcome, OutOfTime, Place, launched
from shared import REPOSITORY, in_turns, peer_columns, spread
from transformers import AutoTokenizer, BertConfig, BertForQuestionAnswering

from hvd_bert.errors import UserError
from hvd_bert.model.flops import forward_flops
from hvd_bert.monitoring.peaks import published_peak
from hvd_bert.tools.bench.speed import lengths_like_squad, random_windows

SAMPLE = REPOSITORY / "hvd_bert" / "sample"
LENGTH = 384
# Padded-equivalent windows/s in stages. A100: MLPerf's entries reach the last one; H100: in 16 bits the second one.
STAGES = {"A100": (400, 560, 690), "H100": (650, 1150, 1600), "H200": (650, 1150, 1600)}
PEER_STAGES = (1.3, 1.5, 2)
EVALUATION_GOAL, SCALING_GOAL = 1.5, 0.97
ASYNC = {"HOROVOD_ENABLE_ASYNC_COMPLETION": "1"}
# The second name is for torch before 2.9.
EXPANDABLE = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")
ROUND_S = 560.0  # a later round starts only if this many seconds are left: 200 for it, the rest for the lines below it
WARMUP = 10  # steps of the peer, which compiles again for other lengths
SIZES = {
    "cuda": {"batch": 32, "length": LENGTH, "steps": 10, "repeats": 5, "peer_steps": 50},
    "cpu": {"batch": 4, "length": 128, "steps": 2, "repeats": 1, "peer_steps": 4},
}
OURS = {"this trainer": [], "this trainer, --torch_compile": ["--torch_compile"]}
PEERS = {"HF Trainer, best flags": [], "HF Trainer, best flags, --torch_compile": ["--torch_compile", "True"]}
# This trainer makes its batches in a thread by itself.
ON_GPU = ["--tf32", "True", "--dataloader_num_workers", "2", "--dataloader_persistent_workers", "True"]


def common_flags(place: Place) -> list[str]:
    """For `hvd-bert bench` and the programs that take its flags: BERT-base; on the CPU a smaller one."""
    sizes = SIZES[place.device]
    flags = "--bf16 --strategy none --max_seq_length {length} --per_device_train_batch_size {batch} --steps {steps}"
    return flags.format(**sizes).split() + (
        ["--tf32"] if place.device == "cuda" else ["--model", str(SAMPLE / "six_layers.json")]
    )


def model_config(place: Place) -> Any:
    """The model that is measured."""
    return BertConfig.from_json_file(SAMPLE / "six_layers.json") if place.device == "cpu" else BertConfig()


def measure_ours(place: Place, flags: list[str], name: str, ranks: int = 0, **settings: str) -> dict[str, Any]:
    """The record of `hvd-bert bench`. `ranks`: under horovodrun; 0: without a launcher."""
    words = [sys.executable, "-m", "hvd_bert.tools.bench", *common_flags(place)]
    words += ["--repeats", str(SIZES[place.device]["repeats"]), *flags, "--json", str(place.file(name))]
    return place.record(name, launched(ranks) + words, gpus=max(1, ranks), **settings)


def measure_peer(place: Place, flags: list[str], name: str) -> dict[str, Any]:
    """windows/s and tokens/s of the HF Trainer with its best flags."""
    sizes, best = SIZES[place.device], compare_peers.VARIANTS["hf_best"]
    model, windows = prepare_peer(place)
    out = place.out / name
    out.mkdir()
    words = [sys.executable, *compare_peers.peer_command(model, windows, out, sizes["batch"])]
    words += ["--output_dir", str(out), "--max_steps", str(WARMUP + sizes["peer_steps"]), "--bf16"]
    words += [*best.flags, *best.shuffling, *flags]
    place.run(name, words + (ON_GPU if place.device == "cuda" else ["--use_cpu"]))
    rows = json.loads((out / "times.json").read_text(encoding="utf-8"))
    rates = compare_peers.timing(rows, WARMUP, sizes["peer_steps"], sizes["batch"])
    return {"figures": {name: {"median": rate} for name, rate in rates.items()}}


def prepare_peer(place: Place) -> tuple[Path, Path]:
    """The peer's model, with new weights, and its windows, as random as the benchmark's and as long."""
    from datasets import Dataset  # here, so that other lines do not need it

    model, windows = place.out / "peer-model", place.out / "peer-windows"
    if windows.exists():
        return model, windows
    config = model_config(place)
    config.num_labels = 2
    BertForQuestionAnswering(config).save_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(SAMPLE, trust_remote_code=False)
    tokenizer.save_pretrained(model)  # it only pads, by 0 as BERT's own
    sizes = SIZES[place.device]
    count = sizes["batch"] * (WARMUP + sizes["peer_steps"])
    lengths = lengths_like_squad(count, sizes["length"], seed=42)
    table = random_windows(lengths, config.vocab_size, seed=42)
    Dataset.from_dict(peer_columns(table, np.arange(count))).save_to_disk(windows)
    return model, windows


class Rounds:
    """The variants' records. They are measured when the first check asks for them."""

    def __init__(self) -> None:
        self.records: dict[str, list[dict[str, Any]]] = {name: [] for name in (*OURS, *PEERS)}
        self.errors: dict[str, str] = {}
        self._measured = False

    def medians(self, place: Place, name: str, figure: str) -> list[float]:
        """A figure of a variant, one per round. Raises NotHere if this device lacks it, else as `read`."""
        found = [record["figures"].get(figure) for record in self.read(place, name)]
        if None in found:
            raise NotHere(f"{figure} is unknown on this device")
        return [value["median"] for value in found]

    def read(self, place: Place, name: str) -> list[dict[str, Any]]:
        """The records of a variant, one per round. Raises UserError if it could not be measured."""
        self.measure(place)
        if name in self.errors:
            raise UserError(self.errors[name])
        if not self.records[name]:
            raise OutOfTime("no time was left for this measurement (--minutes)")
        return self.records[name]

    def measure(self, place: Place) -> None:
        """In turns, every second round in reverse order. A variant that fails does not keep the others from running."""
        if self._measured:
            return
        self._measured = True
        variants = [*OURS, *(PEERS if has_peer() else ())]
        for number in range(place.rounds):
            if number and place.left_s() < ROUND_S:
                return
            for name in in_turns([name for name in variants if name not in self.errors], number):
                measure: Callable[..., dict[str, Any]] = measure_ours if name in OURS else measure_peer
                log = f"round{number + 1}-{'-'.join(name.replace(',', '').split())}"
                try:
                    self.records[name].append(measure(place, (OURS | PEERS)[name], log))
                except OutOfTime:
                    return
                except Exception as error:
                    self.errors[name] = f"{type(error).__name__}: {error}"


def window_flops(place: Place) -> float:
    """Useful FLOP of training on a window of LENGTH tokens."""
    return forward_flops(BertForQuestionAnswering(model_config(place))).training([LENGTH])


def find_stages(gpu: str) -> Sequence[float]:
    """The row of STAGES, if the GPU is a whole one. A part of one (MIG) and a GH200 have no published peak."""
    found = next((stages for name, stages in STAGES.items() if name in gpu), ())
    return found if published_peak(gpu, "bf16") is not None else ()


def staged(text: str, values: Sequence[float], stages: Sequence[float], figures: dict[str, Any]) -> Outcome:
    """An outcome that passes if the median reaches the first of the stages. NaN and infinity reach none."""
    if not stages:
        return Outcome(text, None, figures)
    median = statistics.median(values) if all(map(math.isfinite, values)) else math.nan
    reached = sum(median >= stage for stage in stages)
    text += f": stage {reached} of {len(stages)}" + (f" ({stages[reached - 1]:,g})" if reached else "")
    text += f", next {stages[reached]:,g}" if reached < len(stages) else ""
    return Outcome(text, reached > 0, figures)


def has_peer() -> bool:
    """Whether the HF Trainer can run."""
    return importlib.util.find_spec("accelerate") is not None


def throughput(place: Place, rounds: Rounds, name: str) -> Outcome:
    """windows/s, and MFU, or the share of the measured matmul peak where the GPU's own is not published."""
    flops, known = window_flops(place), published_peak(place.gpu, "bf16") is not None
    share, of_what = ("mfu", "MFU") if known else ("matmul_utilization", "of the measured matmul peak")
    padded = [1e9 * gflops / flops for gflops in rounds.medians(place, name, "useful_gflops")]
    windows, shares = (rounds.medians(place, name, figure) for figure in ("windows_per_s", share))
    figures = {"padded_equivalent": padded, "windows_per_s": windows, share: shares}
    found = f"{spread(windows)} of SQuAD's lengths, {spread(shares, 3)} {of_what}, {spread(padded)} padded-equivalent"
    return staged(found, padded, find_stages(place.gpu), figures)


def memory(place: Place, rounds: Rounds) -> Outcome:
    record = rounds.read(place, next(iter(OURS)))[0]
    gib = max(record["memory_bytes"]) / 2**30
    return Outcome(f"{gib:.2f} GiB, {record['memory_over_needed']:.2f} of the computed need", None, {"gib": gib})


def over_peer(place: Place, rounds: Rounds) -> Outcome:
    """The faster of this trainer's variants over the faster of the HF Trainer's, round by round, by useful tokens/s:
    the peer groups windows by length, so those of its timed steps are not as long as the others'."""
    if not has_peer():
        raise NotHere("needs accelerate (env/setup.sh --bench)")
    (_, best), (peer, theirs) = _fastest(place, rounds, OURS), _fastest(place, rounds, PEERS)
    ratios = [mine / other for mine, other in zip(best, theirs, strict=False)]
    text = f"{peer} at {spread(theirs)} useful tokens/s, this trainer at {spread(ratios, 2)} x"
    return staged(text, ratios, PEER_STAGES if place.device == "cuda" else (), {"ratios": ratios})


def _fastest(place: Place, rounds: Rounds, variants: Iterable[str]) -> tuple[str, list[float]]:
    """The fastest of those that could be measured, with its useful tokens/s per round. Raises UserError without one."""
    rounds.measure(place)
    measured = [name for name in variants if rounds.records[name] and name not in rounds.errors]
    found = {name: rounds.medians(place, name, "tokens_per_s") for name in measured or variants}
    return max(found.items(), key=lambda item: statistics.median(item[1]))


def _record(
    place: Place, name: str, *flags: str, program: Sequence[str] = ("acceptance_steps.py",), **settings: str
) -> dict[str, Any]:
    """The record of a program of this folder, with its first words."""
    words = [sys.executable, str(Path(__file__).with_name(program[0])), *program[1:], "--out", str(place.file(name))]
    return place.record(name, [*words, *common_flags(place), *flags], **settings)


def host_waits(place: Place) -> Outcome:
    """Operations of a training step in which the host waits for the GPU, by torch.cuda.set_sync_debug_mode."""
    record = _record(place, "steps")
    if record["waits"] is None:
        raise NotHere("needs a GPU")
    return Outcome(f"{record['waits']} in {record['steps']} steps", record["waits"] == 0 < record["steps"], record)


def evaluation(place: Place) -> Outcome:
    """windows/s of passes without gradients over those of training."""
    record = _record(place, "steps")
    ratio = record["evaluation_per_s"] / record["training_per_s"]
    found = f"{ratio:.2f} x: {record['evaluation_per_s']:.0f} and {record['training_per_s']:.0f} windows/s"
    return Outcome(found, EVALUATION_GOAL <= ratio < math.inf if place.device == "cuda" else None, record)


def _two_ranks(place: Place, name: str, **settings: str) -> float:
    """windows/s of two ranks under Horovod."""
    place.require_several()
    figures = measure_ours(place, ["--strategy", "horovod"], name, 2, **settings)["figures"]
    return float(figures["windows_per_s"]["median"])


def scaling(place: Place, rounds: Rounds) -> Outcome:
    """windows/s of two ranks under Horovod over twice those of one process."""
    both = _two_ranks(place, "scaling")
    alone = statistics.median(rounds.medians(place, next(iter(OURS)), "windows_per_s"))
    share = both / (2 * alone)
    passed = SCALING_GOAL <= share < math.inf if place.device == "cuda" else None
    return Outcome(f"{share:.3f}: {both:.0f} and {alone:.0f} windows/s", passed, {"share": share})


def asynchronous(place: Place) -> Outcome:
    """windows/s of two ranks whose host does not wait for the last sum, over those of two whose host does."""
    without, with_it = _two_ranks(place, "scaling"), _two_ranks(place, "scaling-async", **ASYNC)
    found = f"{with_it / without:.3f} x: {with_it:.0f} and {without:.0f} windows/s"
    return Outcome(found, None, {"with": with_it, "without": without})


def expandable(place: Place) -> Outcome:
    """Reserved memory and windows/s with torch's expandable segments, and without."""
    if place.device != "cuda":
        raise NotHere("needs a GPU")
    without, with_it = _record(place, "steps"), _record(place, "steps-expandable", **EXPANDABLE)
    gib = [record["reserved_bytes"] / 2**30 for record in (with_it, without)]
    ratio = with_it["training_per_s"] / without["training_per_s"]
    found = f"{gib[0]:.2f} GiB reserved, {gib[1]:.2f} without; {ratio:.3f} x windows/s"
    return Outcome(found, None, {"with": with_it, "without": without})


def kernels(place: Place) -> Outcome:
    """Kernels, their launches and the GPU's time per step, at a quarter of the windows and at all, and the longest
    kernels; on the CPU of torch's operators."""
    found, records = "", {}
    for batch in (SIZES[place.device]["batch"] // 4, SIZES[place.device]["batch"]):
        flags = ["--steps", "8" if place.device == "cuda" else "2", "--per_device_train_batch_size", str(batch)]
        records[str(batch)] = record = _record(place, f"kernels-{batch}", *flags, program=("campaign.py", "kernels"))
        launches = record["launches_per_step"]
        found += f"{launches:,.0f} launches, " if launches else ""
        found += "{kernels_per_step:,.0f} kernels, {busy_ms_per_step:.1f} ms at {} windows; ".format(batch, **record)
    found += ", ".join(f"{row['share']:.0%} {row['name'][:40]}" for row in record["kernels"][:3])
    return Outcome(f"{found}, ...", None, records)


def checks() -> dict[str, tuple[str, Callable[[Place], Outcome]]]:
    """name -> goal, check. The first of them measures for all."""
    rounds = Rounds()
    windows = "; ".join(f"{gpu}: {stages}" for gpu, stages in STAGES.items()) + " padded-equivalent"
    throughputs = {
        f"windows/s and MFU, {name}": (windows, partial(throughput, rounds=rounds, name=name)) for name in OURS
    }
    return throughputs | {
        "memory": ("-", partial(memory, rounds=rounds)),
        "over the HF Trainer's best flags": (f"{PEER_STAGES} x useful tokens/s", partial(over_peer, rounds=rounds)),
        "memory with expandable segments": ("-", expandable),
        "host waits per step": ("0", host_waits),
        "evaluation over training": (f">= {EVALUATION_GOAL:g} x windows/s", evaluation),
        "scaling from 1 to 2 GPUs": (f">= {SCALING_GOAL:g}", partial(scaling, rounds=rounds)),
        "asynchronous completion on 2 GPUs": ("-", asynchronous),
        "launches per step, kernels that dominate": ("-", kernels),
    }
