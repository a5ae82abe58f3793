"""Measures the trainer's CPU layers: products by oneDNN, dropout, attention with dropout, each next to torch's.

    OMP_NUM_THREADS=1 python benchmarks/cpu_kernels.py --model_name_or_path FOLDER --train_file train-v1.1.json

Measures CPU time on one thread. The variants take turns, and ratios are taken turn by turn:

1. fp32 products of the model's shapes, for the output and both gradients, by torch (MKL on x86) and by oneDNN;
2. attention's fp32 products for several window lengths, by torch and by numpy's BLAS;
3. dropout with p = 0.1 of a batch's hidden states, by torch and by `hvd_bert.model.cpu.dropout`;
4. forward and backward pass of the model on real batches of `--batch` windows, with each layer replaced, in fp32 and
   in bf16 autocast.

Prints Markdown tables of medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from shared import markdown_table, spread
from torch import nn

from hvd_bert.config.settings import ModelArguments
from hvd_bert.data import window_table
from hvd_bert.data.collate import Batch, Collator
from hvd_bert.data.sources import squad
from hvd_bert.data.window_cutting import WindowOptions, WindowTokenizer
from hvd_bert.model.bert import load_model, load_tokenizer, place, window_losses
from hvd_bert.model.cpu import dropout, kernels, linear
from hvd_bert.model.cpu.kernels import FUSED, ONEDNN, OPENBLAS, OWN, Kernels
from hvd_bert.model.cpu.malloc import keep_memory
from hvd_bert.model.precision import autocast

CPU = torch.device("cpu")
VARIANTS = {  # which layers are replaced
    "none": Kernels(),
    "products": Kernels(linear=ONEDNN),
    "dropout": Kernels(dropout=OWN),
    "attention with dropout": Kernels(attention=OWN, attention_products=OPENBLAS),
    "all": Kernels(ONEDNN, OPENBLAS, OWN, OWN),
    "attention, fused": Kernels(attention=FUSED),
    "linear layers in bf16, fused": Kernels(linear=FUSED),
    "all, fused": Kernels(linear=FUSED, attention=FUSED, dropout=OWN),
}


def in_turns(variants: Mapping[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """CPU seconds of each variant, `turns` times after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(turns + 1):
        for name, work in variants.items():
            start = time.process_time()
            work()
            seconds[name].append(time.process_time() - start)
    return {name: values[1:] for name, values in seconds.items()}


def products(shapes: Sequence[tuple[int, int]], rows: int, turns: int) -> None:
    """Table 1."""
    print(f"\n| in x out, {rows} rows | product | torch, GFLOP/s | oneDNN, GFLOP/s |\n|---|---|---|---|")
    for size_in, size_out in shapes:
        x, w, b, dy = (torch.randn(s) for s in ((rows, size_in), (size_out, size_in), (size_out,), (rows, size_out)))
        cases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "forward": (lambda: torch.addmm(b, x, w.t()), lambda: linear.product(x, w, b)),  # noqa: B023
            "gradient of the input": (lambda: dy @ w, lambda: linear.product(dy, w.t())),  # noqa: B023
            "gradient of the weight": (lambda: dy.t() @ x, lambda: linear.product(dy.t(), x.t())),  # noqa: B023
        }
        for name, (of_torch, of_onednn) in cases.items():
            with kernels.override(Kernels(linear=ONEDNN)):
                times = in_turns({"torch": of_torch, "oneDNN": of_onednn}, turns)
            speeds = [2e-9 * rows * size_in * size_out / statistics.median(t) for t in times.values()]
            print(f"| {size_in} x {size_out} | {name} | {speeds[0]:.0f} | {speeds[1]:.0f} |")


def attention_products(lengths: Sequence[int], heads: int, size: int, turns: int) -> None:
    """Table 2: products of views of [tokens, heads, head size], as attention computes them."""
    print(f"\n| tokens, {heads} heads of {size} | product | torch, GFLOP/s | numpy, GFLOP/s |\n|---|---|---|---|")
    for length in lengths:
        rows, others, to = (torch.randn(length, heads, size).transpose(0, 1) for _ in range(3))
        square, scores = torch.rand(heads, length, length), torch.empty(heads, length, length)
        cases = {
            "scores": (rows, others.transpose(1, 2), scores),
            "of the probabilities": (square, rows, to),
            "of the transposed probabilities": (square.transpose(1, 2), rows, to),
        }
        for name, given in cases.items():
            left, right, out = (tensor.numpy() for tensor in given)
            times = in_turns(
                {
                    "torch": lambda: [torch.bmm(*given[:2], out=given[2]) for _ in range(50)],  # noqa: B023
                    "numpy": lambda: [np.matmul(left, right, out=out) for _ in range(50)],  # noqa: B023
                },
                turns,
            )
            speeds = [1e-7 * heads * length**2 * size / statistics.median(t) for t in times.values()]
            print(f"| {length} | {name} | {speeds[0]:.0f} | {speeds[1]:.0f} |")


