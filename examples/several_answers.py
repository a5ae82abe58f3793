"""Find all answers to a question in its context, or none: a custom task that tags the context's tokens.

    PYTHONPATH=examples horovodrun -np 2 python -m hvd_bert.train --task several_answers:SeveralAnswers \
        --train_file train.jsonl --validation_file dev.jsonl --output_dir runs/several

A row has the keys "question", "context" and "answers", as {"text": ["Ada", "Eve"], "answer_start": [0, 8]}. All answers
in a row are right; the lists are empty if there is none. Files may have any format of the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import datasets
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers import AutoModelForTokenClassification

from hvd_bert.config.data import DataArguments
from hvd_bert.config.settings import Config
from hvd_bert.data.sources.squad import Question, Reading, open_file
from hvd_bert.errors import UserError
from hvd_bert.tasks.dataset import Examples
from hvd_bert.tasks.encoder import IGNORED, EncoderTask, Labelled
from hvd_bert.tasks.rows import text_column

TAGS = ("O", "B", "I")  # tags of tokens: outside of all answers, an answer's first token, its other tokens


@dataclass(frozen=True, eq=False, kw_only=True)
class Windows(Examples):
    """The windows of `questions`. `offsets`: for each window, the characters [start, end) of its tokens."""

    questions: Sequence[Question]
    offsets: Sequence[Sequence[tuple[int, int]]]


class SeveralAnswers(EncoderTask):
    """A task that finds all answers to a question. The answers in a question's windows are joined."""

    unit = "windows"
    metrics: Mapping[str, Literal["max", "min"]] = {"f1": "max", "exact_match": "max", "eval_loss": "min"}
    overlap = 64  # of neighboring windows of a long context, in tokens; at most a sixth of a window
    reading = Reading()  # names of columns, which a subclass may set
    dev: Any = None  # Windows, or None

    def load(self, config: Config) -> None:
        self.load_model(AutoModelForTokenClassification, TAGS)
        self.train = self.windows(self.questions("train")) if config.train.do_train else None
        if config.train.do_eval and (config.data.dataset_name or config.data.validation_file):
            self.dev = self.windows(self.questions("validation")[: config.data.max_eval_samples])

    def questions(self, split: str) -> list[Question]:
        files = self.config.data.files(f"{split}_file")
        if not files or any(file.weight != 1 for file in files):
            raise UserError(f"--{split}_file: give one or more files of questions, without weights.")
        questions = [question for file in files for question in open_file(file.path, True, self.reading).questions()]
        for question in questions if split == "train" else ():
            if None in question.answer_starts:
                raise UserError(f"--{split}_file: question {question.id!r} lacks an answer_start. Add one per answer.")
        return questions

    def limit(self, data: DataArguments) -> None:
        super().limit(replace(data, max_eval_samples=None))  # `load` has limited the number of questions

    def inputs(self, rows: datasets.Dataset) -> Examples:
        texts = (text_column(rows, name) for name in (self.reading.question_column, self.reading.context_column))
        return self.windows([Question("", "", context, asked, (), ()) for asked, context in zip(*texts, strict=True)])

    def windows(self, questions: Sequence[Question]) -> Windows:
        """Cut questions into overlapping windows, and tag the tokens of their contexts."""
        texts = [question.question for question in questions], [question.context for question in questions]
        stride = min(self.overlap, self.config.data.max_seq_length // 6)
        cut = self.encode(*texts, stride=stride, return_overflowing_tokens=True, return_offsets_mapping=True)
        numbers, offsets = cut["overflow_to_sample_mapping"], cut["offset_mapping"]
        tags = [self.tags(questions[n], offsets[i], cut.sequence_ids(i)) for i, n in enumerate(numbers)]
        more = {"groups": np.array(numbers, dtype=np.int32), "questions": questions, "offsets": offsets}
        return Windows(**vars(self.examples(cut, tags)) | more)

    def tags(self, question: Question, offsets: Sequence[tuple[int, int]], parts: Sequence[int | None]) -> list[int]:
        """Return the tag number of each token in a window. `parts`: 1 for tokens of the context."""
        pairs, tags, before = zip(question.answer_starts, question.answer_texts, strict=True), [], None
        answers = [(start, start + len(text)) for start, text in pairs if start is not None]
        for (start, end), part in zip(offsets, parts, strict=True):
            answer = next((answer for answer in answers if part == 1 and start < answer[1] and answer[0] < end), None)
            tag = "O" if answer is None else "B" if answer != before and start <= answer[0] else "I"
            tags.append(self.classes.index(tag) if part == 1 else IGNORED)
            before = answer
        return tags

    def forward(self, model: nn.Module, batch: Labelled) -> tuple[Tensor, Tensor]:
        logits, tags = self.logits(model, batch[0]), batch[1]
        losses = cross_entropy(logits.mT, tags, reduction="none", ignore_index=IGNORED)
        outputs = torch.stack([logits.argmax(-1), tags], -1)
        missing = self.config.data.max_seq_length - tags.shape[1]  # all outputs need the same shape
        return losses.sum(1) / (tags != IGNORED).sum(1).clamp(min=1), pad(outputs, (0, 0, 0, missing), value=IGNORED)

    def answers(self, outputs: Tensor) -> list[dict[int, str]]:
        """Return the text of each question's answers, by the position of its first character."""
        tagged: list[dict[tuple[int, int], str]] = [{} for _ in self.dev.questions]  # tags of characters [start, end)
        for number, offsets, window in zip(self.dev.groups, self.dev.offsets, outputs.tolist(), strict=True):
            for token, (tag, label) in zip(offsets, window, strict=False):
                if label != IGNORED:
                    tagged[number].setdefault(token, self.classes[tag])
        found: list[dict[int, str]] = [{} for _ in tagged]
        for question, tags, texts in zip(self.dev.questions, tagged, found, strict=True):
            spans, before = list[tuple[int, int]](), "O"
            for (start, end), tag in tags.items():
                if tag == "B" or (tag == "I" and before == "O"):
                    spans.append((start, end))
                elif tag == "I":
                    spans[-1] = spans[-1][0], end
                before = tag
            texts |= {start: question.context[start:end] for start, end in spans}
        return found

    def score(self, outputs: Tensor) -> dict[str, float]:
        found = [{*answers.values()} for answers in self.answers(outputs)]
        right = [{text.strip() for text in question.answer_texts} for question in self.dev.questions]
        hits, total = (sum(map(len, sets)) for sets in (map(set.__and__, found, right), found + right))
        exact = sum(map(set.__eq__, found, right)) / len(right)
        return {"f1": 2 * hits / total if total else 1.0, "exact_match": exact}

    def predictions(self, outputs: Tensor) -> dict[str, list[Any]]:
        answers = self.answers(outputs)
        return {"prediction": [[*each.values()] for each in answers], "prediction_start": [[*each] for each in answers]}
