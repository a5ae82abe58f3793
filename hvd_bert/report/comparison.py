"""Which runs may be compared, and what the comparison gives: tables of strong and of weak scaling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_bert.errors import UserError
from hvd_bert.report.comparability import STRONG, WEAK, Group, Tolerance, differences, losses_differ
from hvd_bert.runs.run import LeftOut, Run

STRATEGIES = ("none", "horovod", "ddp", "fsdp", "deepspeed", "dp")


# Of a row's losses, where no other row has the same batch.
UNCHECKED = ""


@dataclass(frozen=True)
class Line:
    """A group in a table. Without a speed-up `reason` says why; `checked`: against whose losses it was held."""

    group: Group
    speedup: float | None
    speedup_min: float | None
    speedup_max: float | None
    efficiency: float | None
    reason: str
    checked: str


@dataclass(frozen=True)
class Table:
    """Groups beside their baseline, all of one global batch (`kind` strong) or of one batch per device (weak)."""

    kind: str
    size: float
    baseline: Group
    lines: tuple[Line, ...]

    @property
    def scales(self) -> bool:
        """Whether there is more than one number of devices."""
        return len({line.group.one.devices for line in self.lines}) > 1

    @property
    def title(self) -> str:
        """Which scaling, and what is fixed."""
        if self.kind == WEAK or self.scales:
            return title_of(self.kind, self.size)
        devices = self.baseline.one.devices
        return f"Side by side on {devices} device{'s' * (devices > 1)}: global batch {self.size:g}"

    @property
    def slug(self) -> str:
        """For file names."""
        return f"{self.kind}_{self.size:g}"


def title_of(kind: str, size: float) -> str:
    """Of scaling with `size` windows fixed: those of the global batch (`kind` strong), or of a device (weak)."""
    if kind == WEAK:
        return f"Weak scaling: {size:g} window{'s' * (size != 1)} a step per device"
    return f"Strong scaling: global batch {size:g}"


def parse_baseline(text: str) -> tuple[str, int]:
    """STRATEGY:RANKS. Raises UserError."""
    strategy, _, ranks = text.partition(":")
    if not strategy or not ranks.isdigit():
        raise UserError(f"--baseline {text}: give STRATEGY:RANKS, none:1 or horovod:2 for example.")
    return strategy, int(ranks)


def same_hardware(runs: Sequence[Run]) -> tuple[list[Run], list[LeftOut]]:
    """The runs on the hardware that most of them ran on, and the others."""
    commonest = Counter(run.device_name for run in runs).most_common(1)
    kept = [run for run in runs if run.device_name == commonest[0][0]]
    left = [
        LeftOut(run.name, f"ran on {run.device_name}, and most on {commonest[0][0]}: report it by itself")
        for run in runs
        if run.device_name != commonest[0][0]
    ]
    return kept, left


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Repeats together, in the order in which tables show them."""
    members: dict[object, list[Run]] = {}
    for run in runs:
        key = (
            *(run.strategy, run.nodes, run.ranks, run.devices, run.global_batch, run.steps, run.windows),
            *(run.learning_rate, run.threads, frozenset(run.work.items()), frozenset(run.variant.items())),
        )
        members.setdefault(key, []).append(run)
    groups = [Group(tuple(held), _label(held[0], runs)) for held in members.values()]
    return sorted(groups, key=_order)


def _order(group: Group) -> tuple[object, ...]:
    run = group.one
    place = STRATEGIES.index(run.strategy) if run.strategy in STRATEGIES else len(STRATEGIES)
    return run.devices, place, run.strategy, run.nodes, group.label, run.name


def _label(run: Run, runs: Sequence[Run]) -> str:
    """The strategy, with what sets the run apart from others of the same strategy."""
    peers = [peer for peer in runs if peer.strategy == run.strategy and peer.ranks > 1] if run.ranks > 1 else []
    differing = [name for name in run.variant if len({peer.variant.get(name) for peer in peers}) > 1]
    said = [f"{name.removeprefix('--')} {run.variant[name]}" for name in differing]
    return f"{run.strategy} ({', '.join(said)})" if said else run.strategy


