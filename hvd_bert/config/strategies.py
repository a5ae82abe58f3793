"""The values of --strategy and their properties, for modules that must not import the strategies' classes.

To add a strategy, write its class in strategies/, and add a row here and in tests/parallel/test_worlds.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec

# Values of `StrategyRow.world`: the library whose collectives connect the ranks. ALONE: a single process without one.
HOROVOD, TORCH, ALONE = "horovod", "torch.distributed", "none"


@dataclass(frozen=True, kw_only=True)
class StrategyRow:
    """Properties of a strategy.

    Attributes:
        path: MODULE:CLASS of the strategy's class. The module is imported only if the strategy is chosen.
        world: HOROVOD, TORCH or ALONE.
        refuses: Flags that do not work with the strategy -> reason and remedy. FLAG=VALUE refuses a single value, FLAG
            all values except the default.
        shards: Whether weights, gradients or optimizer state are sharded over the ranks.
        several_gpus: Whether a single process trains on all visible GPUs.
        package: The package that the strategy needs in addition to torch; "" if torch is enough.
        install: The command that installs the package.
    """

    path: str
    world: str
    refuses: Mapping[str, str] = field(default_factory=dict)
    shards: bool = False
    several_gpus: bool = False
    package: str = ""
    install: str = ""

    @property
    def missing(self) -> str:
        """The error message if the package is missing; "" if it is installed or the strategy does not need one."""
        absent = self.package and find_spec(self.package) is None
        return f"{self.package} is not installed: run `{self.install}`" if absent else ""


_SHARDED = {
    "ema_decay": "it needs whole weights. Use ddp.",
    "torch_compile_mode=reduce-overhead": "the weights move. Use ddp.",
    "optim=lamb": "it needs the norms of whole weights. Use ddp.",
    "optim=lars": "it needs the norms of whole weights. Use ddp.",
}
_COPIED = "the layers are copied. Use ddp."
STRATEGIES = {
    "horovod": StrategyRow(
        path="hvd_bert.strategies.horovod:HorovodStrategy",
        world=HOROVOD,
        package="horovod",
        install="bash env/setup.sh",
    ),
    "ddp": StrategyRow(path="hvd_bert.strategies.ddp:DDPStrategy", world=TORCH),
    "fsdp": StrategyRow(path="hvd_bert.strategies.fsdp:FSDPStrategy", world=TORCH, refuses=_SHARDED, shards=True),
    "deepspeed": StrategyRow(
        path="hvd_bert.strategies.deepspeed:DeepSpeedStrategy",
        world=TORCH,
        refuses={**_SHARDED, "fp16": "use --bf16."},
        shards=True,
        package="deepspeed",
        install="bash env/setup.sh --deepspeed",
    ),
    "dp": StrategyRow(
        path="hvd_bert.strategies.dp:DPStrategy",
        world=ALONE,
        refuses={"torch_compile": _COPIED, "gradient_checkpointing": _COPIED},
        several_gpus=True,
    ),
    "none": StrategyRow(path="hvd_bert.strategies.base:Strategy", world=ALONE),
}
