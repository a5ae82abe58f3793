"""DDP and FSDP: where a rank waits for others inside a step, the watchdog counts, as it does for Horovod."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import distributed, nn

from hvd_bert.config.settings import ParallelArguments, TrainArguments
from hvd_bert.distributed.world import World
from hvd_bert.strategies.base import StrategyOptions, strategy_class


class Waits(World):
    """A world of one rank that records around what it is asked to watch, and which calls of the model are inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.ended: list[str] = []

    def limit_wait(self, names: Callable[[], Sequence[str]]) -> AbstractContextManager[None]:
        @contextmanager
        def over() -> Iterator[None]:
            self.inside.extend(names())
            yield
            self.ended.append(self.inside.pop())

        return over()


@pytest.fixture
def one_process() -> Iterator[None]:
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("name", "forward"), [("ddp", []), ("fsdp", ["the step's weights"])])
def test_watchdog_counts_while_a_step_waits_for_other_ranks(name: str, forward: list[str]) -> None:
    world = Waits()
    strategy = strategy_class(name)(
        nn.Linear(3, 1),
        lambda module: torch.optim.SGD(module.parameters(), 0.1),
        StrategyOptions(TrainArguments(), ParallelArguments(), 1),
        world,
    )
    strategy.backward(strategy.module(torch.ones(2, 3)).sum())
    strategy.step()
    assert world.ended == []  # it may have been compiled
    seen: list[list[str]] = []
    strategy.module.register_forward_pre_hook(lambda *_: seen.append(world.inside[:]))
    loss = strategy.module(torch.ones(2, 3)).sum()
    loss.register_hook(lambda _: seen.append(world.inside[:]))
    assert world.ended == forward
    strategy.backward(loss)
    assert seen == [forward, ["the step's gradients"]]
    assert world.inside == [] and world.ended == [*forward, "the step's gradients"]
