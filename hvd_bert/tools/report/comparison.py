"""Compare groups of runs in tables of strong and weak scaling."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvd_bert.config.parser import shortened
from hvd_bert.config.strategies import STRATEGIES
from hvd_bert.errors import UserError
from hvd_bert.tools.rendering import counted
from hvd_bert.tools.report.comparability import Group, differences, losses_differ
from hvd_bert.tools.runs.finding import Excluded
from hvd_bert.tools.runs.launching import STRONG, WEAK
from hvd_bert.tools.runs.record import Record

RESAMPLES = 10_000
RANGE = 0.95
ENOUGH = 3  # minimum number of runs to judge a spread
# Minimum number of repeats per side for a range of RANGE: the extremes of 2 miss the true speed-up in 1 of 3 cases,
# of 3 in 1 of 10, of 4 in 1 of 35.
FOR_RANGE = 4
Baseline = tuple[str, int]  # strategy and number of ranks
Range = tuple[float, float]
UNCHECKED = ""  # value of `Compared.checked` if no other row has the same batch


@dataclass(frozen=True)
class Compared:
    """A row of a scaling table."""

    group: Group
    checked: str  # name of the group with which the losses were compared
    reason: str = ""  # the reason why the row has no speed-up; "" if it has one
    speedup: float | None = None
    range: Range | None = None  # of the speed-up; None if either group has a single run
    few: bool = False  # whether `range` is from the lowest to the highest repeat, for fewer than FOR_RANGE repeats
    efficiency: float | None = None
    total_speedup: float | None = None  # speed-up of whole trainings, including checkpoints and logging
    serial: float | None = None  # serial fraction by Karp and Flatt, for strong scaling


@dataclass(frozen=True)
class ScalingTable:
    """Groups that share a batch size, and their baseline.

    `size`: global batch for `kind` STRONG, batch per device for WEAK.
    """

    kind: str
    size: float
    baseline: Group
    lines: tuple[Compared, ...]

    @property
    def measured(self) -> list[Compared]:
        """The rows with a speed-up. If there are any, the baseline is among them."""
        return [line for line in self.lines if line.speedup is not None]

    @property
    def scales(self) -> bool:
        """Whether the rows have different numbers of devices."""
        return len(self.device_counts) > 1

    @property
    def device_counts(self) -> list[int]:
        """The numbers of devices, in increasing order."""
        return sorted({line.group.first.devices for line in self.lines})

    @property
    def title(self) -> str:
        """The kind of scaling and the batch that all rows share."""
        unit, devices = self.baseline.first.unit, self.baseline.first.devices
        if self.kind == WEAK:
            unit = unit.removesuffix("s") if self.size == 1 else unit
            return f"Weak scaling: {self.size:g} {unit} per device and step"
        if self.scales:
            return f"Strong scaling: global batch {self.size:g}"
        return f"Side by side on {counted(devices, 'device')}: global batch {self.size:g}"


def parse_baseline(text: str) -> Baseline:
    """Parse STRATEGY:RANKS. Raises UserError."""
    strategy, _, ranks = text.partition(":")
    if not strategy or not ranks.isdecimal() or len(ranks) > 9:
        raise UserError(f"--baseline {shortened(text)}: must be STRATEGY:RANKS, for example none:1 or horovod:2.")
    return strategy, int(ranks)


def comparable(records: Sequence[Record], by_sweeps: Mapping[Path, Excluded]) -> tuple[list[Record], list[Excluded]]:
    """Split runs into comparable runs on the most common hardware, and excluded runs.

    `by_sweeps`: folder -> name and reason of each run that `finding.sweeps` excludes.
    """
    excluded = list(dict.fromkeys(by_sweeps.values()))
    reasons = {record: record.comparable() for record in records if Path(record.name) not in by_sweeps}
    excluded += [(record.name, reason) for record, reason in reasons.items() if reason]
    devices = {record: record.results.device_name for record, reason in reasons.items() if not reason}
    most = statistics.mode(devices.values()) if devices else ""
    excluded += [
        (run.name, f"ran on {device}, most runs on {most}: report it separately")
        for run, device in devices.items()
        if device != most
    ]
    return [run for run, device in devices.items() if device == most], excluded


def grouped(runs: Sequence[Record]) -> list[Group]:
    """Group the runs that are repeats of each other. Returns the groups in the order of the tables' rows."""
    members: dict[object, list[Record]] = {}
    for run in runs:
        results = run.results
        size = (run.nodes, results.world_size, run.devices, results.threads_per_rank, results.global_batch)
        length = (results.train_steps, results.train_samples, results.learning_rate)
        work = (results.strategy, frozenset(run.work.items()), frozenset(run.variant.items()))
        members.setdefault((size, length, work), []).append(run)
    groups = [Group(tuple(repeats), _label(repeats[0], runs)) for repeats in members.values()]
    return sorted(groups, key=_order)


def _order(group: Group) -> tuple[object, ...]:
    run, strategy = group.first, group.first.results.strategy
    position = ["none", *STRATEGIES].index(strategy) if strategy in STRATEGIES else len(STRATEGIES) + 1
    return run.devices, position, strategy, run.nodes, group.label, run.name


def _label(run: Record, runs: Sequence[Record]) -> str:
    """Return the run's strategy; for several ranks, with its settings that differ between runs of this strategy."""
    strategy = run.results.strategy
    peers = [peer for peer in runs if peer.results.strategy == strategy and peer.results.world_size > 1]
    if run.results.world_size == 1:
        return strategy
    differing = [name for name in run.variant if len({peer.variant.get(name) for peer in peers}) > 1]
    settings = [f"{name.removeprefix('--')} {run.variant[name]}" for name in differing]
    return f"{strategy} ({', '.join(settings)})" if settings else strategy


