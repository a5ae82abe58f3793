"""Where a step's time goes, as every rank says it, held to a clock of the test's own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from ranks import Ranks, call, check
from training_checks import GLOBAL_BATCH, sample

from hvd_bert.training.api import main as train
from hvd_bert.training.meter import Meter, Stopwatch

STEPS = 7
TOLERANCE = 0.02


@dataclass
class Clock:
    """Notes a meter's looks, and bounds of the time between them: the meter looks at its clock between two of ours.

    So however long this process has to wait for a core in between, what is asserted holds.
    """

    since: tuple[float, float] = (0.0, 0.0)  # its last reading lies between
    taken: float = 0.0
    lines: list[tuple[float, float, float, float, dict[str, float]]] = field(default_factory=list)

    @contextmanager
    def watching(self, rank: int) -> Iterator[None]:
        read, paused, take = Meter.read, Meter.paused, Stopwatch.take

        def noting_take(stopwatch: Stopwatch) -> dict[str, float]:
            self.taken = time.perf_counter()
            return take(stopwatch)

        def noting_read(meter: Meter, step: int) -> dict[str, float]:
            entered = time.perf_counter()
            row = read(meter, step)
            earliest, latest = self.since
            told = float(meter.phase_s[rank].sum())
            self.lines.append((entered - latest, self.taken - earliest, told, meter.sums["seconds"], row))
            self.since = entered, self.taken
            return row

        @contextmanager
        def noting_pause(meter: Meter) -> Iterator[None]:
            with paused(meter):
                yield
                left = time.perf_counter()
            self.since = left, time.perf_counter()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Meter, "read", noting_read)
            patch.setattr(Meter, "paused", noting_pause)
            patch.setattr(Stopwatch, "take", noting_take)
            yield


@check
def phases_add_up_to_the_time_of_the_step(ranks: Ranks) -> None:
    """With several passes a step, scorings and checkpoints in between."""
    world, clock = ranks.world, Clock()
    batch = ["--per_device_train_batch_size", GLOBAL_BATCH // world.size // 2, "--gradient_accumulation_steps", 2]
    due = ["--max_steps", STEPS, "--logging_steps", 3, "--save_steps", 3, "--eval_strategy", "steps", "--eval_steps", 2]
    with clock.watching(world.rank):
        call(train, world, sample(*batch, *due, "--max_eval_samples", 5, "--output_dir", ranks.folder / "clocked"))
    steps = [1, 2, 3, 4, 6, 7]
    assert len(clock.lines) == len(steps)
    for number, (low, high, told, seconds, row) in enumerate(clock.lines[1:], start=1):  # before 1 all is made ready
        assert (1 - TOLERANCE) * low <= told <= (1 + TOLERANCE) * high, (steps[number], low, told, high)
        assert (1 - TOLERANCE) * low <= seconds <= (1 + TOLERANCE) * high, (steps[number], low, seconds, high)
        phases = [name for name in row if name.endswith("_share") and name != "padding_share"]
        each = world.allgather(told / (steps[number] - steps[number - 1]))
        assert sum(row[name.replace("_share", "_s")] for name in phases) == pytest.approx(sum(each) / world.size)
        assert sum(row[name] for name in phases) == pytest.approx(1)
    saved = [row["checkpoint_s"] > 0 for *_, row in clock.lines]
    assert saved == [False, False, False, True, False, True]  # after the lines of steps 3 and 6
