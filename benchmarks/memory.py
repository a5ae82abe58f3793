"""Measures where a training's memory goes, and what --gradient_checkpointing saves and costs.

    python benchmarks/memory.py parts
    python benchmarks/memory.py resident --batch 2 6 --pairs 5
    python benchmarks/memory.py cost --batch 2 --pairs 5

`parts` prints for BERT-base and BERT-large the memory of weights, gradients and AdamW's moments, and the memory per
token of the activations that the forward pass keeps for the backward pass: the tensors that autograd saves for three
windows of random tokens, less those for one.

The others compare BERT-large without and with the flag, by turns and in reverse order in every second pair.
`resident` trains in one process each, with `hvd-bert bench`, and prints the peak of resident memory, less
that before the model was created: median and range. `cost` prints the CPU time and the wall time of steps (forward
and backward pass and AdamW) in one process: median and range.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shared import REPOSITORY, in_turns, machine, markdown_table, spread
from transformers import BertConfig

from hvd_bert.data.collate import Collator
from hvd_bert.model.bert import new_model, window_losses
from hvd_bert.model.precision import autocast, recompute_layers
from hvd_bert.tools.bench.measure import FP32_BYTES, STATES, kept_bytes
from hvd_bert.tools.bench.speed import random_windows

SHAPES: dict[str, dict[str, Any]] = {
    "BERT-base": {},
    "BERT-large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}
WINDOWS = (1, 3)  # of the two passes of `parts`
CASES = (("fp32", False), ("bf16", False), ("fp32", True), ("bf16", True))
FLAG = "--gradient_checkpointing"
CLOCKS = {"CPU": time.process_time, "wall": time.perf_counter}
GIB = 2**30


def kept_per_token(config: BertConfig, length: int, precision: str, recompute: bool) -> tuple[int, float]:
    """The number of parameters, and bytes of activations per token in windows of `length` tokens."""
    model = new_model(config, dropout=None, seed=0).train()
    if recompute:
        recompute_layers(model)
    lengths = np.full(max(WINDOWS), length, dtype=np.int32)
    collate = Collator(random_windows(lengths, config.vocab_size, seed=0), torch.device("cpu"))
    with autocast(collate.device, precision):
        few, many = (kept_bytes(model, partial(window_losses, model, collate(range(count)))) for count in WINDOWS)
    return sum(p.numel() for p in model.parameters()), (many - few) / (length * (WINDOWS[1] - WINDOWS[0]))


def parts(length: int) -> None:
    """Print the table of the parts."""
    states, activations = [], []
    for name, shape in SHAPES.items():
        config = BertConfig(**shape)
        sizes, kept = zip(*(kept_per_token(config, length, *case) for case in CASES), strict=True)
        one = FP32_BYTES * sizes[0] / GIB
        states.append([name, f"{sizes[0] / 1e6:.0f}", *(f"{count * one:.2f}" for count in (1, 1, 2, STATES))])
        activations.append([name, *(f"{value / 2**20:.2f}" for value in kept)])
    print(markdown_table(["GiB", "million weights", "weights", "gradients", "AdamW", "sum"], states), "\n")
    head = ["MiB per token", "fp32", "bf16", f"fp32, {FLAG}", f"bf16, {FLAG}"]
    print(markdown_table(head, activations))


def runs(pairs: int) -> Iterator[bool]:
    """Whether the next run recomputes; every second pair is in reverse order."""
    for pair in range(pairs):
        yield from in_turns((False, True), pair)


def resident(batches: list[int], pairs: int) -> None:
    """Print the table of resident memory."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        shape, out = Path(folder, "config.json"), Path(folder, "bench.json")
        shape.write_text(json.dumps({"model_type": "bert", **SHAPES["BERT-large"]}))
        for batch in batches:
            gib: dict[bool, list[float]] = {False: [], True: []}
            for recompute in runs(pairs):
                command = [sys.executable, "-m", "hvd_bert.tools.bench", "--model", str(shape), "--json", str(out)]
                command += ["--strategy", "none", "--steps", "2", "--repeats", "1"]
                command += ["--per_device_train_batch_size", str(batch), *([FLAG] if recompute else [])]
                subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
                gib[recompute].append(json.loads(out.read_text(encoding="utf-8"))["memory_bytes"][0] / GIB)
                print(f"batch {batch}, {FLAG} {recompute}: {gib[recompute][-1]:.2f} GiB", file=sys.stderr, flush=True)
                out.unlink()
            ratio = statistics.median(gib[True]) / statistics.median(gib[False])
            rows.append([str(batch), *(spread(gib[recompute], 2) for recompute in (False, True)), f"{ratio:.2f}"])
    print(markdown_table(["windows per pass", "GiB without", "GiB with", "ratio"], rows))


def cost(batches: list[int], pairs: int, length: int) -> None:
    """Print the table of a step's times. On a busy machine, the CPU times are those to compare."""
    torch.manual_seed(0)
    config, rows = BertConfig(**SHAPES["BERT-large"]), []
    model = new_model(config, dropout=None, seed=0).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for batch in batches:
        windows = random_windows(np.full(batch, length, dtype=np.int32), config.vocab_size, seed=0)
        inputs = Collator(windows, torch.device("cpu"))(np.arange(batch))
        seconds: dict[tuple[str, bool], list[float]] = defaultdict(list)
        for number, recompute in enumerate([True, *runs(pairs)]):
            if recompute:
                recompute_layers(model)
            else:
                model.activation_checkpointing_disable()
            starts = {kind: clock() for kind, clock in CLOCKS.items()}
            optimizer.zero_grad()
            window_losses(model, inputs).mean().backward()
            optimizer.step()
            if number:  # the first is warm-up
                for kind, clock in CLOCKS.items():
                    taken = clock() - starts[kind]
                    seconds[kind, recompute].append(taken)
                    print(f"batch {batch}, {FLAG} {recompute}: {taken:.2f} s {kind}", file=sys.stderr, flush=True)
        for kind in CLOCKS:
            without, used = seconds[kind, False], seconds[kind, True]
            ratios = [two / one for one, two in zip(without, used, strict=True)]
            rows.append([str(batch), kind, spread(without), spread(used), spread(ratios, 2)])
    print(markdown_table(["windows per step", "time", "s without", "s with", "ratio of a pair"], rows))


def main() -> None:
    """Measure, and print a table and the environment."""
    parser = argparse.ArgumentParser(description="Memory of a training.")
    parser.add_argument("what", choices=("parts", "resident", "cost"))
    parser.add_argument(
        "--length", type=int, default=178, help="Tokens per window, except for resident. (default: 178)"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[2, 6], help="Windows per pass. (default: 2 6)")
    parser.add_argument("--pairs", type=int, default=2, help="Runs without and with the flag. (default: 2)")
    flags = parser.parse_args()
    if flags.what == "parts":
        parts(flags.length)
    elif flags.what == "cost":
        cost(flags.batch, flags.pairs, flags.length)
    else:
        resident(flags.batch, flags.pairs)
    print(f"\n{machine()}; threads: {torch.get_num_threads()}")


if __name__ == "__main__":
    main()
