"""Question answering on data like SQuAD's: the model marks the answer in the passage."""

from __future__ import annotations

import sys
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor, nn

from hvd_bert.config.data_files import DataFile
from hvd_bert.config.settings import Config, DataArguments
from hvd_bert.data.batch_plan import Ids, Parts, balanced_partition, mixture, window_costs
from hvd_bert.data.collate import Batch, Collator
from hvd_bert.data.sources import squad
from hvd_bert.data.sources.squad import Question, Source
from hvd_bert.data.window_cutting import WindowOptions
from hvd_bert.data.window_table import WindowTable, prepare
from hvd_bert.distributed.world import World, log
from hvd_bert.errors import UserError
from hvd_bert.evaluation.evaluator import evaluated, span_options, window_logits
from hvd_bert.evaluation.postprocess import Answer, answers_of
from hvd_bert.evaluation.samples import sample_answers
from hvd_bert.evaluation.squad_metric import score
from hvd_bert.model.bert import compile_layers, load_model, load_tokenizer, tokenizer_digest, window_losses
from hvd_bert.model.flops import forward_flops
from hvd_bert.model.precision import evaluating
from hvd_bert.tasks.base import EvaluationResult, Task, encoder_config, make_plan, members, metric_of

# Answers by the question's number, and the sum and number of the losses of their windows.
Answers = tuple[dict[int, Answer], float, int]
SCORES = ("exact_match", "f1")


class Evaluation(NamedTuple):
    """`metrics`: exact_match and f1 in percent, total, eval_loss, ..., on every rank. `answers`: in the order of the
    questions on rank 0, empty on the others."""

    metrics: dict[str, float]
    answers: list[Answer]


