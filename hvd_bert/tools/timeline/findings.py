"""Compute a timeline's figures (phases, messages by size, steps, delays of ranks) and derive advice."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np

from hvd_bert.errors import UserError
from hvd_bert.tools.rendering import byte_size, percent, seconds
from hvd_bert.tools.timeline.events import NONE, Timeline
from hvd_bert.tools.timeline.operations import (
    Message,
    Negotiation,
    Operation,
    Step,
    find_messages,
    find_operations,
    find_steps,
    span_kind,
)

# Kind of a phase -> its meaning, in the order in which a message goes through the phases.
KINDS = {
    "negotiation": "negotiation: until all ranks are ready",
    "wait": "waiting for the device's data",
    "queue": "queue: NCCL is busy with another message",
    "copy": "copies",
    "collective": "on the wire",
    "set-up": "set-up",
}
FULL = 0.5  # minimum number of tensors in a training step, as a share of the median
LATE_US = 2000  # twice Horovod's cycle time: ranks with a smaller lag may not be late
SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)  # bytes: upper limits of the message size classes
BIG = 1 << 20  # bytes: smaller messages are mostly latency and do not count for the bandwidth
FAST = 0.05  # fastest share of the big messages, which computation and late ranks are assumed not to delay
# Thresholds of the advice:
WAIT_SHARE = 0.05  # share of the step spent waiting for the last rank
SAME_RANK = 0.6  # share of the steps in which a straggler is last
ENOUGH_STEPS = 10  # minimum number of steps with named ranks, for finding a straggler
EXPOSED_SHARE = 0.10  # share of the step that is exposed communication
SMALL_MESSAGE = 1 << 20  # bytes: in smaller messages, latency matters more than bandwidth
MANY_MESSAGES = 8  # per step
NO_CACHE = "HOROVOD_CACHE_CAPACITY=0"


def quantile(values: Sequence[float], part: float = 0.5) -> float:
    """Compute a quantile, by default the median; NaN without values."""
    return float(np.quantile(values, part)) if values else math.nan


class Phase:
    """A phase of messages or, for negotiations, of tensors. `count`: number of messages or tensors.

    `total_s`: time with at least one of them in the phase. `share`: `total_s` as a share of the recorded time.
    """

    def __init__(self, name: str, spans: list[tuple[int, int]], covered_us: int) -> None:
        total = counted = 0
        for start, end in sorted(spans):
            total += max(0, end - max(start, counted))
            counted = max(counted, end)
        took = [max(0, end - start) * 1e-6 for start, end in spans]
        self.name, self.kind, self.count = name, span_kind(name), len(spans)
        self.total_s, self.share = total * 1e-6, total / max(1, covered_us)
        self.median_s, self.p99_s = quantile(took), quantile(took, 0.99)


def find_phases(negotiations: list[Negotiation], messages: list[Message], covered_us: int) -> list[Phase]:
    """Compute the phases, in the order of KINDS; within a kind, by decreasing time."""
    spans = defaultdict(list)
    for row in negotiations:
        spans[row.name].append((row.start, row.end))
    for message in messages:
        for name, times in message.activities.items():
            spans[name].append(times)
    phases = [Phase(name, times, covered_us) for name, times in spans.items()]
    return sorted(phases, key=lambda phase: ([*KINDS].index(phase.kind), -phase.total_s))


class SizeClass:
    """Allreduces of a size class. `up_to`: its upper limit in bytes (None: no limit).

    `bytes_per_s`: bytes of all messages, divided by the time of their collectives.
    """

    def __init__(self, up_to: int | None, messages: list[Message]) -> None:
        self.up_to, self.messages = up_to, len(messages)
        self.tensors = sum(message.tensors for message in messages)
        self.size = sum(message.size for message in messages)
        self.median_s = quantile([message.received - message.sent for message in messages]) * 1e-6
        self.bytes_per_s = bandwidth(messages)


def size_limit(message: Message) -> int | None:
    """Return the upper limit of a message's size class in bytes; None for the class without a limit."""
    return next((limit for limit in SIZES if message.size <= limit), None)


def bandwidth(messages: list[Message]) -> float:
    """Compute the bandwidth of messages, in bytes per second of their collectives; NaN without messages."""
    took = sum(message.received - message.sent for message in messages)
    return sum(message.size for message in messages) / max(1, took) * 1e6 if messages else math.nan


