"""A run with dropout that is stopped at any moment and resumed equals an uninterrupted run bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import resuming
import torch
from ranks import Ranks, call, check, check_every_strategy, expensive
from safetensors.torch import load_file
from stopping_at import signal_at
from training_checks import GLOBAL_BATCH, WINDOWS, sample
from transformers import AutoConfig, AutoModelForQuestionAnswering

from hvd_bert import machine
from hvd_bert.distributed.world import CollectiveError, HostsChanged, World
from hvd_bert.errors import EXIT_STOPPED
from hvd_bert.training.api import main as train

STEPS = 6  # an epoch has 2 steps, the second with one window


def flags(world: World, strategy: str, out: Path) -> list[str]:
    batch = ["--per_device_train_batch_size", GLOBAL_BATCH // world.size // 2]
    batch += ["--gradient_accumulation_steps", 2, "--max_steps", STEPS]
    evaluation = ["--max_eval_samples", 5, "--eval_strategy", "steps", "--eval_steps", 4, "--logging_steps", 3]
    learning = ["--learning_rate", 1e-3, "--warmup_ratio", 0.25, "--dropout", 0.1, "--save_steps", 3]
    learning += ["--attention_dropout", 0.2, "--layerwise_lr_decay", 0.8]
    learning += ["--ema_decay", 0.9] if strategy in ("horovod", "ddp", "none") else []
    exact = ["--deterministic"] if world.size > 2 else []
    return sample(*batch, *evaluation, *learning, *exact, "--output_dir", out)


def run(world: World, words: list[str]) -> int:
    """Run the trainer's main function. Returns the exit status: 0, or EXIT_STOPPED after a signal."""
    try:
        call(train, world, words)
    except CollectiveError as error:
        if error.status != EXIT_STOPPED:
            raise
        return error.status
    return 0


@check_every_strategy
def stopped_run_equals_an_uninterrupted_run(ranks: Ranks) -> None:
    world = ranks.world
    whole, stopped, records = (ranks.folder / name for name in ("whole", "stopped", "records"))
    records.mkdir(exist_ok=True)
    assert run(world, flags(world, ranks.strategy, whole)) == 0
    # Stop between two micro-batches in the middle of an epoch, and at the end of an epoch, right after an evaluation.
    for step, moment in ((1, "inside"), (4, "start")):
        with signal_at(step, {world.size - 1}, "SIGTERM", moment, records=records):
            assert run(world, flags(world, ranks.strategy, stopped)) == EXIT_STOPPED
        if world.rank == 0:
            assert resuming.newest(stopped).name == f"checkpoint-{step}"
            assert not (stopped / "train_results.json").exists()
    with signal_at(0, {0}, "SIGTERM", records=records):
        assert run(world, flags(world, ranks.strategy, stopped)) == 0
    taken = (records / f"windows-{world.rank}.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line)["step"] for line in taken]
    assert steps == sorted([*range(1, STEPS + 1)] * 2), "a run started again, or repeated a step"
    if world.rank == 0:
        assert resuming.differences(whole, stopped) == []


@expensive
@check_every_strategy
def logging_interval_does_not_change_the_model(ranks: Ranks) -> None:
    """Whether a step was applied decides later learning rates. The run reads this one step later, or when it logs."""
    world, found = ranks.world, []
    for steps in (1, STEPS):
        out = ranks.folder / f"logged_{steps}"
        words = ["--logging_steps", steps, "--eval_strategy", "no", "--save_steps", 0]
        assert run(world, [*flags(world, ranks.strategy, out), *map(str, words)]) == 0
        if world.rank == 0:
            found.append((out / "model.safetensors").read_bytes())
    assert len({*found}) <= 1


@check
def newest_state_in_memory_is_resumed_by_all_ranks(ranks: Ranks) -> None:
    """Rank size - 1 has the state after step 2, the middle ranks have that after step 1, and rank 0 has none."""
    if ranks.world.size < 4:
        return
    world, last = ranks.world, ranks.world.size - 1
    whole, out = ranks.folder / "whole_without_dropout", ranks.folder / "elastic"
    no_dropout = ["--dropout", 0, "--attention_dropout", 0]
    assert run(world, [*flags(world, ranks.strategy, whole), *no_dropout]) == 0
    process, world.elastic, states = world.process, True, []
    try:
        for process.hosts_changed in (True, True):  # each run takes one step
            with pytest.raises(HostsChanged):
                call(train, world, [*flags(world, ranks.strategy, out), *no_dropout])
            states.append(world.process.last_state)
        assert [state.step for state in states] == [1, 2]
        process.last_state = states[1] if world.rank == last else states[0] if world.rank else None
        process.hosts_changed = False
        assert run(world, [*flags(world, ranks.strategy, out), *no_dropout]) == 0
    finally:
        world.elastic = process.hosts_changed = False
    if world.rank == 0:
        assert not [found for found in resuming.differences(whole, out) if found.startswith(("model", "optimizer"))]
        results = [json.loads((folder / "train_results.json").read_text(encoding="utf-8")) for folder in (whole, out)]
        assert results[0]["train_samples"] == results[1]["train_samples"]


@expensive
@check_every_strategy
def adapters_are_resumed_saved_and_merged(ranks: Ranks) -> None:
    world, base, out, stopped = ranks.world, *(ranks.folder / name for name in ("base", "adapted", "adapted_twice"))
    if world.rank == 0:
        config = AutoConfig.from_pretrained(ranks.folder / "tiny")
        AutoModelForQuestionAnswering.from_config(config).save_pretrained(base)
    world.allgather(None)
    words = ["--model_name_or_path", str(base), "--lora_rank", "4"]
    assert run(world, [*flags(world, ranks.strategy, out), *words]) == 0
    with signal_at(4, {world.size - 1}, "SIGTERM"):
        assert run(world, [*flags(world, ranks.strategy, stopped), *words]) == EXIT_STOPPED
    assert run(world, [*flags(world, ranks.strategy, stopped), *words]) == 0
    if world.rank != 0:
        return
    import peft  # imported only here, because it takes seconds

    assert resuming.differences(out, stopped) == []
    model, found = AutoModelForQuestionAnswering.from_pretrained(base), load_file(out / "model.safetensors")
    changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, found[name])}
    assert {name.split(".")[-2] for name in changed} == {"query", "value", "qa_outputs"}
    merged = peft.PeftModel.from_pretrained(model, out / "adapter").merge_and_unload().state_dict()
    torch.testing.assert_close(merged, found)


@expensive
@check
def chosen_batch_does_not_change_on_resume(ranks: Ranks) -> None:
    world, out = ranks.world, ranks.folder / "auto"
    words = [*flags(world, ranks.strategy, out), "--per_device_train_batch_size", "auto"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "free_memory", lambda: 2**34)
        with signal_at(2, {0}, "SIGTERM"):
            assert run(world, words) == EXIT_STOPPED
        patch.setattr(machine, "free_memory", lambda: 0)  # no batch would fit now
        assert run(world, words) == 0
    if world.rank == 0:
        results = json.loads((out / "train_results.json").read_text(encoding="utf-8"))
        assert results["per_device_train_batch_size"] == WINDOWS // world.size // 2, "all windows fit"