class QuestionAnswering(Task):
    """`inputs`: in place of those that the settings name."""

    metrics: Mapping[str, Literal["max", "min"]] = {"f1": "max", "exact_match": "max", "eval_loss": "min"}

    def __init__(self, config: Config, world: World, inputs: Inputs | None = None) -> None:
        if not config.train.do_train and config.model.model_name_or_path is None:
            raise UserError("--no_do_train: name a trained model with --model_name_or_path, not only --config_name.")
        self.inputs = inputs or load_inputs(config, world)
        self._data, self._args, self._world = config.data, config.train, world
        self.model, self.tokenizer = self.inputs.model, self.inputs.tokenizer
        self.forward_flops = forward_flops(self.inputs.model)
        self._crossover = self.forward_flops.crossover
        self.evaluates = self.inputs.dev is not None
        if self.inputs.dev and len(self.inputs.dev.sets) > 1:
            names = [metric_of(name, data) for data in ("macro", *self.inputs.dev.sets) for name in SCORES]
            self.metrics = {**self.metrics, **dict.fromkeys(names, "max")}
        if self.inputs.train:
            train = self.inputs.train.windows
            self.plan = make_plan(train.lengths, config.train, self._crossover, world, self.inputs.train.parts)
            self._collate = Collator(train, world.device, config.data.pad_to)

    def batch(self, ids: Ids) -> Batch:
        return self._collate(ids)

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        return window_losses(model, batch)

    def evaluate(self, model: nn.Module) -> EvaluationResult:
        return self.described(self.answer(model))

    def answer(self, model: nn.Module) -> Evaluation:
        """Answer and score the validation questions. A collective."""
        metrics, answers = evaluated(self._world, lambda: self._answers(model), self._scored)
        return Evaluation(metrics, answers or [])

    @cached_property
    def _share(self) -> tuple[Ids, Ids]:
        """This rank's validation questions, and all their windows: a question is counted once for any world size."""
        assert self.inputs.dev is not None
        windows = self.inputs.dev.windows
        question, lengths = windows.column("question"), windows.lengths
        costs = np.zeros(len(self.inputs.dev.questions), dtype=np.int64)  # per question, over its windows
        np.add.at(costs, question, window_costs(lengths, self._crossover))
        questions = balanced_partition(costs, self._world.size)[self._world.rank]
        ids = np.flatnonzero(np.isin(question, questions))
        # Windows of similar length share a batch, the longest first: if memory runs out, it does so at once.
        return questions, ids[np.argsort(-lengths[ids], kind="stable")]

    def _answers(self, model: nn.Module) -> Answers:
        """This rank's questions with their answers, and the sum and number of the losses of their windows."""
        assert self.inputs.dev is not None
        questions, ids = self._share
        losses: list[float] = []
        logits = window_logits(
            model,
            self.inputs.dev.windows,
            ids,
            self._world.device,
            self._args.per_device_eval_batch_size,
            self._args.precision,
            losses,
            self._data.pad_to,
            show_progress=self._world.rank == 0 and sys.stderr.isatty(),
        )
        # `question` becomes the index in this rank's own list.
        mine = (replace(window, question=int(np.searchsorted(questions, window.question))) for window in logits)
        with evaluating(model):
            answers = answers_of([self.inputs.dev.questions[i] for i in questions], mine, span_options(self._data))
        return dict(zip(questions.tolist(), answers, strict=True)), sum(losses), len(losses)

    def _scored(self, ranks: list[Answers]) -> tuple[dict[str, float], list[Answer]]:
        """The metrics, and all ranks' answers in the order of the questions."""
        assert self.inputs.dev is not None
        found, losses, windows = zip(*ranks, strict=True)
        merged = dict(ChainMap(*found))
        answers = [merged[number] for number in range(len(merged))]
        v2 = self._data.version_2_with_negative
        # v2.0's best thresholds need all spans, also where "no answer" wins at the current threshold.
        texts = {answer.id: answer.best_span if v2 else answer.text for answer in answers}
        odds = {answer.id: answer.null_odds for answer in answers if answer.null_odds is not None} if v2 else None
        metrics: dict[str, float] = {}
        for name, part in self.inputs.dev.sets.items():
            questions = self.inputs.dev.questions[part.start : part.stop]
            scores = score(questions, texts, odds, v2, self._data.null_score_diff_threshold)
            metrics |= {metric_of(metric, name): value for metric, value in scores.items()}
        files = [name for name in self.inputs.dev.sets if name]
        for metric in SCORES if files else ():  # MRQA's: all files count the same
            metrics[metric_of(metric, "macro")] = fmean(metrics[metric_of(metric, name)] for name in files)
        return metrics | {"eval_loss": sum(losses) / sum(windows)}, answers

    def described(self, evaluation: Evaluation) -> EvaluationResult:
        """What `answer` returned, with its summary and files."""
        assert self.inputs.dev is not None
        data, answers = self._data, evaluation.answers
        samples = sample_answers(self.inputs.dev.questions, answers, data.version_2_with_negative)
        contents = files(answers) | {"eval_samples.json": samples}
        return EvaluationResult(evaluation.metrics, summary(evaluation.metrics), contents)

    def window_names(self, ids: Ids) -> list[str]:
        assert self.inputs.train is not None
        try:
            return [self._question_ids[n] for n in self.inputs.train.windows.numbers("question", ids).tolist()]
        except Exception:  # the data is gone or has changed, or never had questions (bench): no reason to fail
            return super().window_names(ids)

    @cached_property
    def _question_ids(self) -> list[str]:
        """Ids of the training questions, read once more when a message needs them."""
        assert self.inputs.train is not None
        return [question.id for question in self.inputs.train.source.questions()]

    def fingerprint(self) -> dict[str, object]:
        return self.inputs.fingerprint()

    def identity(self) -> dict[str, object]:
        assert self.inputs.train is not None
        return {
            "the tokenizer": tokenizer_digest(self.tokenizer),
            "the training data": self.inputs.train.source.digest[:12],
        }

    def compile(self, model: nn.Module) -> None:
        compile_layers(model)


def summary(metrics: dict[str, float]) -> str:
    """An evaluation in one line."""
    scores = f"EM {metrics['exact_match']:.2f}  F1 {metrics['f1']:.2f}  loss {metrics['eval_loss']:.3f}"
    others = {"best", "HasAns", "NoAns"}
    of_files = [f"{n} {metrics[n]:.2f}" for n in metrics if n.endswith("_f1") and not others & {*n.split("_")}]
    return "  ".join([f"{scores}  on {metrics['total']:.0f} questions", *of_files])


