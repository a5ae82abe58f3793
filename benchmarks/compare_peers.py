"""Compare the speed of this trainer and the Hugging Face Trainer on the same windows, model, global batch and threads.

    bash env/setup.sh --bench
    python benchmarks/compare_peers.py --model_name_or_path MODEL --train_file train-v1.1.json --out DIR

Begins with a preflight: a few steps of each variant without dropout, on the same windows, must give equal losses. If
not, nothing is compared. Then the variants take turns for --repeats rounds, each time in new processes on the CPUs of
this host, with the model's own dropout. Prints a Markdown table and writes DIR/peers.json.
docs/evidence/benchmarks.md describes the variants.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shlex
import shutil
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from shared import (
    REPOSITORY,
    end,
    in_turns,
    launch_environment,
    machine,
    make_folder,
    markdown_table,
    peer_columns,
    run,
    spread,
)
from transformers import AutoTokenizer

from hvd_bert.config import command_line
from hvd_bert.config.parser import Limits, Parser, add_number
from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError
from hvd_bert.tasks.question_answering import QuestionAnswering
from hvd_bert.tools.bench.speed import lengths_like_squad, random_windows

Row = Mapping[str, Any]  # a step: step_s (seconds), loss, tokens; loss or tokens is None if not recorded
Rates = dict[str, float]
PEER = Path(__file__).resolve().parent / "peers" / "hf_trainer.py"
LEARNING_RATE = 5e-5
WINDOWS, TOKENS = "windows_per_s", "tokens_per_s"
# Environment variables that give peers what this trainer does by itself: glibc reuses the memory of a step, in huge
# pages, and oneDNN caches its kernels. MALLOC_MMAP_THRESHOLD_ is not enough: glibc ignores values above 32 MiB, and an
# embedding's gradient is larger.
ALLOCATOR = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
}


@dataclass(frozen=True)
class Variant:
    """A way to train.

    `peer`: uses the HF Trainer. `padded`: pads each window to --max_seq_length. `fp32`: trains in fp32 even with
    --bf16. `shuffling`: flags that the preflight omits, because it needs the windows in order.
    """

    label: str
    peer: bool = True
    flags: Sequence[str] = ()
    shuffling: Sequence[str] = ()
    padded: bool = False
    fp32: bool = False
    environment: dict[str, str] = field(default_factory=dict)


HF_BEST = ["--no_pad_to_max_length", "--count_tokens", "--optim", "adamw_torch_fused"]
HF_BEST += ["--ddp_find_unused_parameters", "False"]
GROUPED, REBALANCED = (("--train_sampling_strategy", way) for way in ("group_by_length", "batch_rebalance"))
VARIANTS = {
    "ours": Variant("this trainer", peer=False),
    "ours_fp32": Variant("this trainer in fp32, next to --bf16", peer=False, fp32=True),
    "hf_run_qa": Variant("HF Trainer as run_qa sets it", padded=True),
    "hf_best": Variant("HF Trainer, best flags", flags=HF_BEST, shuffling=GROUPED, environment=ALLOCATOR),
    "hf_rebalance": Variant("the same, batch_rebalance", flags=HF_BEST, shuffling=REBALANCED, environment=ALLOCATOR),
}


def trainer_flags(args: argparse.Namespace, model: Path | str, rank_batch: int, seed: int) -> list[str]:
    """Return this trainer's flags, except for the number of steps and the output folder."""
    flags = f"--no_do_eval --eval_strategy no --save_steps 0 --warmup_ratio 0 --seed {seed}"
    flags += f" --learning_rate {LEARNING_RATE} --per_device_train_batch_size {rank_batch}"
    flags += f" --max_seq_length {args.max_seq_length} --doc_stride {min(128, args.max_seq_length // 3)}"
    flags += f" --max_train_samples {args.max_train_samples}" if args.max_train_samples else ""
    return ["--model_name_or_path", str(model), "--train_file", str(args.train_file), *flags.split()]


