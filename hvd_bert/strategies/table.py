"""Strategies by name."""

from __future__ import annotations

from importlib import import_module

from torch import nn

from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError
from hvd_bert.strategies.base import MakeOptimizer, Strategy, StrategyOptions

# A strategy's module is imported only if it is chosen.
STRATEGY_CLASSES = {
    "horovod": "hvd_bert.strategies.horovod:HorovodStrategy",
    "ddp": "hvd_bert.strategies.ddp:DDPStrategy",
    "fsdp": "hvd_bert.strategies.fsdp:FSDPStrategy",
    "deepspeed": "hvd_bert.strategies.deepspeed:DeepSpeedStrategy",
    "dp": "hvd_bert.strategies.dp:DPStrategy",
    "none": "hvd_bert.strategies.base:Strategy",
}


def strategy_class(strategy: str) -> type[Strategy]:
    """The class of a strategy. Raises UserError, with the install command, if DeepSpeed or FSDP is missing."""
    module, name = STRATEGY_CLASSES[strategy].split(":")
    try:
        found: type[Strategy] = getattr(import_module(module), name)
    except ImportError as error:
        hint = "install it with `bash env/setup.sh --deepspeed`" if strategy == "deepspeed" else "install a newer torch"
        raise UserError(f"--strategy {strategy} cannot be loaded ({error}): {hint}, or choose another one.") from None
    return found


def make_strategy(
    strategy: str, model: nn.Module, make_optimizer: MakeOptimizer, options: StrategyOptions, world: World
) -> Strategy:
    """The strategy of that name; see `Strategy`. A collective."""
    return strategy_class(strategy)(model, make_optimizer, options, world)
