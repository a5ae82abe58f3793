"""Evaluation on all ranks: each rank answers its share of the questions, rank 0 collects the answers and scores them.

All windows of a question stay on one rank, so each question is counted once for any world size. There is no
collective between the first batch and the last, so ranks may have different numbers of batches, or none.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from hvd_bert.config.settings import Config, DataArguments
from hvd_bert.data.balance import balanced_partition, window_costs
from hvd_bert.data.collate import Collator
from hvd_bert.data.sources.squad import Question
from hvd_bert.data.window_table import WindowTable
from hvd_bert.distributed.world import World
from hvd_bert.errors import EXIT_FAILURE
from hvd_bert.evaluation.postprocess import Answer, SpanOptions, WindowLogits, answers_of
from hvd_bert.evaluation.squad_metric import score
from hvd_bert.model.bert import span_logits, span_losses
from hvd_bert.model.precision import autocast, evaluating


@dataclass(frozen=True)
class Evaluation:
    """`metrics`: exact_match and f1 in percent, total, eval_loss, ..., on every rank. `answers`: in the order of the
    questions on rank 0, empty on the others."""

    metrics: dict[str, float]
    answers: list[Answer]


def span_options(data: DataArguments) -> SpanOptions:
    """The settings that define what counts as an answer."""
    return SpanOptions(**{field.name: getattr(data, field.name) for field in dataclasses.fields(SpanOptions)})


@torch.no_grad()
def window_logits(
    model: nn.Module,
    windows: WindowTable,
    ids: NDArray[np.int64],
    device: torch.device,
    batch_size: int,
    precision: str,
    losses: list[float],
    pad_to: int | None = None,
    show_progress: bool = False,
) -> Iterator[WindowLogits]:
    """The logits of `model` for the rows `ids` of `windows`, in that order; appends each window's loss to `losses`.

    `pad_to`: see `Collator`.
    """
    collate = Collator(windows, device, pad_to)
    firsts = range(0, len(ids), batch_size)
    for first in tqdm(firsts, "Evaluating", unit="batch", leave=False, disable=not show_progress):
        batch_ids = ids[first : first + batch_size]
        batch = collate(batch_ids)
        with autocast(device, precision):
            starts, ends = span_logits(model, batch)
        losses.extend(span_losses(starts, ends, batch).tolist())
        start_rows, end_rows = starts.cpu().numpy(), ends.cpu().numpy()
        questions, context_starts = (windows.numbers(name, batch_ids) for name in ("question", "context_start"))
        char_starts, char_ends = (windows.lists(name, batch_ids) for name in ("char_starts", "char_ends"))
        for i, length in enumerate(batch.lengths):
            yield WindowLogits(
                question=int(questions[i]),
                context_start=int(context_starts[i]),
                char_starts=char_starts[i],
                char_ends=char_ends[i],
                start_logits=start_rows[i, :length],
                end_logits=end_rows[i, :length],
            )


class Evaluator:
    """Evaluates a model on `questions`, whose windows are `windows`, with the options in `config.data`.

    `crossover`: see `window_costs`.
    """

    def __init__(
        self, questions: list[Question], windows: WindowTable, crossover: int, config: Config, world: World
    ) -> None:
        self.questions = questions
        self.windows = windows
        self.options = span_options(config.data)
        self.answer_normalization = config.data.answer_normalization
        self.batch_size = config.train.per_device_eval_batch_size
        self.precision = config.train.precision
        self.pad_to = config.data.pad_to
        self.world = world
        question = self.windows.column("question")
        tokens = self.windows.lengths
        costs = np.zeros(len(self.questions), dtype=np.int64)  # per question, over its windows
        np.add.at(costs, question, window_costs(tokens, crossover))
        self.shares = balanced_partition(costs, world.size)  # questions per rank
        mine = np.flatnonzero(np.isin(question, self.shares[world.rank]))
        # Windows of similar length share a batch, the longest first: if memory runs out, it does so at once.
        self.window_ids = mine[np.argsort(-tokens[mine], kind="stable")]

    def __call__(self, model: nn.Module) -> Evaluation:
        """Answer and score. Call it on all ranks. The model's training mode is restored."""
        rank, share = self.world.rank, self.shares[self.world.rank]
        losses: list[float] = []
        logits = window_logits(
            model,
            self.windows,
            self.window_ids,
            self.world.device,
            self.batch_size,
            self.precision,
            losses,
            self.pad_to,
            show_progress=rank == 0 and sys.stderr.isatty(),
        )
        # `question` becomes the index in this rank's own list.
        mine = (dataclasses.replace(window, question=int(np.searchsorted(share, window.question))) for window in logits)
        with self.world.raise_on_all_ranks(status=EXIT_FAILURE), evaluating(model):  # for example of NaN weights
            answers = answers_of([self.questions[i] for i in share], mine, self.options)
        counts = torch.tensor([sum(losses), len(losses)], dtype=torch.float64)
        total_loss, total_windows = self.world.sum(counts).tolist()
        by_rank = self.world.gather(answers)
        metrics: dict[str, float] = {}
        merged: list[Answer] = []
        if rank == 0:
            answered = zip(np.concatenate(self.shares).tolist(), chain.from_iterable(by_rank), strict=True)
            merged = [answer for _, answer in sorted(answered, key=itemgetter(0))]
            metrics = self._score(merged) | {"eval_loss": total_loss / total_windows}
        metrics = self.world.broadcast(metrics)
        return Evaluation(metrics, merged)

    def _score(self, answers: list[Answer]) -> dict[str, float]:
        v2 = self.options.version_2_with_negative
        # v2.0's best thresholds need all spans, also where "no answer" wins at the current threshold.
        texts = {answer.id: answer.best_span if v2 else answer.text for answer in answers}
        odds = {answer.id: answer.null_odds for answer in answers if answer.null_odds is not None} if v2 else None
        threshold = self.options.null_score_diff_threshold
        return score(self.questions, texts, odds, v2, threshold, self.answer_normalization)
