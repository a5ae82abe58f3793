"""Meter of loss, window and token counts, and time per phase of a step, summed up for each log line."""

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
from hvd_bert.monitoring.usage import energy_j
from hvd_bert.tasks.base import MicroBatch

Item = TypeVar("Item")
Instant = float | torch.cuda.Event  # seconds of the host's clock, or an event in the GPU's queue
Interval = tuple[str, Instant, Instant]  # phase, start and end

_TOTALS = ("last_step", "train_s", "loss_sum", "windows", "tokens")


class Stopwatch:
    """Splits time into intervals. On a GPU, CUDA events mark their ends, so that the host does not wait.

    `last`: the end of the last interval.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Discard all intervals and start a new one now."""
        self._intervals: list[Interval] = []
        self.last = self.now()

    def now(self) -> Instant:
        """Return the current instant. On a GPU: the instant when the device finishes the work that is queued so far."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end_interval(self, phase: str) -> None:
        """End an interval that belongs to `phase`. It began at the end of the previous interval."""
        start, self.last = self.last, self.now()
        self._intervals.append((phase, start, self.last))

    def take(self) -> list[Interval]:
        """Return the intervals since `restart` or the previous call."""
        taken, self._intervals = self._intervals, []
        return taken


def seconds_between(start: Instant, end: Instant) -> float:
    """Return the seconds from `start` to `end`. Waits until the device reaches `end`."""
    if isinstance(end, float):
        assert isinstance(start, float)
        return end - start
    assert not isinstance(start, float)
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1000


class DeferredScalars:
    """Copies numbers of a step to the host while the device computes the next step."""

    def __init__(self, count: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(count, dtype=torch.float64, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._filled = False

    def put(self, *numbers: torch.Tensor) -> None:
        """Start to copy 0-dim tensors. Call `take` first to get the previous numbers."""
        # Convert on the device, since a copy to another dtype may make the host wait.
        self._host.copy_(torch.stack([number.detach().double() for number in numbers]), non_blocking=True)
        if self._copied:
            self._copied.record()
        self._filled = True

    def take(self) -> list[float]:
        """Return the numbers of the last `put`; [] if already taken. Waits only for work queued before that `put`."""
        if not self._filled:
            return []
        if self._copied:
            self._copied.synchronize()
        self._filled = False
        found: list[float] = self._host.numpy().tolist()
        return found


class Meter:
    """Sums up loss, counts and time per log line without waiting for the device. Times exclude evaluations.

    A step is settled when the host has its loss and gradient norm. `end_line` ends a line. Call `read` once the line's
    last step is settled: immediately or, to keep the device busy, one step later.

    Attributes:
        phases: The phases that are measured, in the order of PHASES.
        sums: Windows, tokens and positions of the last line over all ranks, its "seconds" on this rank, and "watched",
            the number of its steps whose phases were timed, which excludes steps before a resume.
        phase_s: Seconds per rank and phase in the last line's "watched" steps, [ranks, phases].
        on_step: Called when a step is settled, with this rank's loss and the norm of the averaged gradient.
        on_applied: Called when a step with a finite gradient norm is settled; the strategy skips all other steps.
        skipped_steps: Number of skipped steps since the start of training.
        grad_norm: Gradient norm of the last settled step.
        energy_j: Joules of all ranks' GPUs up to the last line; NaN if a GPU does not count them.
    """

    sums: dict[str, Any]
    phase_s: torch.Tensor

    def __init__(self, world: World, separates_comm: bool = True) -> None:
        """`separates_comm`: whether the strategy can time "exposed_comm" apart from "compute"; else it is included.

        A single rank does not communicate, so it has no "exposed_comm" either.
        """
        self.world = world
        has_comm = separates_comm and world.size > 1
        self.phases = tuple(phase for phase in PHASES if has_comm or phase != "exposed_comm")
        self.annotate: Callable[[str], AbstractContextManager[Any]] = nullcontext  # marks a phase for a profiler
        self.on_step: Callable[[float, float], None] | None = None
        self.on_applied: Callable[[], object] | None = None
        self.last_step = self.skipped_steps = self._skipped_before = 0
        self.train_s = self.loss_sum = 0.0
        self.windows = self.tokens = 0
        self.energy_j = 0.0 if world.gpus else math.nan
        self.grad_norm = 0.0
        self._phase = "other"  # the innermost open block of `phase`
        self._stopwatch = Stopwatch(world.device)
        self._step_loss = torch.zeros((), dtype=torch.float64, device=world.device)
        self._pending = DeferredScalars(2, world.device)
        self._has_settled = False  # whether any step was settled
        # This rank's sums since the last line that was read; the loss covers settled steps only.
        self._loss = 0.0
        self._counts = np.zeros(3, np.int64)  # windows, tokens, positions
        self._start(0)

    def _start(self, step: int) -> None:
        self._stopwatch.restart()
        self._since, self._restored_s = self._stopwatch.last, 0.0
        self._watched_from = step
        self._counter_j = energy_j(self.world.gpus)

    def end_interval(self, phase: str) -> None:
        """Count the time since the end of the previous interval as time of `phase`, a key of PHASES."""
        self._stopwatch.end_interval(phase)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager: count the time until the end of the block as phase `name`. Blocks may be nested.

        The time starts at the end of the previous phase, so that there are no gaps between phases.
        """
        outer, self._phase = self._phase, name
        with self.annotate(name):
            yield
        self.end_interval(self._phase)
        self._phase = outer

    def timed(self, phase: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items. The time spent waiting for each item counts as `phase`."""
        remaining = iter(items)
        while True:
            with self.annotate(phase):
                item = next(remaining, None)
            if item is None:
                return
            self.end_interval(phase)
            yield item

    def gradients_computed(self) -> None:
        """Count the rest of the open phase as exposed communication. Called once the step's gradients are computed."""
        self.end_interval("compute")
        self._phase = "exposed_comm"

    def add(self, loss: torch.Tensor, batch: MicroBatch) -> None:
        """Count a micro-batch. `loss`: the loss that was passed to `Strategy.backward`."""
        self._step_loss += loss.detach()
        self._counts += (batch.num_windows, batch.num_tokens, batch.num_positions)

    def end_step(self, grad_norm: torch.Tensor) -> None:
        """End the step after its micro-batches were added, and settle the previous step.

        A step whose `grad_norm` is not finite counts as skipped.
        """
        self.settle()
        self._pending.put(self._step_loss, grad_norm.to(self._step_loss.device))
        self._step_loss.zero_()

    def settle(self) -> None:
        """Settle the last step, unless that is done, and call `on_step`. All ranks must call this after the same step.

        If the step was applied, add its loss and call `on_applied`. Otherwise count it as skipped.
        """
        # On a GPU the host waits here for the last step's collectives. The first step has no limit: it may compile.
        with self.world.limit_wait(lambda: ["the last step's gradients"]) if self._has_settled else nullcontext():
            taken = self._pending.take()
        if not taken:
            return
        self._has_settled = True
        loss, self.grad_norm = taken
        if not math.isfinite(self.grad_norm):  # skipped: its loss may be NaN, so do not add it
            self.skipped_steps += 1
        else:
            self._loss += loss
            if self.on_applied:
                self.on_applied()
        if self.on_step:
            self.on_step(loss, self.grad_norm)

    def end_line(self, step: int) -> None:
        """End a log line after step `step`. Does not wait for the device."""
        self.end_interval("other")
        self._line = step, self._stopwatch.last, self._stopwatch.take(), self._counts.copy()

    def read(self) -> dict[str, float]:
        """Return the metrics of the line that `end_line` ended, by their keys in metrics.jsonl. A collective.

        Sets `sums` and `phase_s`, and adds the line to the totals. The line's last step must be the last settled step.
        The loss and phase times are means over the ranks; rates count the windows and tokens of all ranks.
        """
        step, end, intervals, mine_counts = self._line
        mine = [self._loss, *mine_counts.tolist(), *self._seconds_per_phase(intervals)]
        joules = self.joules()
        # Raises if Horovod elastic loses a rank, so the sums must not change before this.
        table = self._of_ranks([*mine, joules])
        seconds = self._restored_s + seconds_between(self._since, end)
        self._since, self._restored_s, self._loss = end, 0.0, 0.0
        self._counts -= mine_counts
        self._counter_j += joules
        loss, *counts = table[:, :4].sum(0).tolist()
        windows, tokens, positions = map(round, counts)
        loss /= self.world.size
        watched, self.phase_s = step - self._watched_from, table[:, 4:-1]
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
        self.energy_j += float(table[:, -1].sum())
        return {
            "loss": loss / counted if counted else math.nan,
            "windows_per_s": windows / seconds,
            "tokens_per_s": tokens / seconds,
            "padding_share": 1 - tokens / positions,
            "step_s": seconds / steps,
        } | _spread(self.phases, self.phase_s / watched)

    def so_far(self, step: int) -> dict[str, float]:
        """Return loss and windows_per_s as `read` would if the line ended now, after step `step`. A collective."""
        loss, windows = self._of_ranks(self.since_last_log()[:2]).sum(0).tolist()
        counted = step - self.last_step - (self.skipped_steps - self._skipped_before)
        loss = loss / self.world.size / counted if counted else math.nan
        return {"loss": loss, "windows_per_s": windows / self.state()["seconds"]}

    def _of_ranks(self, mine: list[float]) -> torch.Tensor:
        """Return the numbers of all ranks, [ranks, numbers]. A collective."""
        table = torch.zeros(self.world.size, len(mine), dtype=torch.float64)
        table[self.world.rank] = torch.tensor(mine, dtype=torch.float64)
        return self.world.sum(table)

    def _seconds_per_phase(self, intervals: list[Interval]) -> list[float]:
        """Sum the intervals per phase, in the order of `phases`. Waits until the device reaches the last one's end."""
        seconds = dict.fromkeys(PHASES, 0.0)
        for phase, start, end in intervals:
            seconds[phase] += seconds_between(start, end)
        if "exposed_comm" not in self.phases:
            seconds["compute"] += seconds.pop("exposed_comm")
        return list(seconds.values())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager: exclude the time of the block. Use it right after `read`."""
        yield
        self._start(self.last_step)

    def joules(self) -> float:
        """Return the energy of this rank's GPUs since the last line; NaN if a GPU does not count it."""
        return energy_j(self.world.gpus) - self._counter_j

    def state(self, joules: float = math.nan) -> dict[str, float]:
        """Return the totals up to the last line, equal on all ranks, and the seconds since. Waits for the device.

        `joules`: sum of the ranks' `joules`. If it is unknown, so is the energy of the whole training.
        """
        totals = {name: getattr(self, name) for name in _TOTALS}
        totals |= {"skipped_steps": self.skipped_steps, "skipped_before": self._skipped_before}
        energy = self.energy_j + joules
        totals |= {} if math.isnan(energy) else {"energy_j": energy}
        return totals | {"seconds": self._restored_s + seconds_between(self._since, self._stopwatch.now())}

    def since_last_log(self) -> list[float]:
        """Return this rank's sums since the last line: loss, windows, tokens, positions. Waits for the device."""
        self.settle()
        return [self._loss, *self._counts.tolist()]

    def restore(self, state: dict[str, float], since_last_log: list[float], step: int) -> None:
        """Restore the results of the methods `state` and `since_last_log` that were saved after step `step`.

        Phase times of earlier steps are lost.
        """
        for name in _TOTALS:
            setattr(self, name, state[name])
        self.skipped_steps, self._skipped_before = int(state["skipped_steps"]), int(state["skipped_before"])
        self.energy_j = state.get("energy_j", math.nan)
        self._loss, *counts = since_last_log
        self._counts[:] = counts
        self._start(step)
        self._restored_s = state["seconds"]

    def results(self) -> dict[str, float]:
        """Return the training's totals by run_qa's names. Samples are windows; train_runtime excludes evaluations."""
        return {
            "train_runtime": self.train_s,
            "train_samples": self.windows,
            "train_samples_per_second": self.windows / self.train_s,
            "train_steps_per_second": self.last_step / self.train_s,
            "train_tokens_per_second": self.tokens / self.train_s,
            "train_loss": self.loss_sum / max(1, self.last_step - self.skipped_steps),
            "skipped_steps": self.skipped_steps,
        } | ({} if math.isnan(self.energy_j) else {"energy_wh": self.energy_j / 3600})


def _spread(phases: Sequence[str], seconds: torch.Tensor) -> dict[str, float]:
    """Return each phase's mean time, share of the step and, if there are several ranks, minimum and maximum.

    `seconds`: mean time per step, [ranks, phases].
    """
    row: dict[str, float] = {}
    whole = float(seconds.mean(0).sum())
    for phase, column in zip(phases, seconds.T, strict=True):
        mean = float(column.mean())
        row[f"{phase}_s"], row[f"{phase}_share"] = mean, mean / whole
        if len(column) > 1:
            row[f"{phase}_min_s"], row[f"{phase}_max_s"] = float(column.min()), float(column.max())
    return row
