"""Steps whose loss or gradient is NaN or infinite, with the windows of their batches.

The averaged gradient has the same norm on all ranks, so all of them find such a step without a further message. They
find it a step later, since nothing waits for the device; `Strategy.step` has left the weights as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_bert.data.batch_plan import BatchPlan, Ids
from hvd_bert.distributed import events
from hvd_bert.distributed.logs import describe_ranks
from hvd_bert.distributed.world import CollectiveError, World
from hvd_bert.errors import EXIT_FAILURE, log
from hvd_bert.training.meter import Meter

# So many skipped steps in a row end the training. With fp16 and finite losses LIMIT_SCALED until a first step is made,
# since loss scaling skips up to 16 until its scale fits, and then LIMIT_LATER.
LIMIT, LIMIT_SCALED, LIMIT_LATER = 3, 20, 10
MAX_EVENTS = 100  # per start, so that events.jsonl stays small
MAX_RANKS, MAX_WINDOWS = 8, 1000  # listed per event, and per rank
MAX_NAMES = 8  # window names listed in a message
ADVICE = (
    "Lower --learning_rate, lengthen the warm-up (--warmup_ratio 0.1), or clip the gradient (--max_grad_norm 1). If it"
    " is always the same batch, check its data."
)
ADVICE_AT_START = (
    "The weights are those of the start: check them (--model_name_or_path), the data and the precision (--bf16 in place"
    " of --fp16), and rerun with --overwrite_output_dir."
)


class Health:
    """Watches the steps of a training. All ranks call the methods after the same steps."""

    def __init__(
        self, meter: Meter, plan: BatchPlan, world: World, step: int, names: Callable[[Ids], list[str]], fp16: bool
    ) -> None:
        """`step`: steps done. `names`: of training windows. `fp16`: whether losses or sums of gradients are in it."""
        self.meter, self.plan, self.world, self.names = meter, plan, world, names
        self._fp16, self._step = fp16, step
        # The last ones of the steps done that were skipped, and that had a loss of NaN or infinity.
        self._skipped = self._without_loss = 0
        self._cause = "No gradient was finite"
        self._events = 0
        meter.on_step = self._on_step_end

    def close(self) -> None:
        """Break the cycle of references with the meter, which would keep the model's memory."""
        self.meter.on_step = None

    def _on_step_end(self, loss: float, grad_norm: float) -> None:
        """A step has ended with this rank's loss and all ranks' norm. Raises CollectiveError after too many skipped
        steps."""
        self._step += 1
        if math.isfinite(grad_norm):
            self._skipped = self._without_loss = 0
            return
        losses = np.array(self.world.allgather(loss))
        bad = np.flatnonzero(~np.isfinite(losses))
        self._skipped += 1
        self._without_loss = self._without_loss + 1 if len(bad) else 0
        batch = self._batch(bad if len(bad) else np.arange(self.world.size), losses)
        self._events += 1
        if self.world.rank == 0 and self._events <= MAX_EVENTS:
            events.add("skipped_step", step=self._step, grad_norm=str(grad_norm), batch=batch)
        what = (
            f"The loss of {describe_ranks(bad.tolist())} is {losses[bad[0]]}"
            if len(bad)
            else "The gradient is NaN or infinite"
        )
        self._cause = f"{what} at step {self._step}"
        limit = LIMIT if not self._fp16 else LIMIT_SCALED if self._is_unchanged() else LIMIT_LATER
        if self._skipped >= limit or self._without_loss >= LIMIT:
            raise CollectiveError(
                f"{self._cause}: training has diverged. The last {self._skipped} steps were skipped.{_shown(batch)}"
                f" {ADVICE_AT_START if self._is_unchanged() else ADVICE}",
                status=EXIT_FAILURE,
            )
        if self.world.rank == 0 and not self._fp16:  # loss scaling expects them
            log.warning("%s. The step is skipped: the weights stay as they were.%s", self._cause, _shown(batch))

    def _is_unchanged(self) -> bool:
        """Whether all steps of the run were skipped."""
        return self.meter.skipped_steps == self._step

    def check_end(self) -> None:
        """After the last step: raise CollectiveError if all steps were skipped, so that nothing was trained."""
        self.meter.settle()
        if self._is_unchanged():
            raise CollectiveError(
                f"{self._cause}: all {self._step} steps were skipped. {ADVICE_AT_START}", status=EXIT_FAILURE
            )

    def check(self, step: int) -> None:
        """After `Meter.read` at `step`: raise CollectiveError if the loss is not finite although the gradients were."""
        if not math.isfinite(self.meter.loss_sum):
            raise CollectiveError(
                f"The loss is {self.meter.loss_sum} at step {step}, or since the last log line: training has diverged."
                f" {ADVICE}",
                status=EXIT_FAILURE,
            )

    def _batch(self, ranks: NDArray[np.int64], losses: NDArray[np.float64]) -> list[dict[str, Any]]:
        """Mean loss and windows of these ranks in the step, for rank 0."""
        if self.world.rank != 0 or self._events >= MAX_EVENTS:
            return []
        before = self._step - 1
        windows = len(self.plan.step_windows(before))
        found = []
        for rank in ranks[:MAX_RANKS].tolist():
            ids = np.concatenate(self.plan.rank_windows(before, rank))
            # A rank's loss is its share of the step's, times the world size.
            mean = losses[rank] * windows / self.world.size / max(1, len(ids))
            found.append({"rank": rank, "loss": str(mean), "windows": self.names(ids[:MAX_WINDOWS])})
        return found


def _shown(batch: list[dict[str, Any]]) -> str:
    """The first windows, as a sentence; empty on ranks other than 0."""
    names = [name for part in batch for name in part["windows"]]
    more = f" and {len(names) - MAX_NAMES} more (in events.jsonl)" if len(names) > MAX_NAMES else ""
    return f" Its windows: {', '.join(names[:MAX_NAMES])}{more}." if names else ""
