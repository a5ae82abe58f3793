"""The tasks by name, with their classes, and GLUE's data. A new task is a line here and a file in `hvd_bert/tasks`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

QUESTION_ANSWERING = "question-answering"
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
