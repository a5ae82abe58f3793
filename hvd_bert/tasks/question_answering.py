"""Extractive question answering on data like SQuAD's: the model finds the answer's span in the context."""

from __future__ import annotations

import sys
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain
from statistics import fmean
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor, nn
from transformers import AutoModelForQuestionAnswering

from hvd_bert.config.command_line import trained_settings
from hvd_bert.config.data import QUESTION_ANSWERING, DataArguments
from hvd_bert.config.data_files import DataFile
from hvd_bert.config.settings import Config
from hvd_bert.data.batch_plan import Ids, mix
from hvd_bert.data.cache import default_cache_dir
from hvd_bert.data.collate import Batch
from hvd_bert.data.counts import FileCounts, count_shared
from hvd_bert.data.sources import squad
from hvd_bert.data.sources.squad import Question, Source
from hvd_bert.data.window_cutting import WindowOptions, WindowTokenizer
from hvd_bert.data.window_table import WindowTable, in_memory, prepare
from hvd_bert.errors import UserError, log
from hvd_bert.evaluation.evaluator import span_options, span_outputs, window_logits
from hvd_bert.evaluation.forward import window_losses
from hvd_bert.evaluation.postprocess import Answer, answers_of
from hvd_bert.evaluation.samples import sample_answers
from hvd_bert.evaluation.squad_metric import score
from hvd_bert.tasks.base import MicroBatch
from hvd_bert.tasks.dataset import Examples
from hvd_bert.tasks.encoder import EncoderTask

SCORES = ("exact_match", "f1")
DEV_BATCHES = 16  # approximate number of batches per rank that --fast_dev_run evaluates
ENTRY = ("text", "start_logit", "end_logit", "probability")  # keys of a candidate in eval_nbest_predictions.json


@dataclass(frozen=True, eq=False, kw_only=True)
class QuestionSet(Examples):
    """The windows of all files' questions. `questions` and `sets` (see `members`) are empty for training data."""

    source: Source
    windows: WindowTable
    questions: list[Question] = field(default_factory=list)
    sets: Mapping[str, range] = field(default_factory=dict)


