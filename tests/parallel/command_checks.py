"""Whole runs of `hvd-bert train`. test_worlds.py compares the worlds' output files."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks, call, check, check_every_strategy, expensive
from safetensors.torch import load_file
from training_checks import GLOBAL_BATCH, same, sample

from hvd_bert.checkpoint import files
from hvd_bert.config.command_line import parse
from hvd_bert.config.strategies import STRATEGIES
from hvd_bert.errors import UserError
from hvd_bert.strategies.base import Strategy, strategy_class
from hvd_bert.training.api import main as train
from hvd_bert.training.saving import Checkpoints


def run_command(ranks: Ranks, name: str, *flags: str | float, micro_batches: int = 1) -> None:
    """Train into the folder `name`, with GLOBAL_BATCH windows per step in `micro_batches` micro-batches."""
    batch = ["--global_batch", GLOBAL_BATCH]
    batch += ["--per_device_train_batch_size", GLOBAL_BATCH // ranks.world.size // micro_batches]
    call(train, ranks.world, sample(*batch, *flags, "--output_dir", ranks.folder / name))


@expensive
@check
def steps_overlap_with_a_write_and_the_next_save_waits_for_it(ranks: Ranks) -> None:
    """This limits the loss by a kill to --save_steps steps plus the steps during a write."""
    order: list[str] = []
    waits = threading.Event()
    kind = strategy_class("horovod")
    write, step, finish = files.write, kind.step, Checkpoints._finish_write

    def slow_write(*arguments: Any) -> Path:
        assert waits.wait(60), "no save waits for the write"
        order.append("written")
        return write(*arguments)

    def noted_finish(self: Checkpoints, **options: bool) -> Exception | None:
        waits.set()
        error = finish(self, **options)
        waits.clear()
        return error

    def noted_step(self: Strategy) -> bool:
        order.append("step")
        return step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write", slow_write)
        patch.setattr(Checkpoints, "_finish_write", noted_finish)
        patch.setattr(kind, "step", noted_step)
        run_command(ranks, "saved", "--max_steps", 5, "--save_steps", 2, "--no_do_eval")
    writes = ["written"] if ranks.world.rank == 0 else []
    assert order == ["step"] * 4 + writes + ["step"] + writes * 2, order


CLIP = 0.5
FILES = ("model", "unaveraged")
LEARNING_RATE = 1e-4
STEPS = {"run": 20, "padded_run": 10}
LOGGED = ("--logging_steps", 1, "--learning_rate", LEARNING_RATE)


@check_every_strategy
def whole_run_ends_well(ranks: Ranks) -> None:
    steps = ("--max_steps", STEPS["run"], *LOGGED)
    run_command(ranks, "run", *steps, "--max_eval_samples", 7, "--eval_strategy", "steps", "--eval_steps", 10)


@expensive
@check_every_strategy
def average_of_the_weights_is_evaluated_and_saved(ranks: Ranks) -> None:
    """Each checkpoint has the averaged and the trained weights. The final model is the average at the best step."""
    flags = ("--ema_decay", 0.5, "--learning_rate", 1e-3, "--max_eval_samples", 5)
    strategy = ranks.strategy.partition(":")[0]
    if STRATEGIES[strategy].shards:
        with pytest.raises(UserError, match=f"--ema_decay.*--strategy {strategy}"):
            parse([str(word) for word in sample(*flags)])
        return
    saves = ("--max_steps", 4, "--save_steps", 1, "--save_total_limit", 4, "--load_best_model_at_end")
    run_command(ranks, "averaged", *flags, *saves, "--eval_steps", 1, "--logging_steps", 1)
    folder = ranks.folder / "averaged"
    run_command(ranks, "scored", "--no_do_train", "--max_eval_samples", 5, "--model_name_or_path", folder)
    if ranks.world.rank != 0:
        return
    steps = [{n: load_file(folder / f"checkpoint-{i}" / f"{n}.safetensors") for n in FILES} for i in range(1, 5)]
    for before, after in itertools.pairwise(steps):
        weights = after["unaveraged"]
        assert not same(before["unaveraged"], weights)
        expected = {name: average - 0.5 * (average - weights[name]) for name, average in before["model"].items()}
        assert same(after["model"], expected)
    best = json.loads((folder / "train_results.json").read_text())["best"]
    assert same(load_file(folder / "model.safetensors"), steps[best["step"] - 1]["model"])
    scores = [json.loads((ranks.folder / n / "eval_results.json").read_text()) for n in ("averaged", "scored")]
    assert scores[0] == scores[1] and scores[0]["f1"] == best["value"]


@check_every_strategy
def padded_and_clipped_run_in_micro_batches_ends_well(ranks: Ranks) -> None:
    padded = ("--padding", "max_length", "--max_seq_length", 64, "--no_do_eval", "--layerwise_lr_decay", 0.8)
    steps = ("--max_steps", STEPS["padded_run"], *LOGGED)
    run_command(ranks, "padded_run", *steps, *padded, "--max_grad_norm", CLIP, micro_batches=4)
