"""Compute a timeline's figures: phases, messages, tensors, steps, ranks. Memory is bounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from hvd_bert.errors import UserError
from hvd_bert.timeline.byte_parser import Array, Names
from hvd_bert.timeline.figures import Findings, Phase, RankRow, SizeClass, SlowTensor, Spread, StepFigures
from hvd_bert.timeline.reader import CYCLE, Reader
from hvd_bert.timeline.rows import NONE, Batch, Messages
from hvd_bert.timeline.spans import COLLECTIVE, NEGOTIATION, Spans, kind_of
from hvd_bert.timeline.steps import FULL, Steps, StepTable

LATE_US = 2000  # twice Horovod's cycle: below that, ranks may have been seen in the same cycle
SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)  # bytes: upper limits of the classes of messages
SLOWEST = 10
UNNAMED = "(without a name)"
BIG = 1 << 20  # bytes: smaller messages are mostly latency and do not count for the bandwidth
FAST = 0.05  # share of the big messages that were delayed neither by computation nor by a late rank


class _Phases:
    """Times of each kind of span."""

    def __init__(self) -> None:
        self.spreads: dict[int, Spread] = {}
        self.covered: dict[int, float] = {}
        self.until: dict[int, int] = {}

    def add(self, code: Array, start: Array, end: Array) -> None:
        for one in np.unique(code).tolist():
            rows = np.flatnonzero(code == one)
            begin, over = start[rows], end[rows]
            self.spreads.setdefault(one, Spread()).add(over - begin)
            sort = np.argsort(begin, kind="stable")
            begin, over = begin[sort], over[sort]
            reached = np.maximum.accumulate(np.append(self.until.get(one, 0), over))
            self.covered[one] = self.covered.get(one, 0) + int(
                np.maximum(0, over - np.maximum(begin, reached[:-1])).sum()
            )
            self.until[one] = int(reached[-1])

    def rows(self, names: Sequence[str], covered_us: int) -> list[Phase]:
        kinds = {NEGOTIATION: "negotiation", COLLECTIVE: "collective"}
        found = [
            Phase(
                names[code], kinds.get(kind_of(names[code]), _activity_kind(names[code])), spread.count,
                self.covered[code] * 1e-6, self.covered[code] / max(1, covered_us), spread.quantile(0.5) * 1e-6,
                spread.quantile(0.99) * 1e-6,
            )
            for code, spread in self.spreads.items()
        ]  # fmt: skip
        order = ["negotiation", "wait", "queue", "copy", "collective", "set-up"]
        return sorted(found, key=lambda phase: (order.index(phase.kind), -phase.total_s))


def _activity_kind(name: str) -> str:
    if name.startswith("WAIT"):
        return "wait"
    if name == "QUEUE":
        return "queue"
    return "copy" if name.startswith(("MEMCPY", "COPY")) else "set-up"


class _Tensors:
    """Sums per tensor. All tensors without a name count as one."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.slots: dict[str, int] = {UNNAMED: 0}
        self.slot_of = np.full(1024, NONE)
        self.sums = np.zeros((4, 1024))  # count, negotiation, operation, size
        self.longest = np.zeros(1024, np.int64)

    def add(self, batch: Batch) -> None:
        rows = batch.operations
        if not len(rows.pid):
            return
        slots = self._slots(rows.pid)
        known = rows.negotiation != NONE
        waited = np.zeros(len(slots), np.int64)
        waited[known] = (batch.negotiations.end - batch.negotiations.start)[rows.negotiation[known]]
        took = rows.end - rows.start
        width = self.sums.shape[1]
        self.sums[0] += np.bincount(slots, minlength=width)
        self.sums[1] += np.bincount(slots, waited, minlength=width)
        self.sums[2] += np.bincount(slots, took, minlength=width)
        self.sums[3][slots] = rows.size
        np.maximum.at(self.longest, slots, waited + took)

    def _slots(self, pid: Array) -> Array:
        top = int(pid.max())
        if top >= len(self.slot_of):
            self.slot_of = np.append(self.slot_of, np.full(top, NONE))
        for one in np.unique(pid[self.slot_of[pid] == NONE]).tolist():
            name = self.names.tensors.get(one, f"(tensor {one})")
            name = UNNAMED if ".noname" in name else name
            if name == UNNAMED:
                self.names.tensors.pop(one, None)
            self.slot_of[one] = self.slots.setdefault(name, len(self.slots))
        if len(self.slots) > self.sums.shape[1]:
            self.sums = np.concatenate((self.sums, np.zeros((4, len(self.slots)))), axis=1)
            self.longest = np.append(self.longest, np.zeros(len(self.slots), np.int64))
        return self.slot_of[pid]

    def slowest(self) -> list[SlowTensor]:
        """The slowest tensors by mean, except those sent less than half as often as others, such as at the start."""
        count = np.maximum(self.sums[0], 1)
        per = (self.sums[1] + self.sums[2]) / count
        names = {slot: name for name, slot in self.slots.items()}
        often = 2 * self.sums[0] >= self.sums[0][1:].max(initial=1)
        order = [slot for slot in np.argsort(-per).tolist() if often[slot]][:SLOWEST]
        return [
            SlowTensor(
                names[slot], int(self.sums[0][slot]), size if (size := int(self.sums[3][slot])) >= 0 and slot else None,
                float(self.sums[1][slot] / count[slot]) * 1e-6, float(self.sums[2][slot] / count[slot]) * 1e-6,
                int(self.longest[slot]) * 1e-6,
            )
            for slot in order
        ]  # fmt: skip


