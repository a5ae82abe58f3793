"""Checks of a training step on several ranks, which must equal the step of one process in plain PyTorch.

Most checks are named after a trap of Horovod 0.28 that causes wrong numbers, a crash or a hang.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from ranks import Ranks, check
from torch import Tensor, nn

from hvd_bert.config import command_line
from hvd_bert.config.settings import Config
from hvd_bert.data.collate import Collator
from hvd_bert.distributed.world import World
from hvd_bert.evaluation.forward import window_losses
from hvd_bert.model.layers import place
from hvd_bert.model.precision import autocast
from hvd_bert.strategies.base import Strategy, StrategyOptions, strategy_class
from hvd_bert.strategies.horovod import backward_groups
from hvd_bert.strategies.word_rows import word_embedding
from hvd_bert.tasks.question_answering import QuestionAnswering
from hvd_bert.training.optim import make_optimizer

WINDOWS = 17
GLOBAL_BATCH = 16  # the second step of an epoch has only one window
# These biases shift all inputs of a softmax equally, so their gradients are zero except for rounding errors.
ZERO_IN_THEORY = ("attention.self.key.bias", "encoder.layer.1.output.LayerNorm.bias", "qa_outputs.bias")
Gradients = dict[str, Tensor]


def sample(*flags: str | float | Path) -> list[str]:
    """Return the command line of a small run on the sample, with one window per question, plus `flags`."""
    tiny = Path(sys.argv[1]) / "tiny"
    fixed = ["--config", "sample", "--config_name", tiny, "--tokenizer_name", tiny, "--dropout", 0]
    strategy, _, stage = sys.argv[3].partition(":")  # such as "deepspeed:1"
    fixed += ["--strategy", strategy, *(["--zero_stage", stage] if stage else [])]
    fixed += ["--max_train_samples", WINDOWS, "--weight_decay", 0.01, "--adam_beta2", 0.98, "--warmup_ratio", 0.1]
    return command_line.override_argv([str(word) for word in fixed], [str(word) for word in flags])


class Training:
    """A run's strategy, plan and collator, as the training loop makes them, for a check with its own loop."""

    def __init__(self, world: World, *flags: str | float, accumulation: int = 1, frozen: str = "no weight") -> None:
        rank_batch = GLOBAL_BATCH // world.size // accumulation
        batch = ["--per_device_train_batch_size", rank_batch, "--gradient_accumulation_steps", accumulation]
        self.world = world
        self.config: Config = command_line.parse(sample("--no_do_eval", *batch, *flags))
        self.task = task = QuestionAnswering(self.config, world)
        assert task.train and task.plan
        self.plan = task.plan
        assert (self.plan.num_windows, self.plan.steps_per_epoch) == (WINDOWS, 2)
        self.model: nn.Module = task.model
        place(self.model, world.device, self.config.train.torch_compile)
        self.frozen = [weight for name, weight in self.model.named_parameters() if frozen in name]
        for weight in self.frozen:
            weight.requires_grad_(False)
        self.collate = Collator(task.train.windows, world.device, self.config.data.pad_to)
        self.model.train()

    def wrap(self) -> Strategy:
        self.strategy = strategy_class(self.config.parallel.strategy)(
            self.model,
            lambda module: make_optimizer(module, self.config.train, self.world.size),
            StrategyOptions(self.config.train, self.config.parallel, self.plan.accumulation),
            self.world,
        )
        self.forward = self.strategy.module
        self.forward.train()
        return self.strategy

    def shares(self, step: int) -> Iterator[Tensor]:
        """Yield this rank's loss per micro-batch. The ranks' sums average to the mean loss of the step's windows."""
        for ids in self.plan.rank_windows(step, self.world.rank):
            batch = self.collate(ids)
            with autocast(self.world.device, self.config.train.precision):
                losses = window_losses(self.forward, batch)[: batch.num_windows]
            yield losses.sum() * (self.world.size / len(self.plan.step_windows(step)))

    def backward(self, step: int, factor: float = 1.0) -> list[float]:
        """Run a step's forward and backward passes. Returns the loss per micro-batch."""
        losses = []
        with self.strategy.micro_batches():
            for loss in self.shares(step):
                losses.append(loss.item())
                self.strategy.backward(loss * factor)
        return losses

    def apply(self) -> None:
        """Average and clip the gradients of the backward passes, and run the optimizer step."""
        self.strategy.synchronize()
        self.strategy.clip()
        self.strategy.step()

    def gradients(self) -> Gradients:
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def weights(self) -> Gradients:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def averaged_gradients(self, step: int) -> Gradients:
        """Return the averaged and clipped gradients of a step without applying them."""
        self.backward(step)
        self.strategy.synchronize()
        self.strategy.clip()
        return self.gradients()

    def averaged_step(self, step: int, factor: float = 1.0) -> list[float]:
        """Run a whole step. Returns the loss per micro-batch. `factor` multiplies the gradients."""
        losses = self.backward(step, factor)
        self.apply()
        return losses

    def plain_gradients(self, step: int) -> Gradients:
        """Return one process's gradients for all windows of the step, without a strategy."""
        batch = self.collate(self.plan.step_windows(step))
        loss = window_losses(self.model, batch).mean()
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def assert_close(found: Gradients, expected: Gradients, tolerance: float = 1e-5) -> None:
    """Assert that each tensor differs by at most `tolerance` times its norm.

    For ZERO_IN_THEORY, the norm of all tensors counts instead.
    """
    assert found.keys() == expected.keys()
    whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        norm = whole if name.endswith(ZERO_IN_THEORY) else gradient.norm()
        error = float((found[name] - gradient).norm() / norm)
        assert error <= tolerance, f"{name}: off by {error:.2e} of its norm"