class RankRow:
    """The delays of a rank: how often and how long other ranks waited for it.

    `last`: number of negotiations in which the rank was last by more than 2 ms. `share`: their share of all
    negotiations that name ranks. `steps`: number of steps, out of `of_steps`, in which the rank was last by more than
    2 ms. `waited_s`: total time that the first rank waited for this rank in these steps.
    """

    def __init__(self, rank: int, tensors: list[Negotiation], steps: list[Negotiation]) -> None:
        """`tensors`: all negotiations that name ranks. `steps`: `Step.latest` of each step that has it."""

        def late(rows: list[Negotiation]) -> list[float]:
            return [row.lag * 1e-6 for row in rows if row.last_rank == rank and row.lag > LATE_US]

        lags, step_lags = late(tensors), late(steps)
        self.rank, self.last, self.share = rank, len(lags), len(lags) / max(1, len(tensors))
        self.median_s, self.p99_s = quantile(lags), quantile(lags, 0.99)
        self.steps, self.of_steps = len(step_lags), len(steps)
        self.step_median_s, self.waited_s = quantile(step_lags), float(np.sum(step_lags))


class StepFigures:
    """Figures of the full steps. Times are medians unless named p99, and shares are relative to the step time.

    `exposed_least` and `exposed_most`: bounds of exposed communication. `hidden_share`: share of the communication
    that is certainly hidden.
    """

    def __init__(self, steps: list[Step], took: list[int]) -> None:
        """`took`: the known step times in us."""
        busy, waits = [step.busy for step in steps], [step.wait for step in steps]
        least, most = [step.exposed_min for step in steps], [step.exposed_max for step in steps]
        step_us = quantile(took)
        self.steps = len(steps)
        self.step_s, self.p99_s = step_us * 1e-6, quantile(took, 0.99) * 1e-6
        self.busy_s = quantile(busy) * 1e-6
        self.exposed_least_s, self.exposed_most_s = quantile(least) * 1e-6, quantile(most) * 1e-6
        self.hidden_share = 1 - sum(most) / max(sum(busy), 1)
        self.exposed_least_share, self.exposed_most_share = quantile(least) / step_us, quantile(most) / step_us
        self.wait_s, self.wait_p99_s = quantile(waits) * 1e-6, quantile(waits, 0.99) * 1e-6
        self.wait_share = quantile(waits) / step_us
        self.messages = quantile([step.messages for step in steps])
        self.size = quantile([step.size for step in steps])


def full_steps(steps: list[Step]) -> list[Step]:
    """Return the steps with the usual number of tensors, except the first step, which includes set-up.

    Empty if fewer than two steps remain.
    """
    usual = quantile([step.tensors for step in steps])
    full = [step for step in steps[1:] if step.tensors >= FULL * usual]
    return full if len(full) > 1 else []


def read(path: Path, ranks: int | None = None) -> Findings:
    """Analyze a timeline. `ranks`: number of ranks, for a file that does not name them. Raises UserError."""
    timeline = Timeline(path)
    negotiations, operations = find_operations(timeline.events())
    if not negotiations:
        names = ", ".join([*timeline.names][:3])
        reason = f"its events are {names}" if names else "no tensor was sent while it was written"
        raise UserError(f"{path} has none of Horovod's operations: {reason}.")
    return Findings(timeline, negotiations, operations, ranks)


class Findings:
    """All findings in a timeline. `ranks`: number of ranks, None if unknown.

    `bytes_per_s`: bandwidth of messages above 1 MiB, or of all messages if those carry less than half of the bytes.
    `wire_bytes_per_s`: bandwidth of the bytes that each rank sends in a ring. `fast_bytes_per_s`: bandwidth that the
    fastest 5 % of messages above 1 MiB reach.
    """

    def __init__(
        self, timeline: Timeline, begun: list[Negotiation], operations: list[Operation], ranks: int | None
    ) -> None:
        """`begun`: all negotiations, including unfinished ones. `ranks`: see `read`."""
        messages = find_messages(operations)
        negotiations = [row for row in begun if row.end != NONE]
        naming = [row for row in negotiations if row.ticks]
        steps = full_steps(find_steps(messages))
        took = [after.start - step.start for step, after in pairwise(steps) if after.number == step.number + 1]
        sent = [row for row in messages if row.name == "ALLREDUCE" and row.collective and row.received >= row.sent]
        sized = sorted((row for row in sent if row.size != NONE), key=lambda row: row.size)
        big = [row for row in sized if row.size > BIG]
        mostly_big = 2 * sum(row.size for row in big) >= sum(row.size for row in sized)

        self.path, self.size = str(timeline.path), timeline.path.stat().st_size
        self.events, self.cut_short = timeline.count, timeline.cut_short
        self.unfinished = sum(span.end == NONE for span in [*begun, *operations])
        self.covered_s = (timeline.last_us - timeline.first_us) * 1e-6
        self.ranks = max(timeline.ranks) + 1 if naming or len(timeline.ranks) > 1 else ranks
        self.negotiations, self.naming_ranks = len(negotiations), len(naming)
        self.phases = find_phases(negotiations, messages, timeline.last_us - timeline.first_us)
        self.sizes = [SizeClass(limit, list(rows)) for limit, rows in groupby(sized, size_limit)]
        self.bytes_per_s = bandwidth(big if mostly_big else sized)
        self.wire_bytes_per_s = self.bytes_per_s * 2 * (self.ranks - 1) / self.ranks if self.ranks else math.nan
        self.fast_bytes_per_s = quantile([bandwidth([message]) for message in big], 1 - FAST)
        self.step = StepFigures(steps, took) if quantile(took) > 0 else None
        late = [step.latest for step in steps if step.latest]
        self.rank_rows = [RankRow(rank, naming, late) for rank in sorted(timeline.ranks)]
        self.advice = advise(self)