class QuestionAnswering(EncoderTask):
    """Question answering. An example is a window; the outputs of a question's windows are combined into its answer."""

    unit: ClassVar[str] = "windows"
    metrics: Mapping[str, Literal["max", "min"]] = {"f1": "max", "exact_match": "max", "eval_loss": "min"}
    train: QuestionSet | None = None
    dev: QuestionSet | None = None

    def load(self, config: Config) -> None:
        data, args, name = config.data, config.train, str(config.model.model_name_or_path)
        task = QUESTION_ANSWERING if args.do_train else trained_settings(name).get("task", QUESTION_ANSWERING)
        if task != QUESTION_ANSWERING:
            raise UserError(f"{name} was trained with --task {task}. Add this flag.")
        default_cache_dir()  # reports an invalid variable before the model is loaded
        self.load_model(AutoModelForQuestionAnswering)
        self.counts: dict[str, dict[str, dict[str, int | float]]] = {}  # split -> file -> counts
        splits = ["train"] if args.do_train else []
        if args.do_eval and data.train_file and not data.validation_file:
            log.info("No --validation_file is given: the model is not evaluated.")
        elif args.do_eval:
            splits.append("validation")
        # All data are opened before the first file is tokenized, which may take minutes.
        opened = {split: open_split(data, split, config.model.cache_dir) for split in splits}
        self.train = self._load_split("train", opened) if args.do_train else None
        if "validation" in opened:
            self.dev = self._load_split("validation", opened)
            if len(self.dev.sets) > 1:
                names = [metric_key(name, data) for data in ("macro", *self.dev.sets) for name in SCORES]
                self.metrics = {**self.metrics, **dict.fromkeys(names, "max")}

    def question_set(self, source: Source, windows: WindowTable, **more: Any) -> QuestionSet:
        """Make examples from windows. `more`: further fields of `QuestionSet`."""
        collate = self.collator(windows)
        return QuestionSet(collate, windows.lengths, source.digest, source=source, windows=windows, **more)

    def _load_split(self, split: str, opened: Mapping[str, list[tuple[DataFile, Source]]]) -> QuestionSet:
        """Load the "train" or "validation" questions and their windows, cached if possible. Raises UserError.

        With --fast_dev_run, only every n-th validation question is used.
        """
        data, world = self.config.data, self.world
        files, sources = zip(*opened[split], strict=True)
        limit = data.max_train_samples if split == "train" else data.max_eval_samples
        options, tables = WindowOptions(data.max_seq_length, data.doc_stride, limit), []
        progress, leader = world.cross_rank == 0 and sys.stderr.isatty(), world.local_rank == 0
        for source in sources:
            table = prepare(source, self.tokenizer, options, show_progress=progress, leader=leader)
            self._report("training" if split == "train" else split, source.name, table, leader)
            log.info("%s: %d windows of %d questions", source.name, table.counts.windows, table.counts.questions)
            tables.append(table)
        source, windows = squad.joined(sources, limit), WindowTable.joined(tables)
        if split == "train":
            mixture = mix([*map(len, tables)], [file.weight for file in files])
            return self.question_set(source, windows, mixture=mixture)
        questions = [source.questions()[:limit] for source in sources]
        squad.check_ids(sources, questions)
        if self.config.train.fast_dev_run:
            nth = -(-len(windows) // (DEV_BATCHES * self.config.train.per_device_eval_batch_size * world.size))
            questions = [some[::nth] for some in questions]
            few = in_memory([*chain.from_iterable(questions)], WindowTokenizer(self.tokenizer, options))
            self.dev_share, windows = len(few) / len(windows), few
        sets = members({file.name: len(some) for file, some in zip(files, questions, strict=True)})
        groups, every = windows.column("question"), [*chain.from_iterable(questions)]
        return self.question_set(source, windows, groups=groups, questions=every, sets=sets)

    def _report(self, purpose: str, name: str, table: WindowTable, warns: bool) -> None:
        """Record the counts of a file and, if `warns`, log the warnings about its data."""
        data = self.config.data
        shared = count_shared(table.keys, self.train.windows.keys) if self.train else None
        file = FileCounts(
            name, purpose, table.counts, table.findings, data.max_answer_length, data.answer_language, shared
        )
        self.counts.setdefault(purpose, {})[name] = file.facts()
        if warns:
            file.warn()

    def limit(self, data: DataArguments) -> None:
        """Do nothing: `load` has limited the number of questions."""

    def positions(self, batch: Any, tokens: int) -> int:
        return int(batch.num_positions)

    def losses(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        return window_losses(model, batch.content)

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return span_outputs(model, batch)

    def collect(self, outputs: Iterable[tuple[Ids, Tensor]]) -> dict[int, Answer]:
        """Answer this rank's questions. Returns question number -> answer."""
        assert self.dev is not None
        windows = self.dev.windows
        mine = np.unique(windows.numbers("question", self._share))
        # `answers_of` needs indices into this rank's list of questions.
        logits = (replace(w, question=int(np.searchsorted(mine, w.question))) for w in window_logits(windows, outputs))
        answers = answers_of([self.dev.questions[i] for i in mine], logits, span_options(self.config.data))
        return dict(zip(mine.tolist(), answers, strict=True))

    def join(self, collected: Sequence[dict[int, Answer]], order: Tensor) -> list[Answer]:
        """Join the answers of all ranks, in the order of the questions."""
        answers = dict(ChainMap(*collected))
        return [answers[number] for number in range(len(answers))]

    def score(self, outputs: list[Answer]) -> dict[str, float]:
        assert self.dev is not None
        data, sets = self.config.data, self.dev.sets
        v2 = data.version_2_with_negative
        # The best thresholds of v2.0 need each question's best span, even if "no answer" wins at the current threshold.
        texts = {answer.id: answer.best_span if v2 else answer.text for answer in outputs}
        odds = {answer.id: answer.null_odds for answer in outputs if answer.null_odds is not None} if v2 else None
        metrics: dict[str, float] = {}
        for name, members in sets.items():
            questions = self.dev.questions[members.start : members.stop]
            scores = score(questions, texts, odds, v2, data.null_score_diff_threshold, data.answer_language)
            metrics |= {metric_key(metric, name): value for metric, value in scores.items()}
        files = [name for name in sets if name]
        for metric in SCORES if files else ():  # as in MRQA, the mean over the files is unweighted
            metrics[metric_key(metric, "macro")] = fmean(metrics[metric_key(metric, name)] for name in files)
        return metrics

    @staticmethod
    def summary(metrics: dict[str, float]) -> str:
        scores = f"EM {metrics['exact_match']:.2f}  F1 {metrics['f1']:.2f}  loss {metrics['eval_loss']:.3f}"
        others = {"best", "HasAns", "NoAns"}
        of_files = [f"{n} {metrics[n]:.2f}" for n in metrics if n.endswith("_f1") and not others & {*n.split("_")}]
        return "  ".join([f"{scores}  on {metrics['total']:.0f} questions", *of_files])

    def files(self, outputs: list[Answer]) -> dict[str, Any]:
        """Make run_qa's output files and the samples. Only v2.0 has eval_null_odds.json."""
        assert self.dev is not None
        data = self.config.data
        rules = data.version_2_with_negative, data.answer_language
        odds = {answer.id: answer.null_odds for answer in outputs if answer.null_odds is not None}
        return {
            "eval_predictions.json": {answer.id: answer.text for answer in outputs},
            "eval_nbest_predictions.json": {
                answer.id: [{name: getattr(candidate, name) for name in ENTRY} for candidate in answer.nbest]
                for answer in outputs
            },
            "eval_samples.json": sample_answers(self.dev.questions, outputs, *rules),
        } | ({"eval_null_odds.json": odds} if odds else {})

    def window_names(self, ids: Ids) -> list[str]:
        assert self.train is not None
        try:
            return [self._question_ids[n] for n in self.train.windows.numbers("question", ids).tolist()]
        except Exception:  # the data was removed or changed, or is synthetic (bench); a message should not fail
            return super().window_names(ids)

    @cached_property
    def _question_ids(self) -> list[str]:
        """Ids of the training questions. The data is read again when a message first needs them."""
        assert self.train is not None
        return [question.id for question in self.train.source.questions()]

    def facts(self) -> dict[str, object]:
        sets = {"training": self.train, "validation": self.dev}
        findings = {name: questions.windows.findings for name, questions in sets.items() if questions}
        skip, repair = ("left_out", "mistakes"), ("repaired", "first_repaired")
        keys = {"error": (), "skip": skip, "repair": (*skip, *repair)}[self.config.data.bad_examples]
        counts = {name: {key: getattr(found, key) for key in keys} for name, found in findings.items()}
        return {"data_counts": self.counts} | ({"bad_examples": counts} if keys else {})


def metric_key(name: str, data: str) -> str:
    """Return the key of a metric for the validation set `data`; "" stands for all sets together."""
    return f"{data}_{name}" if data else name


def members(sizes: Mapping[str, int]) -> dict[str, range]:
    """Map the name of each validation set to its questions' indices, and "" to all (unless a set is named "")."""
    ends = list(accumulate(sizes.values()))
    sets = {name: range(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}
    return {"": range(ends[-1])} | sets


def open_split(data: DataArguments, split: str, cache_dir: str | None) -> list[tuple[DataFile, Source]]:
    """Open the "train" or "validation" questions, from files or from the hub."""
    columns = data.question_column, data.context_column, data.answer_column
    reading = squad.Reading(*columns, data.bad_examples, "training" if split == "train" else "evaluation")
    if data.dataset_name:
        source = squad.open_hub(
            data.dataset_name, split, data.version_2_with_negative, data.dataset_config_name, cache_dir, reading
        )
        return [(DataFile(data.dataset_name), source)]
    files = data.files(f"{split}_file")
    if not files:
        raise UserError(
            f"--{split}_file is missing: give a file of questions, or omit all files to use squad from the hub."
        )
    return [(file, squad.open_file(file.path, data.version_2_with_negative, reading)) for file in files]
