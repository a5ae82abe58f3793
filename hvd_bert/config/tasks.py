"""The tasks by name, with their classes. A new task is a line here and a file in `hvd_bert/tasks`."""

from __future__ import annotations

QUESTION_ANSWERING = "question-answering"
TASKS = {
    QUESTION_ANSWERING: "hvd_bert.tasks.question_answering:QuestionAnswering",
    "text-classification": "hvd_bert.tasks.text_classification:TextClassification",
}