def files(answers: list[Answer]) -> dict[str, Any]:
    """run_qa's files: predictions, n best answers per question and, for v2.0, the odds of "no answer"."""
    contents: dict[str, Any] = {
        "eval_predictions.json": {answer.id: answer.text for answer in answers},
        "eval_nbest_predictions.json": {answer.id: answer.nbest for answer in answers},
    }
    odds = {answer.id: answer.null_odds for answer in answers if answer.null_odds is not None}
    return contents | ({"eval_null_odds.json": odds} if odds else {})


@dataclass(frozen=True)
class QuestionSet:
    """Questions and their windows, of all files.

    `parts`: of training data, as in `BatchPlan`. `questions`: only of those to evaluate on. `sets`: their `members`.
    """

    source: Source
    windows: WindowTable
    questions: list[Question] = field(default_factory=list)
    sets: Mapping[str, range] = field(default_factory=dict)
    parts: Parts = ()


@dataclass(frozen=True)
class Inputs:
    """`train` is None without training, `dev` without evaluation."""

    tokenizer: Any
    model: Any
    train: QuestionSet | None
    dev: QuestionSet | None

    def fingerprint(self) -> dict[str, object]:
        """Properties that must be equal on all ranks: content of the data, windows, vocabulary."""
        same: dict[str, object] = {"the tokenizer": tokenizer_digest(self.tokenizer)}
        for name, part in (("training", self.train), ("validation", self.dev)):
            if part is not None:
                size = f"{len(part.windows)} windows of {part.windows.lengths.sum()} tokens"
                same[f"the {name} data"] = f"{part.source.digest[:12]}, {size} ({part.source.name})"
        return same


def load_inputs(config: Config, world: World) -> Inputs:
    """Load and check all inputs, without collectives. The ranks of a host tokenize once. Raises UserError."""
    tokenizer = load_tokenizer(config.model)
    data, args, cache_dir = config.data, config.train, config.model.cache_dir
    shape = encoder_config(config.model, data, args, config.parallel.strategy, world, QuestionAnswering.unit)
    padded = data.pad_to is not None
    model = load_model(config.model, tokenizer, data.max_seq_length, args.seed, padded, not args.do_train, shape)
    train = _question_set(data, "train", cache_dir, tokenizer, world) if args.do_train else None
    dev = None
    if args.do_eval and data.train_file and not data.validation_file:
        log.info("No --validation_file is given: the model is not evaluated.")
    elif args.do_eval:
        dev = _question_set(data, "validation", cache_dir, tokenizer, world)
    return Inputs(tokenizer, model, train, dev)


def _question_set(data: DataArguments, split: str, cache_dir: str | None, tokenizer: Any, world: World) -> QuestionSet:
    files, sources = zip(*open_split(data, split, cache_dir), strict=True)
    limit = data.max_train_samples if split == "train" else data.max_eval_samples
    options, tables = WindowOptions(data.max_seq_length, data.doc_stride, limit), []
    for source in sources:
        table = prepare(source, tokenizer, options, show_progress=world.cross_rank == 0, leader=world.local_rank == 0)
        log.info("%s: %d windows of %d questions", source.name, table.counts.windows, table.counts.questions)
        tables.append(table)
    source, windows = squad.joined(sources, limit), WindowTable.joined(tables)
    if split == "train":
        return QuestionSet(source, windows, parts=mixture([*map(len, tables)], [file.weight for file in files]))
    questions = [source.questions()[:limit] for source in sources]
    squad.check_ids(sources, questions)
    sets = members({file.name: len(some) for file, some in zip(files, questions, strict=True)})
    return QuestionSet(source, windows, [*chain.from_iterable(questions)], sets)


def open_split(data: DataArguments, split: str, cache_dir: str | None) -> list[tuple[DataFile, Source]]:
    """The "train" or "validation" questions, from files or from the hub."""
    reading = squad.Reading(data.question_column, data.context_column, data.answer_column)
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
