"""The data of text classification: files, a data set on the hub, or a task of GLUE."""

from __future__ import annotations

from dataclasses import replace

from hvd_bert.config.settings import Config
from hvd_bert.config.tasks import GLUE, GLUE_DATASET
from hvd_bert.data.sources import hub, texts
from hvd_bert.data.sources.questions import Reading
from hvd_bert.data.sources.texts import Columns, Texts
from hvd_bert.distributed.world import log
from hvd_bert.errors import UserError

_WAYS_OUT = (
    "Give local files with --train_file and --validation_file, or name another split with --train_split_name or"
    " --validation_split_name."
)


def open_texts(config: Config) -> tuple[Texts | None, dict[str, Texts]]:
    """The training texts, and validation sets by the ending of their metrics' names. Raises UserError."""
    data, args = config.data, config.train
    glue = GLUE.get(data.task_name or "")
    named = tuple(data.text_column_names.split(",")) if data.text_column_names else ()
    columns = Columns(
        glue.texts if glue else named, data.label_column_name, data.text_column_delimiter, data.do_regression
    )
    train = _open(config, data.train_split_name, "train_file", columns) if args.do_train else None
    if train:
        columns = replace(columns, texts=train.columns.texts, numbers=train.is_regression)
    elif args.do_train:
        raise UserError(
            "--task text-classification needs --task_name, --dataset_name or --train_file to train on. Give one."
        )
    validation = glue.validation if glue else {data.validation_split_name: ""}
    dev = {
        ending: _open(config, split, "validation_file", columns) if args.do_eval else None
        for split, ending in validation.items()
    }
    if args.do_train and args.do_eval and not any(dev.values()):
        log.info("No --validation_file is given: the model is not evaluated.")
    return train, {ending: source for ending, source in dev.items() if source}


def _open(config: Config, split: str, file_flag: str, columns: Columns) -> Texts | None:
    """A split of the hub's data set, or the file of a flag; None if the flag is not given."""
    data, cache_dir, reading = config.data, config.model.cache_dir, Reading(bad_examples=config.data.bad_examples)
    dataset, config_name = (
        (GLUE_DATASET, data.task_name) if data.task_name else (data.dataset_name, data.dataset_config_name)
    )
    if dataset:
        flag = f"--task_name {data.task_name}" if data.task_name else ""
        rows = hub.load(dataset, split, config_name, cache_dir, _WAYS_OUT, flag)
        return texts.open_hub(rows, f"{'/'.join(filter(None, (dataset, config_name)))}[{split}]", columns, reading)
    path = data.train_file if file_flag == "train_file" else data.validation_file
    return texts.open_file(path, f"--{file_flag}", columns, reading) if path else None


def joined(sources: list[Texts]) -> Texts:
    """The texts of all sources, as one."""
    first, *others = sources
    for other in others:
        second = None if first.second is None or other.second is None else first.second + other.second
        first = replace(
            first,
            name=f"{first.name} and {other.name}",
            digest=first.digest + other.digest,
            first=first.first + other.first,
            second=second,
            labels=first.labels + other.labels,
            places=first.places + other.places,
            bad=first.bad + other.bad,
        )
    return first