def dropouts(count: int, turns: int) -> None:
    """Measurement 3."""
    values = torch.randn(count, requires_grad=True)
    upstream = torch.randn(count)

    def both_passes(layer: nn.Module) -> Callable[[], object]:
        return lambda: layer(values).backward(upstream)

    variants = {"torch": both_passes(nn.Dropout(0.1)), "hvd_bert": both_passes(dropout.Dropout(0.1))}
    with kernels.override(Kernels(dropout=OWN)):
        found = in_turns(variants, turns)
    for name, seconds in found.items():
        print(
            f"\ndropout of {count:,} elements, forward and backward, {name}: {statistics.median(seconds) * 1e3:.2f} ms"
        )


def steps(model: nn.Module, batches: list[Batch], turns: int) -> None:
    """Table 4."""

    def step(variant: str, precision: str, batch: Batch) -> Callable[[], None]:
        def work() -> None:
            with kernels.override(VARIANTS[variant]):
                with autocast(CPU, precision):
                    loss = window_losses(model, batch).mean()
                loss.backward()
            model.zero_grad()

        return work

    usable = [name for name, variant in VARIANTS.items() if kernels.without_missing(variant) == variant]
    cases = [(variant, precision) for precision in ("fp32", "bf16") for variant in usable]
    seconds: dict[str, list[float]] = defaultdict(list)
    for batch in batches:
        works: dict[str, Callable[[], object]] = {
            f"{variant}, {precision}": step(variant, precision, batch) for variant, precision in cases
        }
        for case, values in in_turns(works, turns).items():
            seconds[case].append(statistics.median(values))
    rows = []
    for variant, precision in cases:
        values = seconds[f"{variant}, {precision}"]
        to_torch, to_fp32 = (
            [before / after for before, after in zip(seconds[other], values, strict=True)]
            for other in (f"none, {precision}", f"{variant}, fp32")
        )
        median = f"{statistics.median(values):.3f}"
        rows.append([f"{variant}, {precision}", median, spread(to_torch, 2), spread(to_fp32, 2)])
    head = ["replaced", f"s per batch, median of {len(batches)}", "times as fast as torch's", "times as fast as fp32"]
    print("\n" + markdown_table(head, rows))


def main() -> None:
    """Load the data, measure, print."""
    parser = argparse.ArgumentParser(description="CPU time of the trainer's CPU layers next to torch's.")
    parser.add_argument("--model_name_or_path", required=True, help="Folder of a BERT.")
    parser.add_argument("--train_file", required=True, type=Path, help="SQuAD file.")
    parser.add_argument("--batch", type=int, default=8, help="Windows per batch. (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=6, help="Number of batches. (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="Runs per variant and batch. (default: %(default)s)")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    args = ModelArguments(model_name_or_path=flags.model_name_or_path)
    tokenizer = load_tokenizer(args)
    source = squad.open_file(flags.train_file, False)
    options = WindowOptions()
    windows = window_table.in_memory(source.questions()[:2000], WindowTokenizer(tokenizer, options))
    collate, order = Collator(windows, CPU), np.random.default_rng(0).permutation(len(windows))
    batches = [collate(order[i * flags.batch :][: flags.batch]) for i in range(flags.batches)]
    model = load_model(args, tokenizer, options.max_seq_length, seed=0).train()
    place(model, CPU)
    hidden, inner, rows = model.config.hidden_size, model.config.intermediate_size, sum(batches[0].lengths)
    tokens = [sum(batch.lengths) for batch in batches]
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, tokens per batch: {tokens}")
    products([(hidden, hidden), (hidden, inner), (inner, hidden)], rows, flags.turns)
    heads = model.config.num_attention_heads
    attention_products((64, 128, 179, 256, 384), heads, hidden // heads, flags.turns)
    dropouts(rows * hidden, flags.turns)
    steps(model, batches, flags.turns)


if __name__ == "__main__":
    main()
