"""Sums of work, loss and time per phase of a step, between two reads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch

from hvd_bert.distributed.world import World
from hvd_bert.monitoring import PHASES
from hvd_bert.tasks.base import MicroBatch

Item = TypeVar("Item")


_TOTALS = ("last_step", "train_s", "loss_sum", "windows", "tokens")


Instant = float | torch.cuda.Event  # by the host's clock, or by a GPU's
Lap = tuple[str, Instant, Instant]  # phase, start and end


class Stopwatch:
    """Splits time into laps by the device's clock: on a GPU with CUDA events, so that nothing waits for the device.

    `last`: the end of the last lap.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Forget all laps and start the first one."""
        self._laps: list[Lap] = []
        self.last = self.now()

    def now(self) -> Instant:
        """On a GPU, when it has done the work that it was given before."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, phase: str) -> None:
        """Add the time since the previous lap, or since the start, to `phase`."""
        start, self.last = self.last, self.now()
        self._laps.append((phase, start, self.last))

    def take(self) -> list[Lap]:
        """The laps since the start or the previous call."""
        taken, self._laps = self._laps, []
        return taken


def seconds_between(start: Instant, end: Instant) -> float:
    """Waits for the device to reach `end`."""
    if isinstance(end, float):
        assert isinstance(start, float)
        return end - start
    assert not isinstance(start, float)
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1000


