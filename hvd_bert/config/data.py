"""Settings of the model, the data and question answering."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from hvd_bert.config.data_files import DataFile, data_files, data_path
from hvd_bert.config.flag import flag, flag_properties, require
from hvd_bert.config.parser import name_or_path, plain_text, shortened
from hvd_bert.errors import UserError
from hvd_bert.hub import DEFAULT_MODEL

DEFAULT_DATASET = "squad"
QUESTION_ANSWERING = "question-answering"
SQUAD_RULES = "squad"  # default of --answer_language
BY_CHARACTER = ("zh", "ja", "th")  # values of it whose words are characters, not split at spaces
# Flags that also apply when a trained model answers questions. Their defaults are then the values of its training.
ANSWERING = (
    "version_2_with_negative",
    "max_seq_length",
    "doc_stride",
    "n_best_size",
    "max_answer_length",
    "null_score_diff_threshold",
)


def other_rules(answer_language: str) -> str:
    """Return the rules of EM and F1 for records of scores, which do not name SQuAD's; "" for these."""
    return "" if answer_language == SQUAD_RULES else answer_language


def _known_task(text: str) -> str:
    if text != QUESTION_ANSWERING and ":" not in text:
        problem = f"is not a task: use {QUESTION_ANSWERING}, or MODULE:CLASS of a custom task"
        raise argparse.ArgumentTypeError(f"{shortened(repr(text))} {problem}")
    return plain_text(text)


_model = partial(flag, "model")
_data = partial(flag, "data")
_answering = partial(flag, "question-answering")
# These flags may change on resume, for example if a file was moved: checkpoints record the model's shape and the data's
# hash instead.
_model_source = partial(_model, metavar="NAME", parse=name_or_path, may_change_on_resume=True)
_data_source = partial(_data, metavar="NAME", may_change_on_resume=True)


@dataclass(frozen=True)
class ModelArguments:
    model_name_or_path: str | None = _model_source(
        None,
        "Pretrained encoder, for example BERT: a folder or a hub name.",
        default_text=f"{DEFAULT_MODEL}; with --config_name none, which trains from scratch",
        replaces=("config_name", "tokenizer_name"),
    )
    config_name: str | None = _model_source(
        None, "Model configuration: a folder or a hub name.", default_text="the model's own"
    )
    tokenizer_name: str | None = _model_source(
        None, "Tokenizer: a folder or a hub name.", default_text="the model's own"
    )
    cache_dir: str | None = _model_source(
        None,
        "Cache folder for models and data from the hub.",
        default_text="the caches of Hugging Face's libraries",
        metavar="FOLDER",
    )
    model_revision: str = _model_source(
        "main", "Branch, tag or commit of the model on the hub.", metavar="REVISION", parse=plain_text
    )
    dropout: float | None = _model(
        None, "Dropout probability of hidden states and attention.", default_text="the model's own", minimum=0, below=1
    )
    attention_dropout: float | None = _model(
        None,
        "Dropout probability of attention alone.",
        default_text="the value of --dropout, else the model's own",
        minimum=0,
        below=1,
    )
    lora_rank: int = _model(
        0,
        "Train low-rank adapters (LoRA, by the package peft) of this rank in place of the encoder; 0: none.",
        minimum=0,
    )
    lora_alpha: float | None = _model(
        None,
        "The adapters' products are multiplied by this value / --lora_rank.",
        default_text="twice --lora_rank",
        above=0,
    )

    def __post_init__(self) -> None:
        require(
            self.lora_alpha is None or self.lora_rank > 0, "--lora_alpha needs --lora_rank: give both, or remove it."
        )

    @property
    def configuration(self) -> str:
        """The folder or hub name of the model's configuration."""
        return self.config_name or str(self.model_name_or_path)

    @property
    def tokenizer(self) -> str:
        """The folder or hub name of the tokenizer, by default that of the model."""
        return self.tokenizer_name or self.model_name_or_path or str(self.config_name)

    @property
    def on_hub(self) -> dict[str, Any]:
        """The arguments of `from_pretrained` that apply to models on the hub: cache folder and revision."""
        return {"cache_dir": self.cache_dir, "revision": self.model_revision}


