"""How even the ranks' work is: the largest rank's tokens, and cost, over the mean, step by step of an epoch.

    python benchmarks/balance.py --model_name_or_path FOLDER --train_file train-v1.1.json

Beside each: what dealing the step out in turn would give. No model is run; with `--scoring` the questions of the file
are shared as the scoring shares them, instead.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from transformers import AutoConfig  # noqa: E402

from hvd_bert.config.settings import ModelArguments  # noqa: E402
from hvd_bert.data import squad, windows  # noqa: E402
from hvd_bert.data.balance import balanced_partition, crossover, window_costs  # noqa: E402
from hvd_bert.data.batch_plan import BatchPlan  # noqa: E402
from hvd_bert.model.bert import load_tokenizer  # noqa: E402


def over_mean(totals: NDArray[np.int64]) -> float:
    return float(totals.max() / totals.mean())


def figures(ratios: list[float]) -> str:
    return f"{np.mean(ratios):.4f} | {np.median(ratios):.4f} | {np.quantile(ratios, 0.99):.4f}"


def training(lengths: NDArray[np.int32], even: int, sizes: list[int], batches: list[int]) -> None:
    print("| ranks | batch per rank | steps | tokens: mean | median | p99 | cost: mean | median | p99 ", end="")
    print("| in turn, tokens: mean | median | p99 | ms to deal a step, median |\n" + "|---" * 13 + "|")
    for size in sizes:
        for batch in batches:
            plan = BatchPlan.of_rank_batch(lengths, batch, 1, size, seed=42, crossover=even)
            steps = range(len(lengths) // plan.global_batch)  # the full ones
            plan.step_windows(0)
            partition_ms = []
            for step in steps:
                start = time.perf_counter()
                plan.rank_windows(step, 0)
                partition_ms.append(1e3 * (time.perf_counter() - start))
            tokens = figures([over_mean(plan.rank_tokens(step)) for step in steps])
            costs = figures([over_mean(plan.rank_costs(step)) for step in steps])
            in_turn = [lengths[plan.step_windows(step)].reshape(batch, size).sum(axis=0) for step in steps]
            ratios = tokens, costs, figures([over_mean(totals) for totals in in_turn])
            row = (size, batch, len(steps), *ratios, f"{np.median(partition_ms):.2f}")
            print("| " + " | ".join(map(str, row)) + " |")


def evaluation(question: NDArray[np.int32], lengths: NDArray[np.int32], even: int, sizes: list[int]) -> None:
    cost, tokens = np.zeros((2, question.max() + 1), dtype=np.int64)
    np.add.at(cost, question, window_costs(lengths, even))
    np.add.at(tokens, question, lengths)
    print("| ranks | tokens | in turn |\n|---|---|---|")
    for size in sizes:
        shared = over_mean(np.array([tokens[share].sum() for share in balanced_partition(cost, size)]))
        in_turn = over_mean(np.array([tokens[rank::size].sum() for rank in range(size)]))
        print(f"| {size} | {shared:.4f} | {in_turn:.4f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="The largest rank's tokens and cost over the mean.")
    parser.add_argument("--model_name_or_path", required=True, help="for its tokenizer and its sizes")
    parser.add_argument("--train_file", required=True, help="questions in SQuAD's JSON")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 16], help="windows of a rank in a step")
    parser.add_argument("--scoring", action="store_true", help="the sharing of the questions when scoring")
    args = parser.parse_args()
    tokenizer = load_tokenizer(ModelArguments(model_name_or_path=args.model_name_or_path))
    config = AutoConfig.from_pretrained(args.model_name_or_path)
    options = windows.WindowOptions(max_seq_length=384, doc_stride=128, max_samples=None)
    table = windows.prepare(squad.open_file(args.train_file, False), tokenizer, options)
    lengths, even = table.lengths, crossover(config)
    print(f"{len(lengths)} windows, {lengths.mean():.1f} tokens in the mean, {lengths.max()} at most; crossover {even}")
    if args.scoring:
        evaluation(table.column("question"), lengths, even, args.ranks)
    else:
        training(lengths, even, args.ranks, args.batch)


if __name__ == "__main__":
    main()