def same(one: Gradients, other: Gradients) -> bool:
    """Return whether all tensors are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_same_on_all_ranks(world: World, tensors: Gradients) -> None:
    mine = {name: tensor.numpy() for name, tensor in tensors.items()}
    zero = world.broadcast(mine)
    assert all(np.array_equal(mine[name], zero[name]) for name in mine)


@check
def all_waits_over_gloo_call_the_replaced_function(ranks: Ranks) -> None:
    """`_pause_between_polls` replaces the function that waits. Other versions of Horovod may also wait elsewhere."""
    from horovod.torch.mpi_ops import mpi_lib

    if ranks.controller != "gloo":
        return
    world, training = ranks.world, Training(ranks.world)
    training.wrap()
    waits = {
        "allgather": (lambda: world.allgather(None), 2),  # one for the sizes, one for the values
        "sum": (lambda: world.sum(torch.ones(2)), 1),
        "broadcast": (lambda: world.broadcast_tensors({"tensor": torch.ones(2)}), 1),
        "vote": (lambda: world.any_rank_async(False)(), 1),
        # One per gradient, and two for the sparse gradient of the word embeddings.
        "step": (lambda: training.averaged_step(0), len(training.weights()) + 1),
    }
    for name, (operation, expected) in waits.items():
        replaced = mpi_lib.horovod_torch_wait_and_clear
        with patch.object(mpi_lib, "horovod_torch_wait_and_clear", wraps=replaced) as wait:
            operation()
        assert (name, wait.call_count) == (name, expected)


@check
def waits_over_gloo_leave_the_core_to_others(ranks: Ranks) -> None:
    """Between two polls, `_pause_between_polls` sleeps for at least 50 microseconds."""
    from horovod.torch.mpi_ops import mpi_lib

    if ranks.controller != "gloo":
        return
    world, poll, polls = ranks.world, mpi_lib.horovod_torch_poll, 0

    def counting_poll(handle: int) -> bool:  # a mock would take almost as long as the sleep
        nonlocal polls
        polls += 1
        return bool(poll(handle))

    world.allgather(None)
    if world.rank == world.size - 1:
        time.sleep(0.3)  # simulates work that the other ranks wait for
    begin = time.monotonic()
    with patch.object(mpi_lib, "horovod_torch_poll", counting_poll):
        world.sum(torch.ones(1))
    if world.rank == 0:
        assert 1 < polls <= (time.monotonic() - begin) / 5e-5 + 1


@check
def only_the_parameters_are_broadcast(ranks: Ranks) -> None:
    # The strategy must not call Horovod's broadcast_optimizer_state: it runs a hidden step of a new AdamW, which decays
    # every weight.
    world = ranks.world
    training = Training(world, "--seed", 7 + world.rank, "--weight_decay", 0.5)
    before = training.weights()
    different = {tuple(map(float, weights)) for weights in world.allgather(before["qa_outputs.weight"][0, :3])}
    assert len(different) == world.size, "the ranks must start from different weights"
    strategy = training.wrap()
    zero = world.broadcast({name: tensor.numpy() for name, tensor in before.items()})
    assert all(np.array_equal(tensor.numpy(), zero[name]) for name, tensor in training.weights().items())
    assert not any(strategy.optimizer.state.values()), "the optimizer has made a step"


@check
def averaged_gradients_are_those_of_one_process(ranks: Ranks) -> None:
    # Horovod's zero_grad has no argument set_to_none, and raises before gradients are averaged. After a step, Horovod
    # counts the gradients of each group again.
    for groups in ((), ("--num_groups", 5)):
        training = Training(ranks.world, "--max_grad_norm", 0, "--learning_rate", 1e-4, *groups)
        training.wrap()
        for step in range(3):  # across the end of an epoch
            found = training.averaged_gradients(step)
            if ranks.world.rank == 0:
                assert_close(found, training.plain_gradients(step))
            assert_same_on_all_ranks(ranks.world, found)
            training.strategy.step()
            assert all(gradient.abs().max() == 0 for gradient in training.gradients().values())
        assert_same_on_all_ranks(ranks.world, training.weights())


@check
def weight_decay_of_the_groups_survives_the_wrapping(ranks: Ranks) -> None:
    training = Training(ranks.world, "--weight_decay", 0.5, "--learning_rate", 0.1)
    training.wrap()
    before = training.weights()
    training.averaged_step(0, factor=0.0)  # with zero gradients, only the decay changes weights
    for name, weight in training.weights().items():
        expected = before[name] * (1 - 0.1 * 0.5) if weight.ndim > 1 else before[name]
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=0, msg=name)


@check
def inf_on_one_rank_backs_off_the_fp16_scale_on_all(ranks: Ranks) -> None:
    world = ranks.world
    training = Training(world, "--fp16")
    strategy = training.wrap()
    before, scale = training.weights(), strategy.scaler.get_scale()
    training.averaged_step(0, factor=math.inf if world.rank == world.size - 1 else 1.0)
    assert strategy.scaler.get_scale() == scale / 2
    assert same(training.weights(), before), "a step with inf was applied"
    while strategy.scaler.get_scale() > 2:  # fp16 may need more halvings of the high initial scale
        scale = strategy.scaler.get_scale()
        training.averaged_gradients(0)
        strategy.step()
        if strategy.scaler.get_scale() == scale:
            break
    assert not same(training.weights(), before), "no step was applied after the scale was lowered"
    assert_same_on_all_ranks(world, training.weights())
    assert len(set(world.allgather(strategy.scaler.get_scale()))) == 1


@check
def fp16_allreduce_overflow_skips_the_step_on_all(ranks: Ranks) -> None:
    # A gradient above 65504 becomes inf when it is sent. A single rank sends nothing, so make its gradient inf.
    world = ranks.world
    training = Training(world, "--fp16_allreduce")
    strategy = training.wrap()
    before = training.weights()
    too_much = 1e9 if world.size > 1 else math.inf
    training.averaged_step(0, factor=too_much if world.rank == world.size - 1 else 1.0)
    assert same(training.weights(), before), "a step that overflowed was applied"
    found = training.averaged_gradients(0)
    assert not [name for name, gradient in found.items() if not torch.isfinite(gradient).all()]
    strategy.step()
    assert not same(training.weights(), before)
    assert_same_on_all_ranks(world, training.weights())


@check
def bf16_allreduce_rounds_the_mean(ranks: Ranks) -> None:
    # The largest error of one rounding is 2^-8. Each rank's gradient and each partial sum are rounded.
    world = ranks.world
    for flags in ((), ("--num_groups", 2), ("--deterministic",)):
        training = Training(world, "--bf16_allreduce", "--max_grad_norm", 0, *flags)
        training.wrap()
        found = training.averaged_gradients(0)
        if world.rank == 0:
            assert_close(found, training.plain_gradients(0), 2**-7 if world.size > 1 else 1e-5)
        assert_same_on_all_ranks(world, found)
        assert world.size == 1 or all(torch.equal(g, g.bfloat16().float()) for g in found.values())
        # Gradients beyond the range of fp16 remain finite.
        training.strategy.optimizer.zero_grad()
        training.backward(0, factor=1e9)
        training.strategy.synchronize()
        assert float(training.strategy.clip()) > 1e6
        training.strategy.step()


@check
def only_a_single_plain_gradient_is_sparse(ranks: Ranks) -> None:
    for flags in ((), ("--num_groups", 2), ("--fp16_allreduce",), ("--bf16_allreduce",), ("--torch_compile",)):
        training = Training(ranks.world, *flags)
        strategy = training.wrap()
        training.backward(0)
        words = word_embedding(training.model)
        assert words is not None and words.weight.grad is not None
        alone = type(strategy) is Strategy and "--torch_compile" not in flags  # the other flags apply only to Horovod
        assert words.weight.grad.is_sparse == (alone or not flags)
        strategy.synchronize()
        strategy.clip()
        assert not words.weight.grad.is_sparse


@check
def groups_change_no_sum(ranks: Ranks) -> None:
    """With frozen word embeddings, losses with and without groups are equal; on one and two ranks, bit for bit."""
    seen = []
    for number in (0, 3):
        training = Training(ranks.world, "--num_groups", number, "--learning_rate", 1e-3, frozen="word_embeddings")
        strategy = training.wrap()
        losses = list[float]()
        for _ in range(4):
            losses += training.backward(0)
            sent = [[id(weight) for weight in group] for group in strategy.optimizer._handles if number]
            training.apply()
        seen.append(losses)
    groups = [[id(weight) for weight in group] for group in backward_groups(training.model, 3)]
    assert len(groups) == 3 and sent == (groups if ranks.world.size > 1 else [])  # also in this order
    np.testing.assert_allclose(*seen, rtol=0, atol=0 if ranks.world.size <= 2 else 1e-4)
