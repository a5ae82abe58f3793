"""Measures where a training's memory goes, and what --gradient_checkpointing saves and costs.

    python benchmarks/memory.py parts
    python benchmarks/memory.py resident --batch 2 6 --pairs 2
    python benchmarks/memory.py cost --batch 2 --pairs 4

`parts` prints for BERT-base and BERT-large the memory of weights, gradients and AdamW's moments, and the memory per
token of the activations that the forward pass keeps for the backward pass: the tensors that autograd saves for three
windows of random tokens, less those for one.

The others compare BERT-large without and with the flag, by turns and in reverse order in every second pair.
`resident` trains in one process each, with `python -m hvd_bert.bench`, and prints the peak of resident memory, less
that before the model was created (medians). `cost` prints the CPU time of forward and backward passes in one process:
median and range.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compare_report import machine
from shared import REPOSITORY, markdown_table, spread
from transformers import BertConfig

from hvd_bert.bench.measure import FP32_BYTES, STATES, kept_bytes
from hvd_bert.bench.workload import random_windows
from hvd_bert.data.collate import Collator
from hvd_bert.model.bert import new_model, window_losses
from hvd_bert.model.precision import autocast
from hvd_bert.model.recomputation import recompute_layers

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
        yield from (False, True) if pair % 2 == 0 else (True, False)


def resident(batches: list[int], pairs: int) -> None:
    """Print the table of resident memory."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        shape, out = Path(folder, "config.json"), Path(folder, "bench.json")
        shape.write_text(json.dumps({"model_type": "bert", **SHAPES["BERT-large"]}))
        for batch in batches:
            gib: dict[bool, list[float]] = {False: [], True: []}
            for recompute in runs(pairs):
                command = [sys.executable, "-m", "hvd_bert.bench", "--model", str(shape), "--json", str(out)]
                command += ["--strategy", "none", "--steps", "2", "--repeats", "1"]
                command += ["--per_device_train_batch_size", str(batch), *([FLAG] if recompute else [])]
                subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
                gib[recompute].append(json.loads(out.read_text(encoding="utf-8"))["memory_bytes"][0] / GIB)
                print(f"batch {batch}, {FLAG} {recompute}: {gib[recompute][-1]:.2f} GiB", file=sys.stderr, flush=True)
                out.unlink()
            without, used = (statistics.median(gib[recompute]) for recompute in (False, True))
            rows.append([str(batch), f"{without:.1f}", f"{used:.1f}", f"{used / without:.2f}"])
    print(markdown_table(["windows per pass", "GiB without", "GiB with", "ratio"], rows))


def cost(batches: list[int], pairs: int, length: int) -> None:
    """Print the table of CPU times: those of other programs on a busy machine do not count."""
    torch.manual_seed(0)
    config, rows = BertConfig(**SHAPES["BERT-large"]), []
    model = new_model(config, dropout=None, seed=0).train()
    for batch in batches:
        windows = random_windows(np.full(batch, length, dtype=np.int32), config.vocab_size, seed=0)
        inputs = Collator(windows, torch.device("cpu"))(np.arange(batch))
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for number, recompute in enumerate([True, *runs(pairs)]):
            if recompute:
                recompute_layers(model)
            else:
                model.activation_checkpointing_disable()
            model.zero_grad()
            start = time.process_time()
            window_losses(model, inputs).mean().backward()
            if number:  # the first is warm-up
                seconds[recompute].append(time.process_time() - start)
                print(f"batch {batch}, {FLAG} {recompute}: {seconds[recompute][-1]:.2f} s", file=sys.stderr, flush=True)
        ratios = [used / without for without, used in zip(seconds[False], seconds[True], strict=True)]
        rows.append([str(batch), *(spread(seconds[recompute]) for recompute in (False, True)), spread(ratios, 2)])
    print(markdown_table(["windows per pass", "CPU s without", "CPU s with", "ratio of a pair"], rows))


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
