"""Steps whose loss or gradient is NaN or infinite, and jumps of the loss, with the windows of their batches.

The averaged gradient has the same norm on all ranks, so all of them find such a step without a further message. They
find it a step later, since nothing waits for the device; the strategy has left the weights as they were.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hvd_bert.data.batch_plan import BatchPlan, Ids
from hvd_bert.distributed import events
from hvd_bert.distributed.logs import describe_ranks
from hvd_bert.distributed.world import CollectiveError, World, log
from hvd_bert.errors import EXIT_FAILURE
from hvd_bert.train.meter import Meter

# So many skipped steps in a row end the training. With fp16 and finite losses LIMIT_SCALED until a first step is made,
# since loss scaling skips up to 16 until its scale fits, and then LIMIT_LATER.
LIMIT, LIMIT_SCALED, LIMIT_LATER = 3, 20, 10
# A jump: a step's loss exceeds the mean of the steps before by so many of their standard deviations, and by MIN_JUMP.
DEVIATIONS, MIN_JUMP = 6.0, 0.1
STEPS_BEFORE, MIN_STEPS = 100, 20
MAX_EVENTS = 100  # of each kind per start, so that events.jsonl stays small
MAX_RANKS, MAX_WINDOWS = 8, 1000  # of an event, and per rank
MAX_NAMES = 8  # of windows in a message
ADVICE = (
    "Lower --learning_rate, lengthen the warm-up (--warmup_ratio 0.1), or clip the gradient (--max_grad_norm 1). If it"
    " is always the same batch, check its data."
)
ADVICE_AT_START = (
    "The weights are those of the start: check them (--model_name_or_path), the data and the precision (--bf16 in place"
    " of --fp16), and rerun with --overwrite_output_dir."
)
MAX_WEIGHTS = 5  # the same of weights
Losses = NDArray[np.float64]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        self._before: deque[float] = deque(maxlen=STEPS_BEFORE)
        self._events: Counter[str] = Counter()
        meter.on_step = self._ended

    def close(self) -> None:
        """Break the cycle of references with the meter, which would keep the model's memory."""
        self.meter.on_step = None

    def _ended(self, loss: float, grad_norm: float) -> None:
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
        batch = self._batch("skipped_step", self._step, bad if len(bad) else np.arange(self.world.size), losses)
        self._record("skipped_step", step=self._step, grad_norm=str(grad_norm), batch=batch)
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
        if self.world.rank == 0 and not self._fp16:  # with scaling it is nothing unusual
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
        """After `Meter.read` at `step`: find jumps of the loss. Raises CollectiveError if it is not finite although the
        gradients were."""
        losses = self.meter.interval.losses.numpy()  # of the last steps
        for number, of_ranks in zip(range(step - losses.shape[1] + 1, step + 1), losses.T, strict=True):
            if np.isfinite(of_ranks).all():
                self._compare(number, of_ranks)
        if not math.isfinite(self.meter.loss_sum):
            raise CollectiveError(
                f"The loss is {self.meter.loss_sum} at step {step}, or since the last log line: training has diverged."
                f" {ADVICE}",
                status=EXIT_FAILURE,
            )

    def _compare(self, step: int, losses: Losses) -> None:
        """Compare a step's losses with the steps before."""
        loss = float(losses.mean())
        if len(self._before) >= MIN_STEPS:
            before = np.array(self._before)
            mean, deviation = float(before.mean()), float(before.std())
            if loss > mean + max(DEVIATIONS * deviation, MIN_JUMP):
                batch = self._batch("loss_jump", step, np.argsort(-losses, kind="stable"), losses)
                if self._record("loss_jump", step=step, loss=loss, mean=mean, deviation=deviation, batch=batch):
                    many = len(self._before)
                    text = "The loss jumped to %.4g at step %d; its mean over the %d steps before is %.4g.%s"
                    log.info(text, loss, step, many, mean, _shown(batch))
        self._before.append(loss)

    def _batch(self, event: str, step: int, ranks: NDArray[np.int64], losses: Losses) -> list[dict[str, Any]]:
        """Mean loss and windows of these ranks in a step, for rank 0."""
        if self.world.rank != 0 or self._events[event] >= MAX_EVENTS:
            return []
        windows = len(self.plan.step_windows(step - 1))
        found = []
        for rank in ranks[:MAX_RANKS].tolist():
            ids = np.concatenate(self.plan.rank_windows(step - 1, rank))
            # A rank's loss is its share of the step's, times the world size.
            mean = losses[rank] * windows / self.world.size / max(1, len(ids))
            found.append({"rank": rank, "loss": str(mean), "windows": self.names(ids[:MAX_WINDOWS])})
        return found

    def _record(self, event: str, **values: Any) -> bool:
        """Add an event on rank 0. Returns whether it is there."""
        self._events[event] += 1
        if self.world.rank != 0 or self._events[event] > MAX_EVENTS:
            return False
        events.add(event, **values)
        return True


def _shown(batch: list[dict[str, Any]]) -> str:
    """The first windows, as a sentence; empty on ranks other than 0."""
    names = [name for part in batch for name in part["windows"]]
    more = f" and {len(names) - MAX_NAMES} more (in events.jsonl)" if len(names) > MAX_NAMES else ""
    return f" Its windows: {', '.join(names[:MAX_NAMES])}{more}." if names else ""


def checksum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits as integers, modulo 2^64 (0-dim, on its device). One flipped bit always changes it."""
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)


def check_copies(model: nn.Module, world: World, step: int) -> None:
    """Raise CollectiveError if a weight differs between ranks. A collective."""
    weights = model.state_dict()
    mine = torch.stack([checksum(weight) for weight in weights.values()]).tolist()
    ranks = [tuple(sums) for sums in world.allgather(mine)]
    (most, count), *others = Counter(ranks).most_common()
    if not others:
        return
    differing = [rank for rank, sums in enumerate(ranks) if sums != most]
    names = [name for name, *sums in zip(weights, *ranks, strict=True) if len(set(sums)) > 1]
    more = f" and {len(names) - MAX_WEIGHTS} more" if len(names) > MAX_WEIGHTS else ""
    hosts = ", ".join(dict.fromkeys(world.rank_infos[rank].host for rank in differing))
    # Such as 1 of 2.
    tie = " No majority tells which are right." if 2 * count <= world.size else ""
    raise CollectiveError(
        f"The weights of {describe_ranks(differing)} on {hosts} differ from those of the other ranks after step {step},"
        f" in {', '.join(names[:MAX_WEIGHTS])}{more}.{tie} A memory or a link may be faulty. Check these hosts, and"
        " rerun with the same --output_dir to resume from the last checkpoint, or with --resume_from_checkpoint from an"
        " earlier one.",
        status=EXIT_FAILURE,
    )
