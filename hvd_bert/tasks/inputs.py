"""The inputs of question answering: tokenizer, windows, batch plan, model.

They are checked here, so that bad input ends the run before any training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvd_bert.config.settings import Config, DataArguments, TrainArguments
from hvd_bert.data.batch_plan import BatchPlan, Lengths
from hvd_bert.data.sources import squad
from hvd_bert.data.sources.checks import summary
from hvd_bert.data.sources.questions import BadExample
from hvd_bert.data.sources.squad import Question, Source
from hvd_bert.data.window_table import WindowOptions, WindowTable, prepare
from hvd_bert.distributed.world import World, log
from hvd_bert.errors import UserError
from hvd_bert.model.bert import load_model, load_tokenizer
from hvd_bert.model.families import check_flags, family_of, pad_if_needed
from hvd_bert.model.flops import forward_flops
from hvd_bert.model.loading import load_config

if TYPE_CHECKING:
    from transformers import BertForQuestionAnswering


@dataclass(frozen=True)
class TrainingSet:
    """The training windows, and the plan that assigns them to steps and ranks."""

    source: Source
    windows: WindowTable
    plan: BatchPlan


@dataclass(frozen=True)
class QuestionSet:
    """Questions to evaluate on, and their windows."""

    source: Source
    questions: list[Question]
    windows: WindowTable


@dataclass(frozen=True)
class Inputs:
    """`train` is None without training, `dev` without evaluation."""

    tokenizer: Any
    model: BertForQuestionAnswering
    train: TrainingSet | None
    dev: QuestionSet | None

    @property
    def tokenizer_digest(self) -> str:
        """Hash of the tokenizer's vocabulary and rules."""
        return digest_of(self.tokenizer)

    def bad_examples(self) -> dict[str, list[BadExample]]:
        """Examples with mistakes in the training and the validation data, with `--bad_examples skip`.

        Call it on one rank: it reads the training data once more if their windows were cached.
        """
        parts = {"training": self.train, "validation": self.dev}
        return {name: part.source.bad_examples() for name, part in parts.items() if part is not None}

    def fingerprint(self) -> dict[str, object]:
        """Properties that must be equal on all ranks: content of the data, windows, vocabulary."""
        same: dict[str, object] = {"the tokenizer": self.tokenizer_digest}
        for name, part in (("training", self.train), ("validation", self.dev)):
            if part is not None:
                size = f"{len(part.windows)} windows of {part.windows.lengths.sum()} tokens"
                same[f"the {name} data"] = f"{part.source.digest[:12]}, {size} ({part.source.name})"
        return same