def advise(findings: Findings) -> list[str]:
    """Return up to two lines of advice on figures above their thresholds (listed in docs/guides/profiling.md).

    The most expensive problem comes first. Without a problem, returns a line that says so.
    """
    step = findings.step
    if step is None:
        return ["No training steps found in this file (no tensor was allreduced in 3 steps). Record more steps."]
    if findings.ranks == 1:
        return ["One rank sends nothing. Record a run of several ranks for advice on communication."]
    found = [advice for advice in (_waiting(findings, step), _exposed(step)) if advice]
    if found:
        return [line for _, line in sorted(found, reverse=True)]
    return [
        f"Communication does not slow this run down: {percent(step.exposed_most_share)} of a step is exposed, "
        f"{percent(step.wait_share)} is waiting for the last rank. To go faster, speed up the computation."
    ]


def _waiting(findings: Findings, step: StepFigures) -> tuple[float, str] | None:
    """Advise on waiting for the last rank. Returns the lost share of the step and the text; None if little is lost."""
    rows, named = findings.rank_rows, findings.rank_rows[0].of_steps if findings.rank_rows else 0
    known = 2 * named >= step.steps
    if known and named >= ENOUGH_STEPS:
        worst = max(rows, key=lambda row: row.waited_s)
        cost = worst.step_median_s * worst.steps / named / step.step_s if worst.steps else 0.0
        if worst.steps >= SAME_RANK * named and cost >= WAIT_SHARE:
            return cost, (
                f"Rank {worst.rank} is a straggler: it is the last in {worst.steps} of {named} steps, by "
                f"{seconds(worst.step_median_s)} (median), {percent(cost)} of a step. Check its device, its data "
                "and other programs on its host (hvd-bert doctor under the same launcher)."
            )
        hint = (
            f"The last rank differs by step (rank {worst.rank} in {worst.steps} of {named} steps). Causes are uneven "
            "work and shared hosts."
        )
    elif known:
        hint = f"{step.steps} steps are too few to find a straggler: record {ENOUGH_STEPS + 1} or more."
    else:
        hint = (
            f"This file names ranks in only {named} of {step.steps} steps: to find the straggler, record with "
            f"{NO_CACHE} (for profiling only)."
        )
    if step.wait_share < WAIT_SHARE:
        return None
    waits = f"The first rank waits {seconds(step.wait_s)} per step ({percent(step.wait_share)}) for the last."
    return step.wait_share, f"{waits} {hint}"


def _exposed(step: StepFigures) -> tuple[float, str] | None:
    if step.exposed_most_share < EXPOSED_SHARE:
        return None
    per_message = step.size / max(step.messages, 1)
    sent = f"{byte_size(step.size)} per step in {step.messages:.0f} messages"
    if per_message >= SMALL_MESSAGE:
        hint = (
            f"{sent}: bandwidth. --fp16_allreduce or --bf16_allreduce halves the bytes,"
            " --gradient_accumulation_steps sends them less often. Check that the fastest network is used."
        )
    elif step.messages > MANY_MESSAGES:
        hint = (
            f"{step.messages:.0f} messages of {byte_size(per_message)} each: latency. Fuse more with "
            "HOROVOD_CYCLE_TIME=5, and do not set HOROVOD_FUSION_THRESHOLD below its default of 128 MiB."
        )
    else:
        hint = (
            f"{sent}: latency or ranks without a free core, not bandwidth. Use fewer, larger steps (a larger batch, "
            "--gradient_accumulation_steps) or one core more per rank."
        )
    return step.exposed_most_share, f"Exposed communication takes {exposed(step)} per step. {hint}"


def exposed(step: StepFigures) -> str:
    """Format the time and share of exposed communication per step; as ranges if the bounds differ by 5 % or more."""
    low, high = step.exposed_least_s, step.exposed_most_s
    if high - low < 0.05 * high:
        return f"{seconds(high)} ({percent(step.exposed_most_share)})"
    return (
        f"{seconds(low)} to {seconds(high)} ({percent(step.exposed_least_share)} to {percent(step.exposed_most_share)})"
    )
