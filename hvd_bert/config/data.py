"""Settings of the model and of the data: questions, windows, answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial

from hvd_bert.config.data_files import DataFile, data_files
from hvd_bert.config.flag import check_ranges, flag, properties_of, require
from hvd_bert.errors import UserError

DEFAULT_MODEL = "bert-base-uncased"
DEFAULT_DATASET = "squad"
QUESTION_ANSWERING = "question-answering"
# A new task is a line here and a file in `hvd_bert/tasks`.
TASKS = {
    QUESTION_ANSWERING: "hvd_bert.tasks.question_answering:QuestionAnswering",
    "text-classification": "hvd_bert.tasks.text_classification:TextClassification",
}
GLUE_DATASET = "nyu-mll/glue"  # its name on the hub
_PAIR = ("sentence1", "sentence2")


@dataclass(frozen=True)
class GlueTask:
    """A task of GLUE (`--task_name`), as in run_glue.

    `texts`: columns. `metrics`: GLUE's for this task. `validation`: splits -> the ending of their metrics' names.
    """

    texts: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    validation: Mapping[str, str] = field(default_factory=lambda: {"validation": ""})


GLUE = {
    "cola": GlueTask(("sentence",), ("matthews_correlation",)),
    "mnli": GlueTask(("premise", "hypothesis"), validation={"validation_matched": "", "validation_mismatched": "_mm"}),
    "mrpc": GlueTask(_PAIR, ("accuracy", "f1")),
    "qnli": GlueTask(("question", "sentence")),
    "qqp": GlueTask(("question1", "question2"), ("accuracy", "f1")),
    "rte": GlueTask(_PAIR),
    "sst2": GlueTask(("sentence",)),
    "stsb": GlueTask(_PAIR, ("pearson", "spearmanr")),
    "wnli": GlueTask(_PAIR),
}
# The endings of the metrics' names.
GLUE_ENDINGS = tuple({ending: None for task in GLUE.values() for ending in task.validation.values()})

_model = partial(flag, "model")
_data = partial(flag, "data")
_classification = partial(flag, "text-classification")
_answering = partial(flag, "question-answering")


@dataclass
class ModelArguments:
    model_name_or_path: str | None = _model(
        None,
        "Pretrained encoder, for example a BERT: a folder or a hub name.",
        default_text=f"{DEFAULT_MODEL}; with --config_name none, which trains from scratch",
        metavar="NAME",
        may_change_on_resume=True,
        replaces=("config_name", "tokenizer_name"),
    )
    config_name: str | None = _model(
        None,
        "Model configuration: a folder or a hub name.",
        default_text="the model's own",
        metavar="NAME",
        may_change_on_resume=True,
    )
    tokenizer_name: str | None = _model(
        None,
        "Tokenizer: a folder or a hub name.",
        default_text="the model's own",
        metavar="NAME",
        may_change_on_resume=True,
    )
    cache_dir: str | None = _model(
        None,
        "Cache folder for models and data from the hub.",
        default_text="the caches of Hugging Face's libraries",
        metavar="FOLDER",
        may_change_on_resume=True,
    )
    model_revision: str = _model(
        "main", "Branch, tag or commit of the model on the hub.", metavar="REVISION", may_change_on_resume=True
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
        if self.model_name_or_path is None and self.config_name is None:
            self.model_name_or_path = DEFAULT_MODEL
        check_ranges(self)
        require(
            self.lora_alpha is None or self.lora_rank > 0, "--lora_alpha needs --lora_rank: give both, or remove it."
        )

    @property
    def configuration(self) -> str:
        """Folder or hub name of the model's configuration."""
        return self.config_name or str(self.model_name_or_path)

    @property
    def tokenizer(self) -> str:
        """Folder or hub name of the tokenizer; default: the model's."""
        return self.tokenizer_name or self.model_name_or_path or str(self.config_name)