def prepare(args: argparse.Namespace) -> None:
    """Write the variants' inputs to --out: the model with and without dropout, and tables of windows.

    The windows are in the order in which this trainer uses them with one window per rank and step.
    """
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    world = World()
    world.size = args.ranks  # the order depends on the world size; loading does not communicate
    for name, dropout in (("model", []), ("exact_model", ["--dropout", "0"])):
        config = command_line.parse([*trainer_flags(args, args.model_name_or_path, 1, args.seed), *dropout])
        task = QuestionAnswering(config, world)
        task.save(args.out / name)
    assert task.train and task.plan
    order = np.concatenate([task.plan.step_windows(step) for step in range(task.plan.steps_per_epoch)])
    features = peer_columns(task.train.windows, order)
    Dataset.from_dict(features).save_to_disk(args.out / "windows")
    padded = task.tokenizer.pad(features, padding="max_length", max_length=args.max_seq_length)
    Dataset.from_dict(dict(padded)).save_to_disk(args.out / "padded_windows")


def prepare_random(model: Any, out: Path, count: int, longest: int) -> None:
    """Write the peer's inputs to `out`: a model with new weights, and random windows with SQuAD's lengths."""
    from datasets import Dataset

    model.save_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / "hvd_bert" / "sample", trust_remote_code=False)
    tokenizer.save_pretrained(out / "model")  # used only for padding; its padding id is 0, like BERT's
    table = random_windows(lengths_like_squad(count, longest, seed=42), model.config.vocab_size, seed=42)
    Dataset.from_dict(peer_columns(table, np.arange(count))).save_to_disk(out / "windows")


def command(name: str, args: argparse.Namespace, out: Path, steps: int, seed: int | None) -> list[str]:
    """Return the command of a variant. `seed`: None for the preflight, which logs the loss of each step.

    The softmax of BertForQuestionAnswering includes padding. So each rank's batch in the preflight is one window
    without padding, in the order of the table.
    """
    variant, preflight = VARIANTS[name], seed is None
    model = args.out / ("exact_model" if preflight else "model")
    rank_batch = 1 if preflight else args.per_device_train_batch_size
    used_seed = args.seed if seed is None else seed
    common = ["--max_steps", str(steps), "--output_dir", str(out)]
    common += ["--bf16"] if args.bf16 and not variant.fp32 else []
    if not variant.peer:
        start = [str(Path(sys.executable).with_name("horovodrun")), "-np", str(args.ranks), sys.executable, "-m"]
        # Log few lines, but one at the end of the untimed steps.
        logging_steps = "1" if preflight else str(math.gcd(args.warmup, steps))
        flags = [*trainer_flags(args, model, rank_batch, used_seed), "--logging_steps", logging_steps]
        return [*start, "hvd_bert.train", *flags, *common]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.ranks)]
    table = args.out / ("padded_windows" if variant.padded and not preflight else "windows")
    flags = ["--use_cpu", "--ddp_backend", "gloo", "--learning_rate", str(LEARNING_RATE), "--seed", str(used_seed)]
    in_order = ["--train_sampling_strategy", "sequential", "--logging_steps", "1"]
    flags += [*variant.flags, *(in_order if preflight else variant.shuffling)]
    return [*start, *peer_command(model, table, out, rank_batch), *flags, *common]


def peer_command(model: Path, windows: Path, out: Path, rank_batch: int) -> list[str]:
    """Return the command of the peer's program, with the flags that all runs share."""
    words = [str(PEER), "--model_name_or_path", str(model), "--windows", str(windows)]
    words += ["--times_file", str(out / "times.json"), "--per_device_train_batch_size", str(rank_batch)]
    return [*words, "--save_strategy", "no", "--report_to", "none"]