class DeferredScalars:
    """A step's numbers, copied to the host alongside the next step, so that nothing waits for the device."""

    def __init__(self, count: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(count, dtype=torch.float64, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._filled = False

    def put(self, *numbers: torch.Tensor) -> None:
        """Start to copy the numbers, 0-dim tensors. Earlier ones must have been taken."""
        # Converted on the device: a copy to another dtype may wait.
        self._host.copy_(torch.stack([number.detach().double() for number in numbers]), non_blocking=True)
        if self._copied:
            self._copied.record()
        self._filled = True

    def take(self) -> list[float]:
        """The numbers, once; empty if there are none. Waits for work of the device that came before `put` only."""
        if not self._filled:
            return []
        if self._copied:
            self._copied.synchronize()
        self._filled = False
        found: list[float] = self._host.numpy().tolist()
        return found


class Meter:
    """Sums up work, loss and time per log line, without waiting for the device.

    `end_line` ends a line, and `read` returns it once its last step is settled: at once, or after the next step was
    started, so that the device has work meanwhile.

    Times exclude evaluations. `phases`: names of the phases that are told apart.
    `sums`: of the last read, over all ranks; the seconds by this rank's device. `phase_s`: seconds per rank and phase,
    [ranks, phases], in the last `watched` steps before it. Steps before a resume are not among them.
    `on_step`: called with each step's loss, of this rank, and norm of the gradient when the step is settled.
    `on_applied`: called then if the norm is finite; otherwise the strategy has skipped the step.
    `skipped_steps`: how many were skipped. `grad_norm`: of the last settled step.
    """

    sums: dict[str, Any]
    phase_s: torch.Tensor

    def __init__(self, world: World, separates_comm: bool = True) -> None:
        """`separates_comm`: whether "exposed_comm" can be told from "compute". If not, it counts as "compute"."""
        self.world = world
        self.phases = tuple(phase for phase in PHASES if separates_comm or phase != "exposed_comm")
        self.annotate: Callable[[str], AbstractContextManager[Any]] = nullcontext  # marks a phase for a profiler
        self.on_step: Callable[[float, float], None] | None = None
        self.on_applied: Callable[[], object] | None = None
        self.last_step = self.skipped_steps = self._skipped_before = 0
        self.train_s = self.loss_sum = 0.0
        self.windows = self.tokens = 0
        self.grad_norm = 0.0
        self._phase = "other"  # the innermost open block of `phase`
        self._stopwatch = Stopwatch(world.device)
        self._step_loss = torch.zeros((), dtype=torch.float64, device=world.device)
        self._pending = DeferredScalars(2, world.device)
        self._has_settled = False  # a step
        # Since the last line that was read: this rank's loss, up to the last settled step, and its work.
        self._loss = 0.0
        self._counts = np.zeros(3, np.int64)  # windows, tokens, positions
        self._start(0)

    def _start(self, step: int) -> None:
        self._stopwatch.restart()
        self._since, self._restored_s = self._stopwatch.last, 0.0
        self._watched_from = step

    def lap(self, phase: str) -> None:
        """End `phase`, one of PHASES: it has lasted since the previous lap."""
        self._stopwatch.lap(phase)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around the code of phase `name`. Phases leave no gaps: each starts where the previous one ended."""
        outer, self._phase = self._phase, name
        with self.annotate(name):
            yield
        self.lap(self._phase)
        self._phase = outer

    def timed(self, phase: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items. Waiting for each is `phase`."""
        left = iter(items)
        while True:
            with self.annotate(phase):
                item = next(left, None)
            if item is None:
                return
            self.lap(phase)
            yield item

    def gradients_computed(self) -> None:
        """The last gradients are computed: the rest of this phase is waiting for other ranks."""
        self.lap("compute")
        self._phase = "exposed_comm"

    def add(self, loss: torch.Tensor, batch: MicroBatch) -> None:
        """Count one forward pass. `loss`: this rank's share of the step's loss, as passed to the strategy."""
        self._step_loss += loss.detach()
        self._counts += (batch.num_windows, batch.num_tokens, batch.num_positions)

    def end_step(self, grad_norm: torch.Tensor) -> None:
        """End the step, whose passes have been added. It is skipped if `grad_norm` is not finite."""
        self.settle()
        self._pending.put(self._step_loss, grad_norm.to(self._step_loss.device))
        self._step_loss.zero_()

    def settle(self) -> None:
        """Count the loss of the last step, unless it was skipped, and report it to `on_applied` and `on_step`, if it is
        not settled yet. All ranks call this after the same step."""
        # On a GPU the host waits here for the last step's collectives. The first step may compile, for minutes.
        watch = self.world.limit_wait(lambda: ["the last step's gradients"]) if self._has_settled else nullcontext()
        with watch:
            taken = self._pending.take()
        for loss, self.grad_norm in filter(None, [taken]):
            self._has_settled = True
            if not math.isfinite(self.grad_norm):  # the loss may be NaN
                self.skipped_steps += 1
            else:
                self._loss += loss
                if self.on_applied:
                    self.on_applied()
            if self.on_step:
                self.on_step(loss, self.grad_norm)

    def end_line(self, step: int) -> None:
        """End a log line after step `step`: what follows counts for the next one. Waits for nothing."""
        self.lap("other")
        self._line = step, self._stopwatch.last, self._stopwatch.take(), self._counts.copy()

    def read(self) -> dict[str, float]:
        """Means over all ranks of the line that has ended. A collective. The line's last step must be the last settled
        one.

        `loss`, `windows_per_s`, `tokens_per_s`, `padding_share`, `step_s`. Per phase the seconds per step and the share
        of the step: `data_s`, `data_share`, ... With several ranks also the minimum and the maximum over the ranks:
        `data_min_s`, `data_max_s`, ...
        """
        step, end, laps, mine_counts = self._line
        phase_s = dict.fromkeys(PHASES, 0.0)
        for phase, *lap in laps:
            phase_s[phase] += seconds_between(*lap)
        if "exposed_comm" not in self.phases:
            phase_s["compute"] += phase_s.pop("exposed_comm")
        mine = [self._loss, *mine_counts.tolist(), *phase_s.values()]
        table = torch.zeros(self.world.size, len(mine), dtype=torch.float64)
        table[self.world.rank] = torch.tensor(mine, dtype=torch.float64)
        table = self.world.sum(table)  # under Horovod elastic a lost rank ends it: the sums must stay until then
        seconds = self._restored_s + seconds_between(self._since, end)
        self._since, self._restored_s, self._loss = end, 0.0, 0.0
        self._counts -= mine_counts
        loss, *counts = table[:, :4].sum(0).tolist()
        windows, tokens, positions = map(round, counts)
        loss /= self.world.size
        watched, self.phase_s = step - self._watched_from, table[:, 4:]
        self.sums = {"seconds": seconds, "windows": windows, "tokens": tokens, "positions": positions}
        self.sums["watched"] = watched
        steps = step - self.last_step
        counted = steps - (self.skipped_steps - self._skipped_before)
        self._skipped_before = self.skipped_steps
        self.last_step = self._watched_from = step
        self.train_s += seconds
        self.loss_sum += loss
        self.windows += windows
        self.tokens += tokens
        return {
            "loss": loss / counted if counted else math.nan,
            "windows_per_s": windows / seconds,
            "tokens_per_s": tokens / seconds,
            "padding_share": 1 - tokens / positions,
            "step_s": seconds / steps,
        } | _spread(self.phases, self.phase_s / watched)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around work whose time does not count. Call right after `read`."""
        yield
        self._start(self.last_step)

    def state(self) -> dict[str, float]:
        """Totals up to the last read, equal on all ranks, and the time since. Waits for the device."""
        totals = {name: getattr(self, name) for name in _TOTALS}
        totals |= {"skipped_steps": self.skipped_steps, "skipped_before": self._skipped_before}
        return totals | {"seconds": self._restored_s + seconds_between(self._since, self._stopwatch.now())}

    def since_last_log(self) -> list[float]:
        """This rank's sums since the last read: loss, windows, tokens, positions. Waits for the device."""
        self.settle()
        return [self._loss, *self._counts.tolist()]

    def restore(self, state: dict[str, float], since_last_log: list[float], step: int) -> None:
        """Restore what `state` and `since_last_log` returned after `step`. Phases are counted from here on."""
        for name in _TOTALS:
            setattr(self, name, state[name])
        self.skipped_steps, self._skipped_before = int(state["skipped_steps"]), int(state["skipped_before"])
        self._loss, *counts = since_last_log
        self._counts[:] = counts
        self._start(step)
        self._restored_s = state["seconds"]

    def results(self) -> dict[str, float]:
        """Totals of the training by run_qa's names: samples are windows, train_runtime (s) excludes evaluations."""
        return {
            "train_runtime": self.train_s,
            "train_samples": self.windows,
            "train_samples_per_second": self.windows / self.train_s,
            "train_steps_per_second": self.last_step / self.train_s,
            "train_tokens_per_second": self.tokens / self.train_s,
            "train_loss": self.loss_sum / max(1, self.last_step - self.skipped_steps),
            "skipped_steps": self.skipped_steps,
        }


def _spread(phases: Sequence[str], seconds: torch.Tensor) -> dict[str, float]:
    """Per phase: mean of `seconds` [ranks, phases], its share of the step, minimum and maximum."""
    row: dict[str, float] = {}
    whole = float(seconds.mean(0).sum())
    for phase, column in zip(phases, seconds.T, strict=True):
        mean = float(column.mean())
        row[f"{phase}_s"], row[f"{phase}_share"] = mean, mean / whole
        if len(column) > 1:
            row[f"{phase}_min_s"], row[f"{phase}_max_s"] = float(column.min()), float(column.max())
    return row
