"""Handling of skipped steps, whose gradient is NaN or infinite: record each, and stop a training that has too many.

The averaged gradient has the same norm on all ranks, so all ranks detect such a step without communicating. They do so
one step later, since the host does not wait for the device; `Strategy.step` has already skipped the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from hvd_bert.data.batch_plan import BatchPlan, Ids
from hvd_bert.distributed import events
from hvd_bert.distributed.logs import describe_ranks
from hvd_bert.distributed.world import CollectiveError, World
from hvd_bert.errors import EXIT_FAILURE, log
from hvd_bert.training.meter import Meter

# Number of consecutive skipped steps that ends the training. Loss scaling may skip 16 steps before its scale fits, so
# with fp16 and finite losses the number is LIMIT_SCALED until a step is applied, and LIMIT_LATER from then on.
LIMIT, LIMIT_SCALED, LIMIT_LATER = 3, 20, 10
ADVICE = (
    "Lower --learning_rate, lengthen the warm-up (--warmup_ratio 0.1), or clip the gradient (--max_grad_norm 1). If it"
    " is always the same batch (events.jsonl lists its windows), check its data."
)
ADVICE_AT_START = (
    "The weights are those of the start: check them (--model_name_or_path), the data and the precision (--bf16 in place"
    " of --fp16), and rerun with --overwrite_output_dir."
)


class Health:
    """Counts skipped steps and ends a training that has diverged. All ranks call the methods after the same steps."""

    def __init__(
        self,
        meter: Meter,
        plan: BatchPlan,
        world: World,
        step: int,
        window_names: Callable[[Ids], list[str]],
        fp16: bool,
    ) -> None:
        """Register with the meter.

        `step`: number of steps done. `window_names`: `Task.window_names`. `fp16`: whether fp16 or fp16 allreduce is on.
        """
        self.meter, self.plan, self.world, self.window_names = meter, plan, world, window_names
        self._fp16, self._step = fp16, step
        # Consecutive skipped steps, and consecutive steps that were skipped with a NaN or infinite loss on some rank.
        self._skipped = self._without_loss = 0
        self._cause = "No gradient was finite"
        meter.on_step = self._on_step_end

    def close(self) -> None:
        """Break the reference cycle with the meter, which would keep the model in memory."""
        self.meter.on_step = None

    def _on_step_end(self, loss: float, grad_norm: float) -> None:
        """Count a settled step. If it was skipped, record it and warn. Raises CollectiveError after too many of them.

        `loss`: this rank's loss. `grad_norm`: norm of the averaged gradient, equal on all ranks.
        """
        self._step += 1
        if math.isfinite(grad_norm):
            self._skipped = self._without_loss = 0
            return
        losses: list[float] = self.world.allgather(loss)
        bad = [rank for rank, each in enumerate(losses) if not math.isfinite(each)]
        self._skipped += 1
        self._without_loss = self._without_loss + 1 if bad else 0
        if self.world.rank == 0:
            self._record(losses, bad or range(self.world.size), grad_norm)
        what = f"The loss of {describe_ranks(bad)} is {losses[bad[0]]}" if bad else "The gradient is NaN or infinite"
        self._cause = f"{what} at step {self._step}"
        limit = LIMIT if not self._fp16 else LIMIT_SCALED if self._is_unchanged() else LIMIT_LATER
        if self._skipped >= limit or self._without_loss >= LIMIT:
            raise CollectiveError(
                f"{self._cause}: training has diverged. The last {self._skipped} steps were skipped."
                f" {ADVICE_AT_START if self._is_unchanged() else ADVICE}",
                status=EXIT_FAILURE,
            )
        if self.world.rank == 0 and not self._fp16:  # loss scaling expects skipped steps
            log.warning("%s. The step is skipped: the weights stay as they were.", self._cause)

    def _record(self, losses: list[float], ranks: Iterable[int], grad_norm: float) -> None:
        """Record the skipped step in events.jsonl, with each of the `ranks`' mean loss and windows."""
        before, batch = self._step - 1, []
        windows = len(self.plan.step_windows(before))
        for rank in ranks:
            ids = np.concatenate(self.plan.rank_windows(before, rank))
            # Undo the factor of `Training._step` (world size / windows of the step), and average over the windows.
            mean = losses[rank] * windows / self.world.size / max(1, len(ids))
            batch.append({"rank": rank, "loss": str(mean), "windows": self.window_names(ids)})
        events.add("skipped_step", step=self._step, grad_norm=str(grad_norm), batch=batch)

    def _is_unchanged(self) -> bool:
        """Return whether all steps of the training were skipped, so that the weights are unchanged."""
        return self.meter.skipped_steps == self._step

    def check_end(self) -> None:
        """Raise CollectiveError if all steps were skipped: nothing was trained. Call this after the last step."""
        self.meter.settle()
        if self._is_unchanged():
            raise CollectiveError(
                f"{self._cause}: all {self._step} steps were skipped. {ADVICE_AT_START}", status=EXIT_FAILURE
            )

    def check(self, step: int) -> None:
        """Raise CollectiveError if the loss of applied steps is NaN or infinite. Call this after `Meter.read`."""
        if not math.isfinite(self.meter.loss_sum):
            raise CollectiveError(
                f"The loss is {self.meter.loss_sum} at step {step}, or since the last log line: training has diverged."
                f" {ADVICE}",
                status=EXIT_FAILURE,
            )
