"""Measures how evenly the ranks share the work: the largest rank's tokens and cost over the mean, per step.

    python benchmarks/balance.py --model_name_or_path FOLDER --train_file train-v1.1.json

Covers the full steps of one epoch, and compares with windows that are assigned in turn. With `--evaluation` the
questions of the file are shared as an evaluation shares them. No model is run.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from numpy.typing import NDArray
from shared import markdown_table

from hvd_bert.config.settings import ModelArguments
from hvd_bert.data import squad, windows
from hvd_bert.data.balance import balanced_partition, window_costs
from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.model.bert import load_model, load_tokenizer
from hvd_bert.model.flops import forward_flops


def over_mean(totals: NDArray[np.int64]) -> float:
    """The largest total over the mean."""
    return float(totals.max() / totals.mean())


def figures(ratios: list[float]) -> str:
    """Mean, median and 99th percentile."""
    return f"{np.mean(ratios):.4f} / {np.median(ratios):.4f} / {np.quantile(ratios, 0.99):.4f}"


def training(lengths: NDArray[np.int32], even: int, sizes: list[int], batches: list[int]) -> None:
    """Print the table of the training steps."""
    head = ["ranks", "windows per rank", "steps", "tokens", "cost", "tokens, in turn", "ms to assign a step"]
    rows = []
    for size in sizes:
        for batch in batches:
            plan = BatchPlan.of_rank_batch(lengths, batch, 1, size, seed=42, crossover=even)
            steps = range(len(lengths) // plan.global_batch)  # the full steps
            plan.step_windows(0)
            partition_ms = []
            for step in steps:
                start = time.perf_counter()
                plan.rank_windows(step, 0)
                partition_ms.append(1e3 * (time.perf_counter() - start))
            tokens = figures([over_mean(plan.rank_tokens(step)) for step in steps])
            costs = figures([over_mean(plan.rank_costs(step)) for step in steps])
            in_turn = [lengths[plan.step_windows(step)].reshape(batch, size).sum(axis=0) for step in steps]
            ratios = [tokens, costs, figures([over_mean(totals) for totals in in_turn])]
            rows.append([str(size), str(batch), str(len(steps)), *ratios, f"{np.median(partition_ms):.2f}"])
    print(markdown_table(head, rows))


def evaluation(question: NDArray[np.int32], lengths: NDArray[np.int32], even: int, sizes: list[int]) -> None:
    """Print the table of the evaluation."""
    cost, tokens = np.zeros((2, question.max() + 1), dtype=np.int64)
    np.add.at(cost, question, window_costs(lengths, even))
    np.add.at(tokens, question, lengths)
    rows = []
    for size in sizes:
        shared = over_mean(np.array([tokens[share].sum() for share in balanced_partition(cost, size)]))
        in_turn = over_mean(np.array([tokens[rank::size].sum() for rank in range(size)]))
        rows.append([str(size), f"{shared:.4f}", f"{in_turn:.4f}"])
    print(markdown_table(["ranks", "tokens", "tokens, in turn"], rows))


def main() -> None:
    """Read the data, print a table."""
    parser = argparse.ArgumentParser(description="The largest rank's tokens and cost over the mean.")
    parser.add_argument("--model_name_or_path", required=True, help="Model whose tokenizer and sizes are used.")
    parser.add_argument("--train_file", required=True, help="SQuAD file.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="World sizes. (default: 2 4 8)")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 16], help="Windows per rank. (default: 8 16)")
    parser.add_argument("--evaluation", action="store_true", help="Share the questions of an evaluation.")
    args = parser.parse_args()
    model = ModelArguments(model_name_or_path=args.model_name_or_path)
    tokenizer = load_tokenizer(model)
    options = windows.WindowOptions(max_seq_length=384, doc_stride=128, max_samples=None)
    table = windows.prepare(squad.open_file(args.train_file, False), tokenizer, options)
    lengths, even = table.lengths, forward_flops(load_model(model, tokenizer, options.max_seq_length, seed=0)).crossover
    print(f"{len(lengths)} windows, {lengths.mean():.1f} tokens on average, {lengths.max()} at most\n")
    if args.evaluation:
        evaluation(table.column("question"), lengths, even, args.ranks)
    else:
        training(lengths, even, args.ranks, args.batch)


if __name__ == "__main__":
    main()
