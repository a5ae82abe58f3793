"""Every strategy computes the gradients and steps of one process, and loads another strategy's state.

The gradients are derived from AdamW's first moments after one step, which `Strategy.state` returns in full.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from ranks import Ranks, check_every_strategy, expensive
from torch import nn
from training_checks import Gradients, Training, assert_close, same
from transformers import AutoModelForQuestionAnswering
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hvd_bert.config.strategies import STRATEGIES
from hvd_bert.errors import UserError
from hvd_bert.evaluation.forward import window_losses
from hvd_bert.model.families import FAMILIES
from hvd_bert.model.precision import recompute_layers
from hvd_bert.training.optim import make_optimizer


def applied_gradients(training: Training, step: int) -> Gradients:
    """Run the first optimizer step on the windows of `step`. Returns its gradients on rank 0, and {} on other ranks."""
    training.averaged_step(step)
    _, tensors, rest = training.strategy.state()
    if training.world.rank != 0:
        return {}
    share = 1 - rest["groups"][0]["betas"][0]
    return {
        name.removesuffix("/exp_avg"): value / share for name, value in tensors.items() if name.endswith("/exp_avg")
    }


def first_step(
    ranks: Ranks,
    *flags: str | float,
    accumulation: int = 1,
    step: int = 0,
    clip: float = 0.0,
    tolerance: float = 1e-5,
    recompute: bool = False,
) -> tuple[Gradients, Gradients]:
    """Compare the gradients of the strategy's first step with one process's gradients on the same windows.

    Returns both on rank 0, and {} and {} on other ranks.
    """
    is_first = ranks.world.rank == 0
    training = Training(ranks.world, "--max_grad_norm", clip, *flags, accumulation=accumulation)
    expected = training.plain_gradients(step) if is_first else {}
    if clip and is_first:
        norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
        assert norm > clip, "nothing is clipped"
        expected = {name: gradient * (clip / norm) for name, gradient in expected.items()}
    if recompute:
        recompute_layers(training.model)
    training.wrap()
    found = applied_gradients(training, step)
    if is_first:
        assert_close(found, expected, tolerance)
    return found, expected


@expensive
@check_every_strategy
def first_gradients_of_every_packed_family_are_those_of_one_process(ranks: Ranks) -> None:
    """Only FSDP and DDP depend on the family: FSDP shards its layers, and DDP needs a gradient for each weight."""
    if ranks.strategy not in ("fsdp", "ddp"):
        return
    sizes = json.loads((ranks.folder / "tiny" / "config.json").read_text())
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    for name in (name for name, family in FAMILIES.items() if family.packed and name in CONFIG_MAPPING):
        folder = ranks.folder / f"{name}-{ranks.world.rank}"
        CONFIG_MAPPING[name](pad_token_id=0, **{size: sizes[size] for size in names}).save_pretrained(folder)
        training = Training(ranks.world, "--config_name", folder, "--max_grad_norm", 0)
        expected = training.plain_gradients(0) if ranks.world.rank == 0 else {}
        training.wrap()
        found = applied_gradients(training, 0)
        if found:
            assert found.keys() == expected.keys(), name
            # Compare one concatenated vector, because which weights have zero gradients in theory depends on the
            # family.
            one, other = (torch.cat([gradients[key].flatten() for key in expected]) for gradients in (found, expected))
            assert (one - other).norm() <= 1e-5 * other.norm(), name


@check_every_strategy
def padded_clipped_and_recomputed_gradients_of_micro_batches_are_those_of_one_process(ranks: Ranks) -> None:
    first_step(ranks, "--padding", "max_length", "--max_seq_length", 64, accumulation=4, clip=0.01, recompute=True)


@check_every_strategy
def gradients_of_micro_batches_in_bf16_are_near_those_of_one_process(ranks: Ranks) -> None:
    found, expected = first_step(ranks, "--bf16", accumulation=4, tolerance=0.15)
    if found:
        with pytest.raises(AssertionError, match="off by"):  # gradients in fp32 would be closer
            assert_close(found, expected, 1e-4)


@check_every_strategy
def deterministic_steps_are_recorded(ranks: Ranks) -> None:
    """Record losses and weights, which test_worlds.py compares between strategies."""
    training = Training(ranks.world, "--deterministic", "--learning_rate", 1e-3, accumulation=2)
    strategy = training.wrap()
    losses = list[float]()
    for step in range(4):
        losses += training.averaged_step(step)
    weights = {name: weight.detach().numpy() for name, weight in strategy.gather_model().named_parameters()}
    if ranks.world.rank == 0:
        np.savez(ranks.folder / "deterministic.npz", losses=losses, **weights)


@check_every_strategy
def a_step_in_which_most_ranks_have_no_window_equals_that_of_one_process(ranks: Ranks) -> None:
    first_step(ranks, step=1, accumulation=4)


@check_every_strategy
def gathered_model_has_the_current_weights(ranks: Ranks) -> None:
    """Training has changed the gathered weights, and they are equal on all ranks."""
    training = Training(ranks.world, "--learning_rate", 1e-3)
    before = training.weights()
    strategy = training.wrap()
    training.averaged_step(0)
    whole = strategy.gather_model()
    after = {name: weight.detach().clone() for name, weight in whole.named_parameters()}
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(moved) > len(before) / 2
    batch = training.collate(training.plan.step_windows(1))
    whole.eval()
    with torch.no_grad():
        losses = window_losses(whole, batch).tolist()
    assert ranks.world.allgather(losses) == [losses] * ranks.world.size
    weights, _, _ = strategy.state()
    if ranks.world.rank == 0:
        assert all(torch.equal(weights[name], after[name]) for name in after)
        folder = ranks.folder / "saved_model"
        training.model.save_pretrained(folder)
        loaded = AutoModelForQuestionAnswering.from_pretrained(folder).state_dict()
        assert loaded.keys() == after.keys() and all(torch.equal(loaded[name], after[name]) for name in after)


@expensive
@check_every_strategy
def layerwise_optimizers_step_as_in_one_process(ranks: Ranks) -> None:
    for optim in ("lamb", "lars"):
        # With a smaller epsilon, LAMB would make full steps for gradients that are only rounding errors.
        flags = ("--optim", optim, "--learning_rate", 0.01, "--adam_epsilon", 1e-3)
        strategy = ranks.strategy.partition(":")[0]
        if STRATEGIES[strategy].shards:
            with pytest.raises(UserError, match=f"--optim {optim}.*--strategy"):
                Training(ranks.world, *flags)
            continue
        training, alone = Training(ranks.world, *flags), Training(ranks.world, *flags)
        settings = training.config
        optimizer = make_optimizer(alone.model, settings.train, devices=1)
        training.wrap()
        for step in (0, 1, 0):
            gradients = alone.plain_gradients(step)
            for name, parameter in alone.model.named_parameters():
                parameter.grad = gradients[name]
            nn.utils.clip_grad_norm_(alone.model.parameters(), settings.train.max_grad_norm)
            optimizer.step()
            training.averaged_step(step)
        assert_close(training.weights(), alone.weights())
        before = training.weights()
        training.averaged_step(0, factor=math.nan if ranks.world.rank == ranks.world.size - 1 else 1.0)
        assert same(training.weights(), before), "a step with NaN was applied"
        state_makes_the_same_next_step(ranks, "no weight", "--optim", optim)


@check_every_strategy
def state_with_frozen_weights_is_loaded_by_another_strategy(ranks: Ranks) -> None:
    state_makes_the_same_next_step(ranks, "embeddings")


def state_makes_the_same_next_step(ranks: Ranks, frozen: str, *flags: str | float) -> None:
    """Check that a strategy that loads another instance's state makes the same next step, bit for bit."""
    world, exact = ranks.world, ["--deterministic"] if ranks.world.size > 2 else []
    flags = ("--learning_rate", 1e-3, *exact, *flags)
    first, second = Training(world, *flags, frozen=frozen), Training(world, *flags, frozen=frozen)
    for weight in second.frozen:
        weight.data.zero_()
    first.wrap()
    first.averaged_step(0)
    second.wrap()
    weights, tensors, rest = first.strategy.state()
    copies = world.broadcast(
        [{name: value.clone().numpy() for name, value in group.items()} for group in (weights, tensors)]
    )
    whole = [{name: torch.from_numpy(value) for name, value in group.items()} for group in copies]
    second.strategy.load_state(*whole, world.broadcast(rest))
    for training in (first, second):
        training.averaged_step(1)
    mine, theirs = (dict(training.strategy.gather_model().named_parameters()) for training in (first, second))
    differing = {name: float((mine[name] - theirs[name]).abs().max()) for name in mine}
    differing = {name: maximum for name, maximum in differing.items() if maximum}
    assert not differing, differing
