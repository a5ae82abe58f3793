"""Scoring: every rank answers its share of the questions, rank 0 puts them together and scores them.

A question's windows stay on one rank, so each question is counted once whatever the world size, and no collective
stands between the first batch and the last: ranks may have different numbers of batches, or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from hvd_bert.answers import Answer, SpanOptions, WindowLogits, answers_of
from hvd_bert.config import Config
from hvd_bert.data.batches import Collator
from hvd_bert.inputs import Inputs
from hvd_bert.model import autocast, span_logits, span_losses
from hvd_bert.squad_metric import score
from hvd_bert.world import World


@dataclass(frozen=True)
class Evaluation:
    """`metrics`: exact_match, f1, total, eval_loss, ... in percent, on every rank; `answers`: in the order of the
    questions on rank 0, empty on the others."""

    metrics: dict[str, float]
    answers: list[Answer]


class Evaluator:
    """Scores a model on the questions of `inputs.dev`, by the options in `config.data`."""

    def __init__(self, inputs: Inputs, config: Config, world: World) -> None:
        assert inputs.dev is not None
        data = config.data
        windows = inputs.dev.windows
        self.questions = inputs.dev.questions
        self.options = SpanOptions(
            data.n_best_size,
            data.max_answer_length,
            data.version_2_with_negative,
            data.null_score_diff_threshold,
        )
        self.collate = Collator(windows, world.device)
        self.batch_size = config.train.per_device_eval_batch_size
        self.precision = config.train.precision
        self.world = world
        owner = np.asarray(windows.with_format("numpy")["question"][:])
        mine = np.flatnonzero(owner % world.size == world.rank)
        lengths = np.asarray(windows.with_format("numpy")["context_end"][:])[mine]
        self.window_ids = mine[np.argsort(lengths, kind="stable")]  # windows of like length share a batch
        self.spans = windows.select_columns(["question", "context_start", "char_starts", "char_ends"]).with_format(
            "numpy"
        )

    def __call__(self, model: nn.Module) -> Evaluation:
        """Answer and score. Called by all ranks; leaves the model in the mode it was in."""
        was_training = model.training
        model.eval()
        losses: list[torch.Tensor] = []
        mine = self.questions[self.world.rank :: self.world.size]
        answers = answers_of(mine, self._logits(model, losses), self.options)
        model.train(was_training)
        loss_sum = torch.stack(losses).sum() if losses else torch.zeros((), device=self.world.device)
        counted = torch.stack([loss_sum.double().cpu(), torch.tensor(len(self.window_ids), dtype=torch.float64)])
        total_loss, total_windows = self.world.sum(counted).tolist()
        by_rank = self.world.allgather(answers)
        metrics: dict[str, float] = {}
        merged: list[Answer] = []
        if self.world.rank == 0:
            merged = [by_rank[i % self.world.size][i // self.world.size] for i in range(len(self.questions))]
            metrics = self._score(merged) | {"eval_loss": total_loss / total_windows}
        return Evaluation(self.world.broadcast(metrics), merged)

    @torch.no_grad()
    def _logits(self, model: nn.Module, losses: list[torch.Tensor]) -> Iterator[WindowLogits]:
        """Run this rank's windows; appends each batch's summed loss to `losses`."""
        for first in range(0, len(self.window_ids), self.batch_size):
            ids = self.window_ids[first : first + self.batch_size]
            batch = self.collate(ids)
            with autocast(self.world.device, self.precision):
                starts, ends = span_logits(model, batch)
            losses.append(span_losses(starts, ends, batch).sum())
            start_rows, end_rows = starts.cpu().numpy(), ends.cpu().numpy()
            rows = self.spans[ids.tolist()]
            for i in range(len(ids)):
                begin = int(rows["context_start"][i])
                length = begin + len(rows["char_starts"][i]) + 1  # the context and the final [SEP]
                yield WindowLogits(
                    question=int(rows["question"][i]) // self.world.size,  # in this rank's own list
                    context_start=begin,
                    char_starts=rows["char_starts"][i],
                    char_ends=rows["char_ends"][i],
                    start_logits=start_rows[i, :length],
                    end_logits=end_rows[i, :length],
                )

    def _score(self, answers: list[Answer]) -> dict[str, float]:
        v2 = self.options.version_2_with_negative
        # For v2.0's best thresholds the spans are needed also where "no answer" won at today's threshold.
        texts = {answer.id: answer.best_span if v2 else answer.text for answer in answers}
        odds = {answer.id: answer.null_odds for answer in answers if answer.null_odds is not None} if v2 else None
        return score(self.questions, texts, odds, v2, self.options.null_score_diff_threshold)
