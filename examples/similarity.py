"""Learn numbers, such as the similarity of two texts: a variation of text_classification.py, with the squared error.

    PYTHONPATH=examples python -m hvd_bert.train --task similarity:Similarity --strategy none \
        --dataset_name glue --dataset_config_name stsb --output_dir runs/similarity
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import datasets
from scipy.stats import pearsonr, spearmanr
from text_classification import TextClassification
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from hvd_bert.tasks.encoder import Labelled
from hvd_bert.tasks.rows import column


class Similarity(TextClassification):
    """A task that predicts the number in the column `label`."""

    metrics: Mapping[str, Literal["max", "min"]] = {
        "pearson": "max",
        "spearmanr": "max",
        "mse": "min",
        "eval_loss": "min",
    }

    def class_names(self, rows: datasets.Dataset | None, trains: bool) -> list[str]:
        return ["LABEL_0"]  # one output: the number

    def targets(self, rows: datasets.Dataset) -> list[Any]:
        return [float(label) for label in column(rows, self.label_column)]

    def forward(self, model: nn.Module, batch: Labelled) -> tuple[Tensor, Tensor]:
        texts, labels = batch
        numbers = self.logits(model, texts)[:, 0]
        return mse_loss(numbers, labels.float(), reduction="none"), numbers

    def score(self, outputs: Tensor) -> dict[str, float]:
        numbers = outputs.numpy()
        correlations = pearsonr(numbers, self.labels), spearmanr(numbers, self.labels)
        pearson, spearman = (float(found.statistic) for found in correlations)
        return {"pearson": pearson, "spearmanr": spearman, "mse": float(((numbers - self.labels) ** 2).mean())}

    def predictions(self, outputs: Tensor) -> Any:
        return outputs.tolist()
