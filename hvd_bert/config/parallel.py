"""Settings of the parallel strategy."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from hvd_bert.config.flag import MAX_THREADS, flag, properties_of, require

# Implementations: hvd_bert.strategies.table. none: a single process.
STRATEGIES = ["horovod", "ddp", "fsdp", "deepspeed", "dp", "none"]


@dataclass
class ParallelArguments:
    strategy: str = flag(
        "distributed",
        "horovod",
        "Parallel strategy; dp is one process with several GPUs, none is a single process.",
        choices=tuple(STRATEGIES),
        may_change_on_resume=True,
        sweep_hint="name them with --strategies",
        tune_hint="only Horovod is tuned",
    )
    zero_stage: int = flag(
        "distributed",
        2,
        "DeepSpeed: shard the optimizer (1), also the gradients (2), also the weights (3).",
        metavar="{1,2,3}",
        owner="deepspeed",
        may_change_on_resume=True,
    )
    fp16_allreduce: bool = flag(
        "distributed",
        False,
        "Horovod: send gradients as fp16, half the bytes; a step whose gradients overflow is skipped.",
        owner="horovod",
    )
    gradient_predivide_factor: float = flag(
        "distributed",
        1.0,
        "Horovod: divide gradients by X before the allreduce and by world size / X after it.",
        owner="horovod",
    )
    num_groups: int = flag(
        "distributed",
        0,
        "Horovod: send gradients in N groups, each when it is complete; 0: do not group.",
        owner="horovod",
        may_change_on_resume=True,
    )
    check_weights_steps: int = flag(
        "distributed",
        0,
        "Horovod and DDP: every N steps, end the run if the weights differ between ranks; 0: do not compare.",
        may_change_on_resume=True,
    )
    num_threads: int | None = flag(
        "distributed",
        None,
        "CPU threads per rank.",
        default_text="OMP_NUM_THREADS, else the rank's share of its cores",
        may_change_on_resume=True,
    )

    def __post_init__(self) -> None:
        require(self.zero_stage in (1, 2, 3), f"--zero_stage {self.zero_stage}: must be 1, 2 or 3.")
        for f in fields(self):
            owner = properties_of(f).owner
            others = owner not in ("", self.strategy) and getattr(self, f.name) != f.default
            require(not others, f"--{f.name} works only with --strategy {owner}, not with {self.strategy}.")
        factor = self.gradient_predivide_factor
        require(
            math.isfinite(factor) and factor > 0,
            f"--gradient_predivide_factor {factor}: must be a positive, finite number.",
        )
        require(factor <= 1e30, f"--gradient_predivide_factor {factor}: must be at most 1e+30.")
        require(self.num_groups >= 0, f"--num_groups {self.num_groups}: must not be negative.")
        every = self.check_weights_steps
        require(every >= 0, f"--check_weights_steps {every}: must not be negative.")
        require(
            every == 0 or self.strategy in ("horovod", "ddp"),
            f"--check_weights_steps {every}: with --strategy {self.strategy} the ranks hold no copies of the weights to"
            " compare. Leave it out.",
        )
        threads = self.num_threads
        require(threads is None or threads >= 1, f"--num_threads {threads}: must be at least 1.")
        require(threads is None or threads <= MAX_THREADS, f"--num_threads {threads}: must be at most {MAX_THREADS}.")