class _Sizes:
    """Allreduces by the size of their message."""

    def __init__(self) -> None:
        self.times = [Spread() for _ in range(len(SIZES) + 1)]
        self.tensors = np.zeros(len(SIZES) + 1, np.int64)
        self.bytes = np.zeros(len(SIZES) + 1, np.int64)
        self.spread = Spread()
        self.big_speeds = Spread()  # bytes per ms of each message above BIG

    def add(self, messages: Messages, allreduce: int) -> None:
        rows = (messages.code == allreduce) & (messages.size >= 0) & (messages.collective != NONE)
        rows = np.flatnonzero(rows & (messages.received >= messages.sent))
        size, took = messages.size[rows], (messages.received - messages.sent)[rows]
        which = np.searchsorted(SIZES, size, side="left")
        self.spread.add(size)
        big = size > BIG
        self.big_speeds.add(size[big] * 1000 // np.maximum(took[big], 1))
        for number, times in enumerate(self.times):
            own = which == number
            times.add(took[own])
            self.tensors[number] += int(messages.tensors[rows][own].sum())
            self.bytes[number] += int(size[own].sum())

    def rows(self) -> list[SizeClass]:
        limits = [*SIZES, None]
        return [
            SizeClass(
                limits[number], times.count, int(self.tensors[number]), int(self.bytes[number]),
                times.quantile(0.5) * 1e-6, int(self.bytes[number]) / max(1, times.total) * 1e6,
            )
            for number, times in enumerate(self.times)
            if times.count
        ]  # fmt: skip

    def bytes_per_s(self) -> float:
        """Bandwidth of messages above 1 MiB if these carry half of all bytes, else of all messages."""
        big = SIZES.index(BIG) + 1
        start = big if self.bytes[big:].sum() * 2 >= self.bytes.sum() else 0
        took = sum(times.total for times in self.times[start:])
        return float(self.bytes[start:].sum()) / took * 1e6 if took else math.nan

    def fast_bytes_per_s(self) -> float:
        """Bandwidth of the fastest 5 % of messages above 1 MiB; NaN if there are none."""
        return self.big_speeds.quantile(1 - FAST) * 1000


class _Ranks:
    """How often, and by how much, each rank is last."""

    def __init__(self) -> None:
        self.lags: dict[int, Spread] = {}
        self.negotiations = self.named = 0

    def add(self, batch: Batch) -> None:
        rows = batch.negotiations
        named = rows.ticks > 1
        self.negotiations += len(named)
        self.named += int(named.sum())
        late = named & (rows.lag > LATE_US)
        for rank in np.unique(rows.last_rank[late]).tolist():
            self.lags.setdefault(rank, Spread()).add(rows.lag[late & (rows.last_rank == rank)])

    def rows(self, ranks: set[int], steps: StepTable | None) -> list[RankRow]:
        found = []
        for rank in sorted(ranks):
            lags = self.lags.get(rank, Spread())
            lag, of_steps = np.zeros(0), 0
            if steps is not None:
                of_steps = int((steps.last_rank != NONE).sum())
                lag = steps.lag[(steps.last_rank == rank) & (steps.lag > LATE_US)]
            found.append(
                RankRow(
                    rank, lags.count, lags.count / max(1, self.named), lags.quantile(0.5) * 1e-6,
                    lags.quantile(0.99) * 1e-6, len(lag), of_steps,
                    float(np.median(lag)) * 1e-6 if len(lag) else math.nan, float(lag.sum()) * 1e-6,
                )
            )  # fmt: skip
        return found


def analyse(
    path: Path,
    ranks: int | None,
    hosts: int | None = None,
    progress: Callable[[int], object] = lambda count: None,
) -> Findings:
    """Analyze a file. `ranks`: number of ranks, if the file does not name them. Raises UserError."""
    reader = Reader(path)
    spans, steps = Spans(reader.names.spans), Steps(reader.names.spans)
    phases, tensors, sizes, by_rank = _Phases(), _Tensors(reader.names), _Sizes(), _Ranks()
    for batch in spans.batches(reader.blocks(progress)):
        phases.add(batch.negotiations.code, batch.negotiations.start, batch.negotiations.end)
        phases.add(batch.activities.code, batch.activities.start, batch.activities.end)
        tensors.add(batch)
        if "ALLREDUCE" in reader.names.spans:
            sizes.add(batch.messages, reader.names.spans.index("ALLREDUCE"))
        by_rank.add(batch)
        steps.add(batch)
    _check(reader, path)
    full = _full(steps.close())
    covered_us = reader.last_ts - (reader.first_ts or 0)
    if len(reader.names.ranks) > 1:
        ranks = max(reader.names.ranks) + 1
    if hosts and ranks and hosts > ranks:
        raise UserError(f"--hosts {hosts}: the file has only {ranks} ranks.")
    speed, fast = sizes.bytes_per_s(), sizes.fast_bytes_per_s()
    return Findings(
        path=str(path), size=path.stat().st_size, events=reader.events, cut_short=reader.cut_short,
        unfinished=spans.unfinished, covered_s=covered_us * 1e-6, ranks=ranks, hosts=hosts,
        cycles=reader.cycles, cycle_s=reader.cycle_s, negotiations=by_rank.negotiations, naming_ranks=by_rank.named,
        phases=phases.rows(reader.names.spans, covered_us), sizes=sizes.rows(),
        message_median=sizes.spread.quantile(0.5), bytes_per_s=speed,
        wire_bytes_per_s=speed * _of_a_ring(ranks) if ranks else math.nan, fast_bytes_per_s=fast,
        link_bytes_per_s=fast * _of_a_link(ranks, hosts, reader.names.spans), tensors=tensors.slowest(),
        step=_step_figures(full), rank_rows=by_rank.rows(reader.names.ranks, full), curves=full,
    )  # fmt: skip


def _of_a_ring(ends: int) -> float:
    return 2 * (ends - 1) / ends


def _of_a_link(ranks: int | None, hosts: int | None, names: Sequence[str]) -> float:
    """How often each byte of a message leaves a host: a ring spans all ranks, MPI sums inside the hosts first.

    docs/guides/profiling.md has the conditions.
    """
    if ranks is None or hosts is None or hosts == 1:
        return math.nan
    return _of_a_ring(hosts if _over_mpi(names) else ranks)


def ranks_of_a_host(findings: Findings) -> int:
    """Ranks per host, which MPI sums inside the host first. Raises UserError if this is unknown or not MPI."""
    if findings.hosts is None or findings.hosts == 1 or findings.ranks is None:
        raise UserError("--one_host needs --hosts with 2 hosts or more.")
    if not _over_mpi(phase.name for phase in findings.phases):
        raise UserError(
            "--one_host is for MPI, which sums inside the hosts first. This file was not recorded over MPI."
        )
    return findings.ranks // findings.hosts


def subtract_inside(findings: Findings, inside: Findings) -> None:
    """Subtract the time of sums inside a host from MPI's messages, which leaves the time of the link.

    `inside`: the same training on one host, with as many ranks as on each host of `findings`. Raises UserError.
    """
    each = ranks_of_a_host(findings)
    if inside.ranks != each or not _over_mpi(phase.name for phase in inside.phases):
        raise UserError(
            f"--one_host {inside.path}: must be of {each} ranks over MPI, as on each host of {findings.path}."
        )
    if math.isnan(findings.fast_bytes_per_s + inside.fast_bytes_per_s):
        raise UserError("--one_host: one of the files has no message above 1 MiB, so its bandwidth is unknown.")
    if inside.fast_bytes_per_s <= findings.fast_bytes_per_s:
        raise UserError(f"--one_host {inside.path}: its messages are no faster than those of {findings.path}.")
    findings.inside_bytes_per_s = inside.fast_bytes_per_s
    findings.link_bytes_per_s /= 1 - findings.fast_bytes_per_s / inside.fast_bytes_per_s


def _over_mpi(names: Iterable[str]) -> bool:
    return "MPI_ALLREDUCE" in names


def _check(reader: Reader, path: Path) -> None:
    own = [name for name in reader.names.spans if name != CYCLE]
    if not any(kind_of(name) == NEGOTIATION for name in own):
        reason = f"its events are {', '.join(own[:3])}" if own else "no tensor was sent while it was written"
        raise UserError(f"{path} has none of Horovod's operations: {reason}.")


def _full(steps: StepTable | None) -> StepTable | None:
    """The steps with the usual number of tensors, without the first, which includes set-up."""
    if steps is None or len(steps) < 3:
        return None
    usual = float(np.median(steps.tensors))
    rows = np.flatnonzero(steps.tensors >= FULL * usual)
    rows = rows[rows > 0]
    return StepTable(*(column[rows] for column in vars(steps).values())) if len(rows) > 1 else None


def _step_figures(steps: StepTable | None) -> StepFigures | None:
    if steps is None:
        return None
    took = np.diff(steps.start)
    step_us = float(np.median(took))
    if step_us <= 0:
        return None
    middle = {name: float(np.median(column)) for name, column in vars(steps).items()}
    busy = max(float(steps.busy.sum()), 1.0)
    return StepFigures(
        steps=len(steps), step_s=step_us * 1e-6, p99_s=float(np.quantile(took, 0.99)) * 1e-6,
        busy_s=middle["busy"] * 1e-6,
        exposed_least_s=middle["exposed_min"] * 1e-6, exposed_most_s=middle["exposed_max"] * 1e-6,
        exposed_p99_s=float(np.quantile(steps.exposed_max, 0.99)) * 1e-6,
        hidden_share=1 - float(steps.exposed_max.sum()) / busy,
        exposed_least_share=middle["exposed_min"] / step_us, exposed_most_share=middle["exposed_max"] / step_us,
        wait_s=middle["wait"] * 1e-6, wait_p99_s=float(np.quantile(steps.wait, 0.99)) * 1e-6,
        wait_share=middle["wait"] / step_us, messages=middle["messages"], size=middle["size"],
    )  # fmt: skip