def environment(variant: Variant, threads: int) -> dict[str, str]:
    """Return a variant's environment on CPUs: this process's, but with the variant's memory settings."""
    own = {"GLIBC_TUNABLES", "LD_PRELOAD", "LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"}
    env = {name: value for name, value in os.environ.items() if name not in own and not name.startswith("MALLOC_")}
    env |= {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    return env | launch_environment() | variant.environment


def read_rows(name: str, out: Path) -> list[Row]:
    """Read one row per optimizer step. This trainer logs means over several steps, which are repeated."""
    if VARIANTS[name].peer:
        return list(json.loads((out / "times.json").read_text()))
    logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows: list[Row] = []
    for row in logged:
        if "step_s" in row:
            step = {"step_s": row["step_s"], "loss": row["loss"], "tokens": row["tokens_per_s"] * row["step_s"]}
            rows += [step] * (row["step"] - len(rows))
    return rows


def train(name: str, args: argparse.Namespace, run_name: str, steps: int, seed: int | None) -> list[Row]:
    """Run a variant in new processes. Returns a row per step."""
    out = args.out / run_name
    out.mkdir()
    print(f"{run_name} ...", file=sys.stderr, flush=True)
    words = command(name, args, out, steps, seed)
    run(words, environment(VARIANTS[name], args.threads), out.with_suffix(".log"), args.timeout)
    rows = read_rows(name, out)
    shutil.rmtree(out)  # the saved models are large
    return rows


def timing(rows: Sequence[Row], warmup: int, steps: int, global_batch: int) -> Rates:
    """Return windows/s and, if tokens were counted, useful tokens/s of `steps` steps after `warmup` untimed steps.

    Raises UserError if the run has fewer steps.
    """
    timed = rows[warmup : warmup + steps]
    if len(timed) < steps:
        raise UserError(f"The run has {len(rows)} steps. It needs {warmup} untimed and {steps} timed steps.")
    seconds, tokens = sum(row["step_s"] for row in timed), [row["tokens"] for row in timed]
    return {WINDOWS: steps * global_batch / seconds} | ({} if None in tokens else {TOKENS: sum(tokens) / seconds})


def check_losses(losses: Mapping[str, Sequence[float | None]], tolerance: float) -> float:
    """Return the largest relative difference between a variant's loss and the first variant's loss in the same step.

    Raises UserError if it is above `tolerance`, or if a loss is missing, NaN or infinite: the speed of variants that
    train differently must not be compared.
    """
    steps = np.array([*itertools.zip_longest(*losses.values())], dtype=float)  # a missing loss (None) becomes NaN
    worst = float(np.abs(steps.T / steps.T[0] - 1).max()) if steps.size else math.nan
    if not worst <= tolerance:
        said = "\n".join(f"  {name:12} {' '.join(map(str, values))}" for name, values in losses.items())
        raise UserError(
            f"The losses of the preflight's steps differ by {worst:.1e} (relative), more than --tolerance"
            f" {tolerance:.1e}: the variants do not train alike, so their speeds are not compared.\n{said}"
        )
    return worst


def compare(args: argparse.Namespace) -> dict[str, list[Rates]]:
    """Measure each variant's rates in every round."""
    runs: dict[str, list[Rates]] = {name: [] for name in args.variants}
    for number in range(args.repeats):
        for name in in_turns(args.variants, number):
            warmup, steps = args.warmup, args.steps
            if VARIANTS[name].padded:  # every padded step does the same work, so fewer steps are enough
                warmup, steps = min(warmup, args.padded_steps), args.padded_steps
            rows = train(name, args, f"round{number + 1}-{name}", warmup + steps, args.seed + number)
            rates = timing(rows, warmup, steps, args.per_device_train_batch_size * args.ranks)
            print(f"  {rates[WINDOWS]:.2f} windows/s", file=sys.stderr, flush=True)
            runs[name].append(rates)
    return runs


def ratios(runs: Mapping[str, Sequence[Rates]], peer: str, rate: str) -> list[float]:
    """Return, per round, this trainer's rate divided by a peer's.

    Ratios of windows/s depend on the lengths of the timed windows, ratios of tokens/s do not.
    """
    pairs = zip(runs.get("ours", []), runs[peer], strict=False)
    return [mine[rate] / other[rate] for mine, other in pairs if rate in mine and rate in other]


def table(runs: Mapping[str, Sequence[Rates]]) -> str:
    """Format a Markdown table with a row per variant, in the order of `runs`."""
    head = [f"medians of {len(next(iter(runs.values())))} rounds (range)", "windows/s", "useful tokens/s"]
    head += ["ratio of this trainer's windows/s", "ratio of this trainer's tokens/s"]
    rows = []
    for name, rounds in runs.items():
        tokens = [rates[TOKENS] for rates in rounds if TOKENS in rates]
        over = [ratios(runs, name, rate) if name != "ours" else [] for rate in (WINDOWS, TOKENS)]
        cells = [spread([rates[WINDOWS] for rates in rounds], 2), f"{statistics.median(tokens):.0f}" if tokens else "-"]
        rows.append([VARIANTS[name].label, *cells, *(spread(found, 2) if found else "-" for found in over)])
    return markdown_table(head, rows)


# The HF Trainer sorts groups of 50 per-rank batches by length, longest first. 25 timed steps on two ranks cover a whole
# group, so they have long and short windows in the data's proportions.
NUMBERS = (
    ("--repeats", 3, "Rounds."),
    ("--steps", 25, "Timed steps per run."),
    ("--padded_steps", 10, "Timed steps, and maximum of untimed steps, of variants that pad each window."),
    ("--preflight_steps", 4, "Steps whose losses must agree."),
    ("--ranks", 2, "World size."),
    ("--threads", 1, "Threads per rank."),
    ("--per_device_train_batch_size", 8, "Windows per rank."),
    ("--max_seq_length", 384, "Maximum tokens per window."),
    ("--max_train_samples", None, "Use only the first questions. (default: all)"),
)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = Parser(description="Compare the speed of this trainer with its peers.")
    add = parser.add_argument
    add("--model_name_or_path", required=True, help="Folder or hub name of a BERT.")
    add("--train_file", type=Path, required=True, help="SQuAD file.")
    add("--out", type=Path, required=True, help="New folder to work in.")
    add("--variants", nargs="+", choices=list(VARIANTS), help="(default: all; ours_fp32 only with --bf16)")
    add("--bf16", action="store_true", help="Train in bfloat16 autocast, except for ours_fp32.")
    for name, default, text in NUMBERS:
        add_number(parser, name, default, text, Limits(minimum=1))
    add_number(parser, "--warmup", 5, "Untimed steps per run.", Limits(minimum=0))
    add_number(parser, "--seed", 42, "Seed of the first round; each round has its own.", Limits(minimum=0))
    tolerance = "Maximum relative difference of the preflight's losses. (default: 1e-4, with --bf16 0.02)"
    add_number(parser, "--tolerance", None, tolerance, Limits(above=0), "X")
    add_number(parser, "--timeout", 1800.0, "Maximum seconds per run.", Limits(above=0), "S")
    args = parser.parse_args(argv)
    args.variants = args.variants or [name for name in VARIANTS if args.bf16 or not VARIANTS[name].fp32]
    args.tolerance = args.tolerance or (0.02 if args.bf16 else 1e-4)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Prepare the inputs, check that the variants' losses agree, measure the rates, and print the table."""
    args = parse(argv)
    make_folder(args.out)
    prepare(args)
    losses = {
        name: [row["loss"] for row in train(name, args, f"preflight-{name}", args.preflight_steps, None)]
        for name in args.variants
    }
    worst = check_losses(losses, args.tolerance)
    print(f"The losses agree to {worst:.1e}.", file=sys.stderr, flush=True)
    runs = compare(args)
    record = {
        "command": shlex.join(sys.orig_argv),
        **machine(),
        "preflight": {"losses": losses, "largest_relative_difference": worst},
        "runs": runs,
        "ratios": {name: {rate: ratios(runs, name, rate) for rate in (WINDOWS, TOKENS)} for name in runs},
    }
    (args.out / "peers.json").write_text(json.dumps(record, indent=2) + "\n")
    print(table(runs))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the exit also ends the running command
    end(main)
