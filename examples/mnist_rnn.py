"""Train an LSTM that reads images row by row: a custom task that needs no code for the loop, checkpoints or launchers.

    export PYTHONPATH=examples
    python -m hvd_bert.train --config examples/mnist_rnn.yaml --strategy none           scikit-learn's digits
    horovodrun -np 4 -H localhost:4 python -m hvd_bert.train --config examples/mnist_rnn.yaml
    torchrun --nproc-per-node 2 -m hvd_bert.train --config examples/mnist_rnn.yaml --strategy ddp

For MNIST itself, add --dataset_name mnist. All other flags, output files, sweeps and reports are the trainer's. A step
takes the same images on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from image_data import load_images
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hvd_bert.config.settings import Config
from hvd_bert.tasks.dataset import DatasetTask, Examples

HIDDEN_SIZE = 64


class RowReader(nn.Module):
    """An LSTM over the rows of an image, followed by a linear layer on its last state."""

    def __init__(self, columns: int, hidden_size: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(columns, hidden_size, batch_first=True)
        self.classifier = nn.Linear(hidden_size, classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """Compute the logits [images, classes] of pixels [images, rows, columns]."""
        _, (last, _) = self.lstm(pixels)
        logits: Tensor = self.classifier(last[-1])
        return logits


class MnistRnn(DatasetTask):
    """A task that classifies images of digits."""

    unit: ClassVar[str] = "images"
    metrics: Mapping[str, Literal["max", "min"]] = {"accuracy": "max", "eval_loss": "min"}

    def load(self, config: Config) -> None:
        train, test = load_images(config.data.dataset_name)
        self.labels = test.labels
        self.model = RowReader(train.pixels.shape[2], HIDDEN_SIZE, train.classes)
        self.train = Examples.of_tensors(train.pixels, train.labels)
        self.dev = Examples.of_tensors(test.pixels, test.labels)

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        pixels, labels = batch
        logits = model(pixels)
        return cross_entropy(logits, labels, reduction="none"), logits.argmax(dim=1)

    def score(self, outputs: Tensor) -> dict[str, float]:
        return {"accuracy": float((outputs == self.labels).double().mean())}