@dataclass(frozen=True)
class DataArguments:
    task: str = _data(
        QUESTION_ANSWERING,
        "Task to train: question-answering, or the class of a custom task.",
        metavar="NAME|MODULE:CLASS",
        parse=_known_task,
    )
    dataset_name: str | None = _data_source(
        None,
        "Data set on the hub, for example squad or squad_v2.",
        default_text=f"{DEFAULT_DATASET}; with --version_2_with_negative squad_v2; with a data file none",
        parse=name_or_path,
        replaces=("train_file", "validation_file"),
    )
    dataset_config_name: str | None = _data_source(
        None, "Configuration of the data set on the hub.", default_text="the data set's own"
    )
    train_file: str | tuple[str, ...] | None = _data_source(
        None,
        "Training data: JSON, JSON Lines, CSV or Parquet, also gzipped.",
        default_text="none",
        metavar="FILE[:WEIGHT] ...",
        parse=data_path,
        several=True,
        replaces=("dataset_name", "validation_file"),
    )
    validation_file: str | tuple[str, ...] | None = _data_source(
        None,
        "Data to evaluate on, in the format of --train_file. Several files are scored together and separately.",
        default_text="none",
        metavar="[NAME=]FILE ...",
        parse=data_path,
        several=True,
        replaces=("dataset_name",),
    )
    question_column: str = _answering("question", "Column of the questions, in data of flat rows.", metavar="NAME")
    context_column: str = _answering("context", "Column of the contexts, in data of flat rows.", metavar="NAME")
    answer_column: str = _answering("answers", "Column of the answers, in data of flat rows.", metavar="NAME")
    bad_examples: str = _answering(
        "error",
        "Questions with a mistake: refuse the data, skip them, or move misplaced answers that occur exactly once and"
        " skip the rest (repair).",
        choices=("error", "skip", "repair"),
    )
    version_2_with_negative: bool = _answering(
        False,
        "Some questions have no answer, as in SQuAD 2.0.",
        default_text="False; with --dataset_name squad_v2 True",
    )
    max_seq_length: int = _data(
        384, "Maximum window length in tokens, question and special tokens included.", minimum=1
    )
    padding: str = _data(
        "none",
        "Pack windows without padding (none), or pad them to the longest of the batch or to --max_seq_length.",
        choices=("none", "longest", "max_length"),
        replaces=("pad_to_max_length",),
    )
    pad_to_max_length: bool = _data(False, "run_qa's name for --padding max_length.", replaces=("padding",))
    doc_stride: int = _answering(128, "Overlap of neighboring windows of a long passage, in tokens.", minimum=0)
    n_best_size: int = _answering(
        20, "Number of candidate answers to keep per question.", may_change_on_resume=True, minimum=1
    )
    max_answer_length: int = _answering(30, "Maximum answer length in tokens.", may_change_on_resume=True, minimum=1)
    null_score_diff_threshold: float = _answering(
        0.0,
        "SQuAD 2.0: predict 'no answer' if its score exceeds the best answer's by more than this.",
        may_change_on_resume=True,
    )
    answer_language: str = _answering(
        SQUAD_RULES,
        "Rules of EM and F1: SQuAD's, MLQA's for a language, by character (ja, th), or for any other with spaces.",
        choices=(SQUAD_RULES, "en", "ar", "de", "es", "hi", "vi", *BY_CHARACTER, "other"),
    )
    max_train_samples: int | None = _data(
        None, "Train on the first N questions or examples only.", default_text="all", minimum=1
    )
    max_eval_samples: int | None = _data(
        None,
        "Evaluate on the first N questions or examples only.",
        default_text="all",
        may_change_on_resume=True,
        minimum=1,
    )

    def __post_init__(self) -> None:
        files = [name for name in ("train_file", "validation_file") if self.files(name)]
        if self.dataset_name and files:
            raise UserError(f"--dataset_name and --{files[0]} are both given: choose one source of data.")
        for f in fields(self) if self.task != QUESTION_ANSWERING else ():
            works = flag_properties(f).group != QUESTION_ANSWERING or getattr(self, f.name) == f.default
            require(works, f"--{f.name} works only with --task {QUESTION_ANSWERING}, not with {self.task}.")

    def files(self, flag: str) -> list[DataFile]:
        """Parse the files of `flag`, "train_file" or "validation_file"."""
        return data_files(flag, getattr(self, flag))

    @property
    def pad_to(self) -> int | None:
        """Minimum length in tokens to which `Collator` pads windows; 0: the longest of the batch; None: no padding."""
        return {"none": None, "longest": 0, "max_length": self.max_seq_length}[self.padding]