def tables(groups: Sequence[Group], baseline: Baseline | None) -> list[ScalingTable]:
    """Make all tables: strong scaling, then weak scaling.

    Groups that are in no table with several numbers of devices are compared side by side.
    """
    made = []
    for kind in (STRONG, WEAK):
        by_size: dict[float, list[Group]] = {}
        for group in groups:
            size = group.first.results.global_batch / (1 if kind == STRONG else group.first.devices)
            by_size.setdefault(size, []).append(group)
        for size in sorted(by_size):
            made += _split_by_work(kind, size, by_size[size], baseline)
    scaling = {line.group for table in made for line in table.lines if table.scales}
    return [
        table
        for table in made
        if table.scales or (table.kind == STRONG and any(line.group not in scaling for line in table.lines))
    ]


def _split_by_work(kind: str, size: float, groups: Sequence[Group], chosen: Baseline | None) -> list[ScalingTable]:
    """Make a table for each set of groups with the same work. `chosen`: value of --baseline.

    Tables without a group of this strategy and number of ranks are omitted. A group whose work differs from all others
    joins the first table, without a speed-up. If the work of all groups differs, they share a table.
    """
    by_work: list[list[Group]] = []
    for group in groups:
        for members in by_work:
            if not differences(members[0], group, kind):
                members.append(group)
                break
        else:
            by_work.append([group])
    alone = [members[0] for members in by_work if len(members) == 1]
    found = []
    for number, members in enumerate([members for members in by_work if len(members) > 1] or [alone]):
        rows = [group for group in groups if group in members or (number == 0 and group in alone)]
        base = _chosen(members, chosen) or _chosen(rows, chosen) if chosen else default_baseline(members)
        if base is not None and len(rows) > 1:
            found.append(ScalingTable(kind, size, base, tuple(_line(base, group, rows, kind) for group in rows)))
    return found


def _chosen(groups: Sequence[Group], chosen: Baseline) -> Group | None:
    sizes = [(group.first.results.strategy, group.first.results.world_size) for group in groups]
    return groups[sizes.index(chosen)] if chosen in sizes else None


def default_baseline(groups: Sequence[Group]) -> Group:
    """Choose a baseline: strategy none, else Horovod's smallest world, else the smallest world.

    `groups`: in the order of `grouped`.
    """
    return min(groups, key=lambda group: {"none": 0, "horovod": 1}.get(group.first.results.strategy, 2))


def _line(base: Group, group: Group, rows: Sequence[Group], kind: str) -> Compared:
    checked, reason = _check(base, group, rows, kind)
    if reason:
        return Compared(group, checked, reason)
    speedup = group.windows_per_s / base.windows_per_s
    size = group.first.devices / base.first.devices
    ours, theirs = group.figure(_overall_speed), base.figure(_overall_speed)
    total = ours / theirs if ours and theirs else None
    serial = serial_fraction(speedup, size) if kind == STRONG and size > 1 and speedup > 1 else None
    few = min(len(base.runs), len(group.runs)) < FOR_RANGE
    return Compared(group, checked, "", speedup, speedup_range(base, group), few, speedup / size, total, serial)


def _check(base: Group, group: Group, rows: Sequence[Group], kind: str) -> tuple[str, str]:
    """Compare the work of `group` with the baseline's, and its losses with a reference's.

    Returns the name of the reference, and the reason why `group` has no speed-up ("" if it has one). The reference is
    the baseline if it has the same batch, else another group with the same batch. Without another group, the repeats of
    `group` are compared with each other.
    """
    if differing := differences(base, group, kind):
        return "", "the work differs: " + "; ".join(differing)
    if group is not base and losses_differ(base, base):
        return "", "the baseline's own repeats do not agree"
    peers = [row for row in rows if row.first.results.global_batch == group.first.results.global_batch]
    peers = [peer for peer in peers if not differences(base, peer, kind)]
    reference = base if base in peers else default_baseline(peers)
    name = reference.name
    if reference is group:
        name = "baseline" if group is base else "reference" if len(peers) > 1 else UNCHECKED
    return name, losses_differ(reference, group)


def _overall_speed(run: Record) -> float | None:
    """Compute windows per second over the whole training; None if its time is 0."""
    return run.results.train_samples / run.results.train_runtime if run.results.train_runtime > 0 else None


def serial_fraction(speedup: float, size: float) -> float:
    """Compute the serial fraction of the work by the metric of Karp and Flatt (1990).

    `size`: number of devices, relative to the baseline's.
    """
    return (1 / speedup - 1 / size) / (1 - 1 / size)


def speedup_range(base: Group, group: Group) -> Range | None:
    """Compute the range of the speed-up by a bootstrap of both groups' repeats; None if a group has a single run.

    For fewer than FOR_RANGE repeats, the range is from the lowest to the highest quotient of two repeats.
    """
    fewest = min(len(base.runs), len(group.runs))
    if fewest < FOR_RANGE:
        return (min(group.speeds) / max(base.speeds), max(group.speeds) / min(base.speeds)) if fewest > 1 else None
    random = np.random.default_rng(0)  # fixed, so that reports are reproducible
    ours, theirs = (
        np.median(random.choice(speeds, (RESAMPLES, len(speeds))), axis=1) for speeds in (group.speeds, base.speeds)
    )
    minimum, maximum = np.quantile(ours / theirs, (0.5 - RANGE / 2, 0.5 + RANGE / 2), method="inverted_cdf").tolist()
    return minimum, maximum
