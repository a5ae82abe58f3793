"""Compares the speed of this trainer with its peers: the same windows, model, global batch and threads.

    bash env/setup.sh --bench
    python benchmarks/compare_peers.py --model_name_or_path MODEL --train_file train-v1.1.json --out DIR

Begins with a preflight: a few steps of each variant without dropout, on windows of one length in the same order, must
give the same losses. Otherwise nothing is compared. Then the variants take turns for --repeats rounds, each time in new
processes on the CPUs of this host, with the model's own dropout. Prints a Markdown table and writes DIR/peers.json.
docs/evidence/benchmarks.md describes the variants.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from compare_report import Row, Timing, check_losses, compared, table, timing
from compare_windows import LEARNING_RATE, Work, our_flags, prepare
from random_training import end
from shared import in_turns, launch_environment, machine

from hvd_bert.errors import UserError

PEERS = Path(__file__).resolve().parent / "peers"

# What this trainer sets by itself, for its peers: glibc keeps the memory of a step for the next, in huge pages, and
# oneDNN keeps its kernels.
# MALLOC_MMAP_THRESHOLD_ would not do: glibc ignores values above 32 MiB, and an embedding's gradient is larger.
ALLOCATOR = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
}


@dataclass(frozen=True)
class Variant:
    """A way to train. `script`: the peer's; None: this trainer. `padded`: every window to --max_seq_length.
    `fp32`: also with --bf16.
    """

    label: str
    script: str | None = None
    flags: Sequence[str] = ()
    shuffling: Sequence[str] = ()  # flags that the preflight omits, since it needs the windows in order
    padded: bool = False
    fp32: bool = False
    environment: dict[str, str] = field(default_factory=dict)


HF_BEST = [
    "--no_pad_to_max_length",
    *("--optim", "adamw_torch_fused"),
    *("--ddp_find_unused_parameters", "False"),
    "--count_tokens",
]
VARIANTS = {
    "ours": Variant("this trainer"),
    "ours_fp32": Variant("this trainer in fp32, next to --bf16", fp32=True),
    "hf_run_qa": Variant("HF Trainer as run_qa sets it", "hf_trainer.py", padded=True),
    "hf_best": Variant(
        "HF Trainer: dynamic padding, grouped by length, fused AdamW, allocator settings", "hf_trainer.py", HF_BEST,
        shuffling=("--train_sampling_strategy", "group_by_length"), environment=ALLOCATOR,
    ),
    "hf_rebalance": Variant(
        "the same with `batch_rebalance` in place of grouping", "hf_trainer.py", HF_BEST,
        shuffling=("--train_sampling_strategy", "batch_rebalance"), environment=ALLOCATOR,
    ),
    "lightning": Variant("Lightning DDP, padded", "lightning_ddp.py", padded=True),
}  # fmt: skip


# --- runs ----------------------------------------------------------------------------------------


def command(name: str, args: argparse.Namespace, work: Work, out: Path, steps: int, seed: int | None) -> list[str]:
    """The command of a variant. `seed` None: the preflight, in the order of the tables and with losses."""
    variant = VARIANTS[name]
    common = ["--max_steps", str(steps), "--output_dir", str(out)]
    common += ["--bf16"] if args.bf16 and not variant.fp32 else []
    used_seed = work.seed if seed is None else seed
    if variant.script is None:
        start = [str(Path(sys.executable).with_name("horovodrun")), "-np", str(args.ranks), sys.executable, "-m"]
        flags = our_flags(work.train_file, str(work.model), work.max_seq_length, work.rank_batch, used_seed)
        flags += ["--max_train_samples", str(work.max_samples)] if work.max_samples else []
        # The preflight needs each loss. Otherwise few lines, of which one is where the timed steps begin.
        flags += ["--logging_steps", "1" if seed is None else str(math.gcd(args.warmup, steps))]
        return [*start, "hvd_bert.train", *flags, *common]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.ranks)]
    flags = ["--model_name_or_path", str(work.model), "--times_file", str(out / "times.json")]
    flags += ["--windows", str(work.padded_windows if variant.padded else work.windows)]
    flags += ["--per_device_train_batch_size", str(work.rank_batch)]
    flags += ["--learning_rate", str(LEARNING_RATE), "--seed", str(used_seed)]
    if variant.script == "hf_trainer.py":
        flags += ["--use_cpu", "--ddp_backend", "gloo", "--save_strategy", "no"]
        in_order = ["--train_sampling_strategy", "sequential", "--logging_steps", "1"]
    else:
        in_order = ["--in_order"]
    flags += [*variant.flags, *(in_order if seed is None else variant.shuffling)]
    return [*start, str(PEERS / variant.script), *flags, *common]


def environment(variant: Variant, threads: int) -> dict[str, str]:
    """The user's environment, on CPUs; of settings for memory only those of the variant."""
    own = {"GLIBC_TUNABLES", "LD_PRELOAD", "LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"}
    env = {name: value for name, value in os.environ.items() if name not in own and not name.startswith("MALLOC_")}
    env |= {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    return env | launch_environment() | variant.environment


def run(words: Sequence[str], env: dict[str, str], log: Path, timeout_s: float, grace_s: float = 30.0) -> None:
    """Run a command, terminate all its processes if it takes too long, kill them `grace_s` later. Raises UserError if
    it fails."""
    with log.open("w") as output:
        process = subprocess.Popen(
            words, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | str = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = f"none after {timeout_s:.0f} s"  # it is terminated below
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # launchers then terminate their ranks
                try:
                    process.wait(grace_s)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    if status != 0:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise UserError(
            f"{last}\nended with status {status}; above are the last lines of {log}. Command:\n  {shlex.join(words)}"
        )


def rows_of(name: str, out: Path) -> list[Row]:
    """A row per optimizer step: seconds, and the loss and the tokens if they were recorded.

    This trainer's steps between two logged ones have the mean of these.
    """
    if VARIANTS[name].script is not None:
        return list(json.loads((out / "times.json").read_text()))
    logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows: list[Row] = []
    for row in logged:
        if "step_s" in row:
            one = {"step_s": row["step_s"], "loss": row["loss"], "tokens": row["tokens_per_s"] * row["step_s"]}
            rows += [one] * (row["step"] - len(rows))
    return rows


def train(name: str, args: argparse.Namespace, work: Work, run_name: str, steps: int, seed: int | None) -> list[Row]:
    """One run of a variant in fresh processes."""
    out = args.out / run_name
    out.mkdir()
    print(f"{run_name} ...", file=sys.stderr, flush=True)
    words = command(name, args, work, out, steps, seed)
    run(words, environment(VARIANTS[name], args.threads), out.with_suffix(".log"), args.timeout)
    rows = rows_of(name, out)
    shutil.rmtree(out)  # it holds the model
    return rows


def steps_of(name: str, args: argparse.Namespace) -> tuple[int, int]:
    """Untimed and timed steps. Fewer if every window is padded, since all steps then do the same work."""
    if VARIANTS[name].padded:
        return min(args.warmup, args.padded_steps), args.padded_steps
    return args.warmup, args.steps


def compare(args: argparse.Namespace, work: Work) -> dict[str, list[Timing]]:
    """The timings of each variant, one per round."""
    runs: dict[str, list[Timing]] = {name: [] for name in args.variants}
    for number in range(args.repeats):
        for name in in_turns(args.variants, number):
            warmup, steps = steps_of(name, args)
            rows = train(name, args, work, f"round{number + 1}-{name}", warmup + steps, args.seed + number)
            result = timing(rows, warmup, steps, args.per_device_train_batch_size * args.ranks)
            print(f"  {result.windows_per_s:.2f} windows/s", file=sys.stderr, flush=True)
            runs[name].append(result)
    return runs


# --- the whole -----------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description="Compare the speed of this trainer with its peers.")
    add = parser.add_argument
    add("--model_name_or_path", required=True, help="Folder or hub name of a BERT.")
    add("--train_file", type=Path, required=True, help="SQuAD file.")
    add("--out", type=Path, required=True, help="New folder to work in.")
    add("--variants", nargs="+", choices=list(VARIANTS), help="(default: all; ours_fp32 only with --bf16)")
    add("--repeats", type=int, default=3, help="Rounds. (default: %(default)s)")
    add("--warmup", type=int, default=5, help="Untimed steps per run. (default: %(default)s)")
    # The HF Trainer sorts 50 batches of a rank at a time by length, the longest first. 25 steps of two ranks are one
    # such group, so they have long and short windows in the data's proportions.
    add("--steps", type=int, default=25, help="Timed steps per run. (default: %(default)s)")
    padded_help = "Timed steps, and at most as many untimed ones, if every window is padded. (default: %(default)s)"
    add("--padded_steps", type=int, default=10, help=padded_help)
    add("--preflight_steps", type=int, default=4, help="Steps whose losses must agree. (default: %(default)s)")
    add("--tolerance", type=float, help="Their maximum relative difference. (default: 1e-4, with --bf16 0.02)")
    add("--ranks", type=int, default=2, help="World size. (default: %(default)s)")
    add("--threads", type=int, default=1, help="Threads per rank. (default: %(default)s)")
    add("--per_device_train_batch_size", type=int, default=8, help="Windows per rank. (default: %(default)s)")
    add("--max_seq_length", type=int, default=384, help="Maximum tokens per window. (default: %(default)s)")
    add("--max_windows", type=int, help="Use only the first questions, up to this many windows. (default: all)")
    add("--bf16", action="store_true", help="Train in bfloat16 autocast, except for ours_fp32.")
    add("--seed", type=int, default=42, help="Seed of the first round; each round has its own. (default: %(default)s)")
    add("--timeout", type=float, default=1800.0, help="Maximum seconds per run. (default: %(default)g)")
    args = parser.parse_args(argv)
    args.variants = args.variants or [name for name in VARIANTS if args.bf16 or not VARIANTS[name].fp32]
    if args.tolerance is None:
        args.tolerance = 0.02 if args.bf16 else 1e-4
    for name in ("repeats", "steps", "padded_steps", "preflight_steps", "ranks", "threads", "max_windows"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be at least 1")
    if args.warmup < 0:
        parser.error(f"--warmup {args.warmup}: must not be negative")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Prepare, check the losses, compare, print."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if any(args.out.iterdir()):
        raise UserError(f"--out {args.out}: the folder is not empty. Name a new one.")
    preflight, timed = prepare(args)
    losses = {
        name: [row["loss"] for row in train(name, args, preflight, f"preflight-{name}", args.preflight_steps, None)]
        for name in args.variants
    }
    worst = check_losses(losses, args.tolerance)
    print(f"The losses agree to {worst:.1e}.", file=sys.stderr, flush=True)
    runs = compare(args, timed)
    labels = {name: VARIANTS[name].label for name in args.variants}
    record = {
        "command": shlex.join(sys.orig_argv),
        **machine(),
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "windows": timed.num_windows,
        "mean_tokens": timed.mean_tokens,
        "preflight": {"losses": losses, "largest_relative_difference": worst},
        "environments": {name: dict(VARIANTS[name].environment) for name in args.variants},
        "commands": {
            name: shlex.join(command(name, args, timed, args.out / name, sum(steps_of(name, args)), args.seed))
            for name in args.variants
        },
        "runs": {
            name: [asdict(t) | {"windows_per_s": t.windows_per_s, "tokens_per_s": t.tokens_per_s} for t in timings]
            for name, timings in runs.items()
        },
        "ratios": compared(runs, "ours"),
    }
    (args.out / "peers.json").write_text(json.dumps(record, indent=2) + "\n")
    print(table(runs, labels, "ours"))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the current run ends, too
    end(main)