@dataclass
class DataArguments:
    task: str = _data(
        QUESTION_ANSWERING,
        f"What to train for: {', '.join(TASKS)}, or a class of your own.",
        metavar="NAME|MODULE:CLASS",
    )
    dataset_name: str | None = _data(
        None,
        "Data set on the hub, for example squad or squad_v2.",
        default_text=f"{DEFAULT_DATASET}; with --version_2_with_negative squad_v2; with a data file none",
        metavar="NAME",
        may_change_on_resume=True,
        replaces=("train_file", "validation_file", "task_name"),
    )
    dataset_config_name: str | None = _data(
        None,
        "Configuration of the data set on the hub.",
        default_text="the data set's own",
        metavar="NAME",
        may_change_on_resume=True,
    )
    train_file: str | tuple[str, ...] | None = _data(
        None,
        "Training data: JSON (for questions only), JSON Lines, CSV or Parquet, also gzipped.",
        default_text="none",
        metavar="FILE[:WEIGHT] ...",
        several=True,
        may_change_on_resume=True,
        replaces=("dataset_name", "validation_file", "task_name"),
    )
    validation_file: str | tuple[str, ...] | None = _data(
        None,
        "Data to evaluate on, in the format of --train_file. Several files are scored together and separately.",
        default_text="none",
        metavar="[NAME=]FILE ...",
        several=True,
        may_change_on_resume=True,
        replaces=("dataset_name", "task_name"),
    )
    task_name: str | None = _classification(
        None,
        "Task of GLUE, whose data are read from the hub, as in run_glue.",
        default_text="none",
        choices=tuple(GLUE),
        replaces=("dataset_name", "train_file", "validation_file"),
    )
    train_split_name: str = _classification(
        "train", "Split of --dataset_name to train on.", metavar="NAME", may_change_on_resume=True
    )
    validation_split_name: str = _classification(
        "validation", "Split of --dataset_name to evaluate on.", metavar="NAME", may_change_on_resume=True
    )
    text_column_names: str | None = _classification(
        None,
        "Column of the texts, or two columns of pairs with a comma between them.",
        default_text="sentence1,sentence2 if there are such columns, else the first one or two",
        metavar="NAME,...",
    )
    label_column_name: str = _classification("label", "Column of the labels.", metavar="NAME")
    do_regression: bool = _classification(
        False,
        "Learn the labels as numbers, not as classes.",
        default_text="True if labels are fractions, such as 3.5; otherwise False",
    )
    question_column: str = _answering("question", "Column of the questions, in data of flat rows.", metavar="NAME")
    context_column: str = _answering("context", "Column of the contexts, in data of flat rows.", metavar="NAME")
    answer_column: str = _answering("answers", "Column of the answers, in data of flat rows.", metavar="NAME")
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
        check_ranges(self)
        require(
            self.task in TASKS or ":" in self.task,
            f"--task {self.task}: unknown task. Choose from {', '.join(TASKS)}, or give MODULE:CLASS of your own task.",
        )
        padding = "max_length" if self.pad_to_max_length else self.padding
        require(
            self.padding in ("none", padding),
            f"--padding {self.padding} and --pad_to_max_length are both given: choose one.",
        )
        self.padding, self.pad_to_max_length = padding, padding == "max_length"
        files = [name for name in ("train_file", "validation_file") if self.files(name)]
        sources = [*(name for name in ("task_name", "dataset_name") if getattr(self, name)), *files[:1]]
        if len(sources) > 1:
            raise UserError(f"--{sources[0]} and --{sources[1]} are both given: choose one source of data.")
        require(
            not (self.task_name and self.text_column_names),
            f"--text_column_names: the columns of --task_name {self.task_name} are known. Remove one of the two flags.",
        )
        for f in fields(self):
            group = properties_of(f).group  # of a task, or of all tasks
            others = group in TASKS and group != self.task and getattr(self, f.name) != f.default
            require(not others, f"--{f.name} works only with --task {group}, not with {self.task}.")
        if not self.dataset_name and not files and self.task == QUESTION_ANSWERING:
            self.dataset_name = "squad_v2" if self.version_2_with_negative else DEFAULT_DATASET
        if self.dataset_name in ("squad_v2", "rajpurkar/squad_v2"):
            self.version_2_with_negative = True

    def files(self, flag: str) -> list[DataFile]:
        """The files of "train_file" or "validation_file"."""
        return data_files(flag, getattr(self, flag))

    @property
    def pad_to(self) -> int | None:
        """Minimum length of a padded window in tokens; None without padding. See `Collator`."""
        return {"none": None, "longest": 0, "max_length": self.max_seq_length}[self.padding]