def tables(groups: Sequence[Group], baseline: tuple[str, int] | None, tolerance: Tolerance) -> list[Table]:
    """All tables that the groups make: first of strong scaling, then of weak, then what is left side by side."""
    made = []
    for kind, size_of in ((STRONG, _global_batch), (WEAK, _per_device)):
        for size in sorted({size_of(group) for group in groups}):
            members = [group for group in groups if size_of(group) == size]
            made += _tables_of(kind, size, members, baseline, tolerance)
    shown = {id(line.group) for table in made for line in table.lines if table.scales}
    return [
        table
        for table in made
        if table.scales or (table.kind == STRONG and any(id(line.group) not in shown for line in table.lines))
    ]


def _global_batch(group: Group) -> float:
    return group.one.global_batch


def _per_device(group: Group) -> float:
    return group.windows_per_device


def _tables_of(
    kind: str, size: float, members: list[Group], chosen: tuple[str, int] | None, tolerance: Tolerance
) -> list[Table]:
    """One table for each work that several of `members` did; those that did another join the first, without speed-up.

    Where no two did the same work there is one table of them all.
    """
    comparable: list[list[Group]] = []
    for group in members:
        home = next((held for held in comparable if not differences(held[0], group, kind)), None)
        if home is None:
            comparable.append([group])
        else:
            home.append(group)
    several = [held for held in comparable if len(held) > 1]
    alone = [held[0] for held in comparable if len(held) == 1]
    found = []
    for number, same in enumerate(several or [alone]):
        held = sorted([*same, *alone], key=_order) if several and number == 0 else same
        base = baseline_of(same, chosen) or baseline_of(held, chosen)
        if base is not None and len(held) > 1:
            found.append(Table(kind, size, base, tuple(_line(base, group, held, kind, tolerance) for group in held)))
    return found


def baseline_of(groups: Sequence[Group], chosen: tuple[str, int] | None) -> Group | None:
    """The one asked for, None if it is not there; else strategy none; else the smallest world of Horovod; else the
    smallest. `groups` in the order of `grouped`."""
    if chosen:
        return next((group for group in groups if (group.one.strategy, group.one.ranks) == chosen), None)
    for strategy in ("none", "horovod"):
        found = [group for group in groups if group.one.strategy == strategy]
        if found:
            return found[0]
    return groups[0] if groups else None


def _line(base: Group, group: Group, table: Sequence[Group], kind: str, tolerance: Tolerance) -> Line:
    apart = differences(base, group, kind)
    checked = reason = ""
    if apart:
        reason = "the work differs: " + "; ".join(apart)
    elif group is not base and losses_differ(base, base, tolerance):
        reason = "the baseline's own repeats do not agree"
    else:
        reference, checked = _reference(base, group, table, kind)
        reason = losses_differ(reference, group, tolerance)
    if reason:
        return Line(group, None, None, None, None, reason, checked)
    speedup = group.windows_per_s / base.windows_per_s
    minimum, maximum = (speed / base.windows_per_s for speed in group.spread())
    efficiency = speedup / (group.one.devices / base.one.devices)
    return Line(group, speedup, minimum, maximum, efficiency, "", checked)


def _reference(base: Group, group: Group, table: Sequence[Group], kind: str) -> tuple[Group, str]:
    """Whose losses must be `group`'s, and a word for it: the baseline's or, where the batch grows, those of as many
    devices. Where there are none its repeats are held against each other."""
    peers = [peer for peer in table if peer.one.global_batch == group.one.global_batch]
    peers = [peer for peer in peers if not differences(base, peer, kind)]
    reference = base if base in peers else baseline_of(peers, None) or group
    if reference is not group:
        return reference, reference.name
    return group, "baseline" if group is base else "reference" if len(peers) > 1 else UNCHECKED
