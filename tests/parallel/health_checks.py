"""A loss that is NaN on one rank is found by all at the same step; a flipped bit of a weight is found, and where."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from ranks import Ranks, check_every_strategy
from resuming import rows
from torch import Tensor, nn
from training_checks import GLOBAL_BATCH, sample

from hvd_bert.data.collate import Batch
from hvd_bert.distributed.world import CollectiveError, World
from hvd_bert.tasks.question_answering import QuestionAnswering
from hvd_bert.train.__main__ import main as train
from hvd_bert.training import checksums
from hvd_bert.training.health import LIMIT

STEPS = 8


@contextmanager
def losses_of_nan(world: World, passes: set[int]) -> Iterator[None]:
    """Inside, the last rank's loss is NaN in these passes (1, 2, ...)."""
    losses, made = QuestionAnswering.losses, 0

    def sometimes(self: QuestionAnswering, model: nn.Module, batch: Batch) -> Tensor:
        nonlocal made
        made += 1
        bad = made in passes and world.rank == world.size - 1
        return losses(self, model, batch) * (math.nan if bad else 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuestionAnswering, "losses", sometimes)
        yield


def run(ranks: Ranks, out: Path, *flags: str | float) -> str:
    """The command's own main, of steps with windows on every rank; the message that it ended with, if it failed."""
    batch = ["--per_device_train_batch_size", GLOBAL_BATCH // ranks.world.size, "--max_train_samples", GLOBAL_BATCH]
    words = sample(*batch, "--max_steps", STEPS, "--logging_steps", 4, "--no_do_eval", *flags, "--output_dir", out)
    before, sys.argv = sys.argv, ["hvd_bert.train", *words]
    try:
        train(ranks.world)
    except CollectiveError as error:
        return str(error)
    finally:
        sys.argv = before
    return ""


@check_every_strategy
def step_with_a_nan_is_skipped_by_all_ranks(ranks: Ranks) -> None:
    out, last = ranks.folder / "skipped", ranks.world.size - 1
    with losses_of_nan(ranks.world, {2, 4}):
        assert run(ranks, out) == ""
    if ranks.world.rank == 0:
        events = [json.loads(line) for line in (out / "events.jsonl").read_text(encoding="utf-8").splitlines()]
        skipped = [event for event in events if event["event"] == "skipped_step"]
        assert [event["step"] for event in skipped] == [2, 4]
        for event in skipped:
            ((rank, windows),) = [(part["rank"], part["windows"]) for part in event["batch"]]
            assert rank == last and len(windows) == GLOBAL_BATCH // ranks.world.size
            assert all(len(name) > 10 for name in windows), "not the ids of questions"
        assert [math.isfinite(row["loss"]) for row in rows(out)] == [True] * 3
        results = json.loads((out / "train_results.json").read_text(encoding="utf-8"))
        assert results["skipped_steps"] == 2 and math.isfinite(results["train_loss"])


@check_every_strategy
def training_ends_on_all_ranks_after_steps_of_nan(ranks: Ranks) -> None:
    out = ranks.folder / "diverged"
    with losses_of_nan(ranks.world, {*range(3, STEPS + 1)}):
        message = run(ranks, out, "--save_steps", 2)
    last = ranks.world.size - 1
    assert f"The loss of rank {last} is nan at step {2 + LIMIT}: training has diverged." in message
    assert len(set(ranks.world.allgather(message.partition(" were skipped")[0]))) == 1
    if ranks.world.rank == 0:
        (newest,) = [path for path in out.glob("checkpoint-*") if path.name == (out / "latest").read_text().strip()]
        assert newest.name == "checkpoint-4", "a checkpoint of a skipped step has the weights before it"


@check_every_strategy
def flipped_bit_is_found_with_its_rank_and_weight(ranks: Ranks) -> None:
    if ranks.strategy not in ("horovod", "ddp") or ranks.world.size == 1:
        return
    last, name = ranks.world.size - 1, "bert.encoder.layer.1.output.dense.weight"
    check_copies = checksums.check_copies

    def after_a_flip(model: nn.Module, world: World, step: int) -> None:
        if step == 4 and world.rank == last:
            model.get_parameter(name).data.view(torch.int32)[3, 5] ^= 1
        check_copies(model, world, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hvd_bert.training.health.check_copies", after_a_flip)
        message = run(ranks, ranks.folder / "flipped", "--check_weights_steps", 2)
    assert (
        f"The weights of rank {last} on " in message
        and f" differ from those of the other ranks after step 4, in {name}." in message
    )
