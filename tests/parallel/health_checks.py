"""If one rank's loss is NaN, all ranks detect it in the same step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from ranks import Ranks, call, check_every_strategy, expensive
from resuming import rows
from torch import Tensor, nn
from training_checks import GLOBAL_BATCH, Training, sample

from hvd_bert.checkpoint import files
from hvd_bert.data.collate import Batch
from hvd_bert.distributed.world import CollectiveError, World
from hvd_bert.errors import EXIT_FAILURE
from hvd_bert.tasks.question_answering import QuestionAnswering
from hvd_bert.training.api import main as train
from hvd_bert.training.health import LIMIT

STEPS, ALONE, FIRST = 9, 2, 4  # number of steps; a single step with NaN; the first of several consecutive ones


@contextmanager
def losses_of_nan(world: World) -> Iterator[None]:
    """Context manager: make the loss of rank size - 1 NaN in the steps ALONE, FIRST, FIRST + 1, ..."""
    losses, made = QuestionAnswering.losses, 0

    def sometimes(self: QuestionAnswering, model: nn.Module, batch: Batch) -> Tensor:
        nonlocal made
        made += 1
        bad = (made == ALONE or made >= FIRST) and world.rank == world.size - 1
        return losses(self, model, batch) * (math.nan if bad else 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuestionAnswering, "losses", sometimes)
        yield


@expensive
@check_every_strategy
def steps_of_nan_are_skipped_and_then_end_the_training_on_all_ranks(ranks: Ranks) -> None:
    world, out = ranks.world, ranks.folder / "unhealthy"
    last = world.size - 1
    batch = ["--per_device_train_batch_size", GLOBAL_BATCH // world.size, "--max_train_samples", GLOBAL_BATCH]
    flags = ["--max_steps", STEPS, "--logging_steps", 1, "--save_steps", 5, "--no_do_eval", "--report_to", "none"]
    with losses_of_nan(world), pytest.raises(CollectiveError) as ended:
        call(train, world, sample(*batch, *flags, "--output_dir", out))
    message = str(ended.value)
    assert f"The loss of rank {last} is nan at step {FIRST + LIMIT - 1}: training has diverged." in message
    assert len(set(world.allgather(message.partition(" were skipped")[0]))) == 1
    if world.rank == 0:
        events = [json.loads(line) for line in (out / "events.jsonl").read_text(encoding="utf-8").splitlines()]
        skipped = [event for event in events if event["event"] == "skipped_step"]
        assert [event["step"] for event in skipped] == [ALONE, *range(FIRST, FIRST + LIMIT)]
        for event in skipped:
            ((rank, windows),) = [(part["rank"], part["windows"]) for part in event["batch"]]
            assert rank == last and len(windows) == GLOBAL_BATCH // world.size
            assert all(len(name) > 10 for name in windows), "too short for ids of questions"
        losses = [row["loss"] for row in rows(out)]
        assert [loss is None for loss in losses] == [
            step in (ALONE, *range(FIRST, STEPS)) for step in range(1, len(losses) + 1)
        ]
        # The checkpoint of a skipped step has the weights after the last step that was applied.
        newest = files.read(out / (out / "latest").read_text(encoding="utf-8").strip())
        assert newest.state["step"] == 5
        assert all(torch.isfinite(weight).all() for weight in newest.tensors["model"].values())


@expensive
@check_every_strategy
def training_that_skips_all_steps_fails_and_saves_no_model(ranks: Ranks) -> None:
    """Train a model with NaN weights for one step less than the number of skipped steps that ends a training."""
    world, model, out = ranks.world, ranks.folder / "nan", ranks.folder / "untrained"
    training = Training(world)
    if world.rank == 0:
        for weight in training.model.parameters():
            weight.data.fill_(math.nan)
        training.model.save_pretrained(model)
        training.task.tokenizer.save_pretrained(model)
    world.allgather(None)
    flags = ["--per_device_train_batch_size", GLOBAL_BATCH // world.size, "--max_steps", LIMIT - 1, "--no_do_eval"]
    words = sample("--model_name_or_path", model, *flags, "--report_to", "none", "--output_dir", out)
    for _ in range(2):  # the second run may find a checkpoint
        with pytest.raises(CollectiveError, match=f"all {LIMIT - 1} steps were skipped") as ended:
            call(train, world, words)
        assert ended.value.status == EXIT_FAILURE
    assert not list(out.glob("**/model.safetensors")) and not (out / "train_results.json").exists()
