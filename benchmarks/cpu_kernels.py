"""Measure the share of a training step that each CPU kernel saves, by turning off one kernel at a time.

    OMP_NUM_THREADS=1 python benchmarks/cpu_kernels.py --model_name_or_path FOLDER --train_file train-v1.1.json

Measures CPU seconds of forward pass, backward pass and optimizer update, with dropout, on batches of `--batch` windows,
in fp32 and in bf16. The variants take turns on each batch; the allocator's two settings take turns in separate
processes. A kernel that saves less than 5 % of a step on all CPU models should be removed. Prints a Markdown table of
medians and ranges over batches, for docs/evidence/benchmarks.md. All other flags are the trainer's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace

import torch
from shared import end, machine, markdown_table, spread

from hvd_bert.config import command_line
from hvd_bert.distributed.world import World
from hvd_bert.model.cpu import kernels
from hvd_bert.model.cpu.kernels import TORCH, TORCH_ONLY, Kernels
from hvd_bert.model.cpu.malloc import keep_memory
from hvd_bert.model.layers import place
from hvd_bert.model.precision import autocast
from hvd_bert.tasks.base import MicroBatch
from hvd_bert.tasks.question_answering import QuestionAnswering

CPU = torch.device("cpu")
ALL, ALLOCATOR = "all", "allocator"
Seconds = dict[str, list[float]]  # "precision, variant" -> seconds per batch


def variants(chosen: Kernels) -> dict[str, Kernels]:
    """Return the variants: all kernels of this CPU model, no kernels, and all kernels except one."""
    used = [name for name, kernel in asdict(chosen).items() if kernel != TORCH and name != ALLOCATOR]
    return {ALL: chosen, "none": TORCH_ONLY} | {name: replace(chosen, **{name: TORCH}) for name in used}


def steps(flags: argparse.Namespace) -> tuple[Callable[[Kernels, str, MicroBatch], float], list[MicroBatch]]:
    """Return a function that runs one training step and returns its CPU seconds, and the batches."""
    words = f"--no_do_eval --max_train_samples 2000 --per_device_train_batch_size {flags.batch}".split()
    task = QuestionAnswering(command_line.parse([*words, *flags.trainers]), World())
    assert task.plan is not None
    batches = [task.batch(ids) for number in range(flags.batches) for ids in task.plan.rank_windows(number, 0)]
    model = task.model.train()
    place(model, CPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(used: Kernels, precision: str, batch: MicroBatch) -> float:
        start = time.process_time()
        with kernels.override(used):
            with autocast(CPU, precision):
                loss = task.losses(model, batch).mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - start

    return step, batches


def measure(flags: argparse.Namespace) -> Seconds:
    """Measure the variants that this process runs. Returns the least CPU seconds of --turns steps per batch."""
    torch.set_num_threads(1)
    if flags.child == ALL:
        keep_memory()
    choice = kernels.select("auto")
    step, batches = steps(flags)
    seconds: Seconds = defaultdict(list)
    for precision, chosen in {"fp32": choice.fp32, "bf16": choice.bf16}.items():
        taken = variants(chosen) if flags.child == ALL else {ALLOCATOR: chosen}
        for batch in batches:
            for name, used in taken.items():  # an untimed step first: it makes oneDNN's kernels for this shape
                step(used, precision, batch)
                best = min(step(used, precision, batch) for _ in range(flags.turns))
                seconds[f"{precision}, {name}"].append(best)
    return seconds


def child(name: str) -> Seconds:
    """Run `measure` in a new process. `name`: ALL, or ALLOCATOR to measure without the allocator's settings."""
    words = [sys.executable, __file__, *sys.argv[1:], "--child", name]
    done = subprocess.run(words, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    found: Seconds = json.loads(done.stdout)
    return found


def table(rounds: list[Seconds]) -> str:
    """Format a table with the share of a step that each kernel saves."""
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    for case in rounds[0]:
        precision, name = case.split(", ")
        values = [value for found in rounds for value in found[case]]
        whole = [value for found in rounds for value in found[f"{precision}, {ALL}"]]
        saved = [100 * (1 - ours / without) for ours, without in zip(whole, values, strict=True)]
        cells[name][precision] = spread(saved) if name != ALL else f"{statistics.median(whole):.3f} s per step"
    rows = [[name, row.get("fp32", "-"), row.get("bf16", "-")] for name, row in cells.items()]
    return markdown_table(["kernel turned off", "saves in fp32, %", "saves in bf16, %"], rows)


def main() -> None:
    """Measure in pairs of new processes, and print the table."""
    parser = argparse.ArgumentParser(description="The share of a step that each CPU kernel saves.")
    parser.add_argument("--batch", type=int, default=8, help="Windows per batch. (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=6, help="Number of batches. (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="Steps per variant and batch. (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="Pairs of processes. (default: %(default)s)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    flags, trainers = parser.parse_known_args()
    flags.trainers = trainers
    if flags.child:
        print(json.dumps(measure(flags)))
        return
    rounds = [child(ALL) | child(ALLOCATOR) for _ in range(flags.rounds)]
    print(f"{kernels.cpu_model()}; {machine()}\n\n{table(rounds)}")


if __name__ == "__main__":
    end(main)
