"""Train an LSTM that reads images row by row: what it takes to use this project's ranks for another model.

    python examples/mnist_rnn.py                                       one process, scikit-learn's handwritten digits
    horovodrun -np 4 -H localhost:4 python examples/mnist_rnn.py --data MNIST                MNIST's files, 4 ranks
    torchrun --nproc-per-node 2 examples/mnist_rnn.py --strategy ddp                         DDP instead of Horovod

The lines that a script for one process would not have end in "# ranks". However many ranks there are, a step takes the
same images, so that all of them together learn what one process learns.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from image_data import Images, load_images
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR

from hvd_bert.config.settings import STRATEGIES
from hvd_bert.distributed.runner import run_as_rank
from hvd_bert.distributed.world import World, log
from hvd_bert.errors import UserError
from hvd_bert.monitoring.process_usage import process_usage
from hvd_bert.strategies.base import StrategyOptions
from hvd_bert.strategies.table import make_strategy


def parse_args() -> argparse.Namespace:
    """The command line; argparse itself says what is wrong with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", type=Path, metavar="FOLDER", help="MNIST's four IDX files, gzipped or not")
    source.add_argument("--dataset_name", help="a data set of the Hugging Face hub with image and label, e.g. mnist")
    parser.add_argument("--strategy", choices=STRATEGIES, default=STRATEGIES[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--global_batch", type=int, default=64, help="images of a step, over all ranks")
    parser.add_argument("--learning_rate", type=float, default=1e-2, help="at first; it falls to 0 by a line")
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came out")
    return parser.parse_args()


class RowReader(nn.Module):
    """An LSTM over the rows of an image, and a linear layer on its last state."""

    def __init__(self, columns: int, hidden_size: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(columns, hidden_size, batch_first=True)
        self.classifier = nn.Linear(hidden_size, classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """[images, rows, columns] -> logits [images, classes]."""
        _, (last, _) = self.lstm(pixels)
        logits: Tensor = self.classifier(last[-1])
        return logits


def main(args: argparse.Namespace, world: World) -> None:
    """What every rank does."""
    with world.raise_on_all_ranks():  # ranks: what is wrong with the data is said once, and ends all of them
        if min(args.epochs, args.global_batch, args.hidden_size) < 1:
            raise UserError("--epochs, --global_batch and --hidden_size are 1 or more.")
        if args.json and args.json.exists():
            raise UserError(f"--json {args.json}: it exists. Delete it, or name another file.")
        train_images, test_images = load_images(args.data, args.dataset_name)
        if min(args.global_batch, len(train_images)) < 2 * world.size:  # so that no rank's share of a step is empty
            raise UserError(
                f"{world.size} ranks need a --global_batch of {2 * world.size} or more, and as many images."
            )
    world.check_same({"the data": train_images.digest() + test_images.digest()})  # ranks
    log.info("%s", "\n".join(world.describe()))
    log.info("%d images to train on, %d to test on", len(train_images), len(test_images))
    torch.manual_seed(args.seed)  # for the weights; nothing else here draws random numbers
    model = RowReader(train_images.pixels.shape[2], args.hidden_size, train_images.classes).to(world.device)
    trained, results = train(model, train_images, args, world)
    correct = count_correct(trained, test_images, world)
    results |= {
        "accuracy": correct / len(test_images),
        "correct": correct,
        "test_images": len(test_images),
        "strategy": args.strategy,
        "world_size": world.size,
        "devices": [info.device for info in world.rank_infos],
        "processes": world.gather(process_usage(world.device)),  # ranks
    }
    if world.rank == 0:  # ranks
        report(results, args.json)


def train(model: nn.Module, images: Images, args: argparse.Namespace, world: World) -> tuple[nn.Module, dict[str, Any]]:
    """Returns the trained model, and the loss of every step and epoch, the same on every rank."""
    make_optimizer = partial(adamw, learning_rate=args.learning_rate)
    strategy = make_strategy(args.strategy, model, make_optimizer, StrategyOptions(max_grad_norm=1.0), world)  # ranks
    steps_per_epoch = math.ceil(len(images) / args.global_batch)
    schedule = LinearLR(strategy.optimizer, 1.0, 0.0, steps_per_epoch * args.epochs)
    step_losses: list[float] = []
    epoch_losses = []
    start = time.perf_counter()
    for epoch in range(args.epochs):
        order = np.random.default_rng([args.seed, epoch]).permutation(len(images))
        steps = np.array_split(order, steps_per_epoch)
        losses = []
        for step in steps:
            pixels, labels = images.take(step[world.rank :: world.size], world.device)  # ranks: its share of the step
            # The mean over the step's images, once the strategy has taken the mean over the ranks.
            loss = cross_entropy(strategy.module(pixels), labels, reduction="sum") * (world.size / len(step))  # ranks
            strategy.backward(loss)  # ranks
            strategy.synchronize()  # ranks
            strategy.clip()
            strategy.step()
            schedule.step()
            losses.append(loss.detach())
        means = (world.sum(torch.stack(losses)) / world.size).tolist()  # ranks
        step_losses += means
        epoch_losses.append(float(np.average(means, weights=[len(step) for step in steps])))
        log.info("epoch %d/%d: loss %.6f", epoch + 1, args.epochs, epoch_losses[-1])
    seconds = time.perf_counter() - start
    return strategy.whole_model(), {"epoch_losses": epoch_losses, "step_losses": step_losses, "train_s": seconds}


def adamw(module: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=learning_rate)


def count_correct(model: nn.Module, images: Images, world: World) -> int:
    """How many images the model takes for what they are, each looked at by one rank."""
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=world.device)
    mine = np.arange(world.rank, len(images), world.size)  # ranks
    with torch.no_grad():
        for first in range(0, len(mine), 1000):
            pixels, labels = images.take(mine[first : first + 1000], world.device)
            correct += (model(pixels).argmax(dim=1) == labels).sum()
    return int(world.sum(correct))  # ranks


def report(results: dict[str, Any], path: Path | None) -> None:
    """Print what came out; write `path`. Raises UserError where it cannot be written."""
    log.info("accuracy %.4f (%d of %d)", results["accuracy"], results["correct"], results["test_images"])
    log.info("training took %.2f s; the whole processes, in seconds:", results["train_s"])
    for rank, used in enumerate(results["processes"]):
        log.info("rank %d: real %.2f  user %.2f  system %.2f", rank, used["real_s"], used["user_s"], used["system_s"])
    if path:
        try:
            path.write_text(json.dumps(results) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--json {path}: cannot be written: {error}.") from None


if __name__ == "__main__":
    arguments = parse_args()
    run_as_rank(partial(main, arguments), arguments.strategy)  # ranks