def digest_of(tokenizer: Any) -> str:
    """Hash of a tokenizer's vocabulary and rules."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:12]


def load_inputs(config: Config, world: World) -> Inputs:
    """Load and check all inputs, without collectives. The ranks of a host tokenize once. Raises UserError."""
    tokenizer = load_tokenizer(config.model)
    shape = load_config(config.model.configuration, config.model, weight_copies(config, world))
    check_flags(config, shape)
    pad_if_needed(config.data, shape, family_of(shape).packed)
    padded = config.data.pad_to is not None
    length, seed, trains = config.data.max_seq_length, config.train.seed, config.train.do_train
    model = load_model(config.model, tokenizer, length, seed, padded, not trains, shape)
    crossover = forward_flops(model).crossover
    train = _training_set(config, tokenizer, crossover, world) if config.train.do_train else None
    dev = _question_set(config, tokenizer, world) if config.train.do_eval else None
    inputs = Inputs(tokenizer, model, train, dev)
    if config.data.bad_examples == "skip" and world.rank == 0:
        warn_of_mistakes(inputs.bad_examples(), world, "questions")
    return inputs


def warn_of_mistakes(bad: Mapping[str, list[BadExample]], world: World, unit: str) -> None:
    """Log the counts of the mistakes that are skipped in the training and the validation data, on rank 0."""
    for name, examples in bad.items():
        if examples and world.rank == 0:
            log.warning("The %s data have %s.", name, summary(examples, unit))


def weight_copies(config: Config, world: World) -> int:
    """How many arrays of the weights' size a rank needs in this host's free memory, at least."""
    if world.generation > 0:
        return 0  # this process still has the memory of its previous world
    whole = config.parallel.strategy not in ("fsdp", "deepspeed")  # these keep a part per rank
    trains_here = config.train.do_train and world.device.type == "cpu"
    return 4 if whole and trains_here else 1  # weights, gradients and AdamW's two moments


def _training_set(config: Config, tokenizer: Any, crossover: int, world: World) -> TrainingSet:
    source = open_split(config.data, "train", config.model.cache_dir)
    table = _windows(source, tokenizer, config.data, config.data.max_train_samples, world)
    return TrainingSet(source, table, make_plan(table.lengths, config.train, crossover, world))


def make_plan(lengths: Lengths, args: TrainArguments, crossover: int, world: World) -> BatchPlan:
    """The batch plan of the settings. Raises UserError if the global batch does not fit the ranks.

    A fixed global batch need not divide evenly: ranks may differ by one window, as in the last step of an epoch.
    """
    if args.gradient_accumulation_steps > len(lengths):
        raise UserError(
            f"--gradient_accumulation_steps {args.gradient_accumulation_steps}: a step would have more micro-batches"
            f" than the {len(lengths)} windows of the training data. Use a smaller number or more data."
        )
    rank_batch, passes = args.per_device_train_batch_size * world.devices, args.gradient_accumulation_steps
    plan = BatchPlan.of_rank_batch(lengths, rank_batch, passes, world.size, args.seed, crossover)
    if args.global_batch == -1:
        return plan
    devices = world.size * world.devices
    if args.global_batch < devices:
        raise UserError(
            f"--global_batch {args.global_batch}: fewer windows than the {devices} devices. Use fewer ranks."
        )
    plan = plan.with_global_batch(args.global_batch)
    if passes not in (1, plan.accumulation):
        raise UserError(
            f"--gradient_accumulation_steps {passes}: --global_batch {args.global_batch} takes {plan.accumulation}"
            f" pass(es) of at most {rank_batch} windows on each of {world.size} rank(s). Omit the flag, or change"
            " --per_device_train_batch_size."
        )
    return plan


def _question_set(config: Config, tokenizer: Any, world: World) -> QuestionSet | None:
    data = config.data
    if data.train_file and not data.validation_file:
        log.info("No --validation_file is given: the model is not evaluated.")
        return None
    source = open_split(data, "validation", config.model.cache_dir)
    table = _windows(source, tokenizer, data, data.max_eval_samples, world)
    return QuestionSet(source, source.questions()[: data.max_eval_samples], table)


def open_split(data: DataArguments, split: str, cache_dir: str | None) -> Source:
    """The "train" or "validation" questions, from a file or from the hub."""
    reading = squad.Reading(
        question_column=data.question_column,
        context_column=data.context_column,
        answer_column=data.answer_column,
        bad_examples=data.bad_examples,
        purpose="training" if split == "train" else "evaluation",
    )
    if data.dataset_name:
        return squad.open_hub(
            data.dataset_name, split, data.version_2_with_negative, data.dataset_config_name, cache_dir, reading
        )
    path = data.train_file if split == "train" else data.validation_file
    if path is None:
        raise UserError(
            f"--{split}_file is missing: give a file of questions, or omit all files to use squad from the hub."
        )
    return squad.open_file(path, data.version_2_with_negative, reading)


def _windows(source: Source, tokenizer: Any, data: DataArguments, max_samples: int | None, world: World) -> WindowTable:
    options = WindowOptions(data.max_seq_length, data.doc_stride, max_samples)
    table = prepare(
        source,
        tokenizer,
        options,
        overwrite_cache=data.overwrite_cache,
        num_workers=data.preprocessing_num_workers,
        show_progress=world.cross_rank == 0,
        leader=world.local_rank == 0,
    )
    log.info("%s: %d windows of %d questions", source.name, table.counts.windows, table.counts.questions)
    return table
