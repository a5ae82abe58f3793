"""The table of strategies: which engine trains, and what it needs."""

from __future__ import annotations

from importlib import import_module

from torch import nn

from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError
from hvd_bert.strategies.base import Engine, EngineOptions, MakeOptimizer

# Each in a file of its own, which is read only if it is chosen.
ENGINES = {
    "horovod": "hvd_bert.strategies.horovod:HorovodEngine",
    "ddp": "hvd_bert.strategies.ddp:DDPEngine",
    "fsdp": "hvd_bert.strategies.fsdp:FSDPEngine",
    "deepspeed": "hvd_bert.strategies.deepspeed:DeepSpeedEngine",
    "dp": "hvd_bert.strategies.dp:DPEngine",
    "none": "hvd_bert.strategies.base:Engine",
}


def engine_class(strategy: str) -> type[Engine]:
    """Raises UserError, with the line that installs it, if what the strategy needs is not installed."""
    module, name = ENGINES[strategy].split(":")
    try:
        found: type[Engine] = getattr(import_module(module), name)
    except ImportError as error:
        mend = "install it by `bash env/setup.sh --deepspeed`" if strategy == "deepspeed" else "take a newer torch"
        raise UserError(f"--strategy {strategy} cannot be loaded ({error}): {mend}, or choose another.") from None
    return found


def make_engine(
    strategy: str, model: nn.Module, make_optimizer: MakeOptimizer, options: EngineOptions, world: World
) -> Engine:
    """The engine of a strategy; see `Engine`. A collective."""
    return engine_class(strategy)(model, make_optimizer, options, world)
