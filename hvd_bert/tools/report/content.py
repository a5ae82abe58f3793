"""The report's text, tables and CSV rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import methodcaller
from typing import Any

from hvd_bert.storage.reading import GIB
from hvd_bert.tools.rendering import DASH, counted, number
from hvd_bert.tools.rendering.page import Grid
from hvd_bert.tools.report.comparability import EARLY_STEPS, EARLY_TOLERANCE, LAST_TOLERANCE, NATS, Group
from hvd_bert.tools.report.comparison import RANGE, RESAMPLES, UNCHECKED, ScalingTable
from hvd_bert.tools.runs.reading import PROCESS_TIMES, Excluded, Run

SHORT = {"exact_match": "EM", "f1": "F1"}  # names of scores in tables
SPREAD = 0.1  # of the repeats, over their median; a larger spread is a caveat


def _range(minimum: float | None, maximum: float | None, form: str) -> str:
    return DASH if minimum is None or maximum is None else f"{minimum:{form}} to {maximum:{form}}"


def _seconds(value: float | None) -> str:
    return number(value, ".1f" if value is not None and value < 1000 else ",.0f")


def speedups(table: ScalingTable) -> Grid:
    """The table of times, speed-ups and efficiencies."""
    with_devices = any(line.group.one.devices != line.group.one.ranks for line in table.lines)
    head = ["strategy", "nodes", "ranks", *(["GPUs"] if with_devices else []), "n", "time, s"]
    head += [f"{table.baseline.one.unit}/s", "min to max", "speed-up", f"{RANGE:.0%} range", "efficiency"]
    rows = []
    for line in table.lines:
        run, group = line.group.one, line.group
        name = f"{group.label}, left out" if line.reason else group.label
        cells = [name, str(run.nodes), str(run.ranks), *([str(run.devices)] if with_devices else [])]
        cells += [str(len(group.runs)), _seconds(group.median(lambda run: run.runtime_s))]
        cells += [number(group.windows_per_s, ".2f"), _range(*group.spread(), ".2f"), number(line.speedup, ".2f")]
        rows.append([*cells, _range(line.speedup_min, line.speedup_max, ".2f"), number(line.efficiency, ".2f")])
    return Grid(head, rows)


def costs(table: ScalingTable) -> Grid:
    """The table of process times, memory, losses and scores."""
    head = ["strategy", "ranks", "real, s", "user, s", "system, s", "memory, GiB", "exposed comm."]
    scores = list(dict.fromkeys(name for line in table.lines for name in line.group.one.scores))
    head += ["last loss", "compared with", *(SHORT.get(name, name) for name in scores)]
    rows = []
    for line in table.lines:
        group = line.group
        memory = group.median(lambda run: run.memory_bytes)
        share = group.median(lambda run: run.exposed_share)
        cells = [group.label, str(group.one.ranks)]
        cells += [_seconds(group.median(methodcaller("process_s", kind))) for kind in PROCESS_TIMES]
        cells += [number(None if memory is None else memory / GIB, ".2f"), number(share, ".1%")]
        cells += [number(group.median(lambda run: run.last_loss), ".4f"), line.checked or DASH]
        cells += [_score(group, name) for name in scores]
        rows.append(cells)
    return Grid(head, rows)


def _score(group: Group, name: str) -> str:
    """Percent with two digits, fractions with four."""
    value = group.median(lambda run: run.scores.get(name))
    return number(value, ".4f" if value is not None and abs(value) <= 1 else ".2f")


def summary(tables: Sequence[ScalingTable]) -> list[str]:
    """A line per table: the strategies on the largest number of devices, fastest first."""
    sentences = []
    for table in tables:
        rows = [line for line in table.lines if line.speedup is not None and line.group is not table.baseline]
        maximum = max((line.group.one.devices for line in rows), default=0)
        best = [line for line in rows if line.group.one.devices == maximum]
        best.sort(key=lambda line: -(line.speedup or 0))
        parts = [f"{line.group.label} {line.speedup:.2f}" for line in best]
        if parts:
            over = f"times the {table.baseline.one.unit}/s of {table.baseline.name}"
            sentences.append(f"{table.title}: on {counted(maximum, 'device')} {', '.join(parts)} {over}.")
    return sentences


def reasons(tables: Iterable[ScalingTable], excluded: Sequence[Excluded]) -> list[str]:
    """A line per run or row without a speed-up, with the reason."""
    where: dict[tuple[str, str, str], list[str]] = {}
    for table in tables:
        for line in table.lines:
            if line.reason:
                names = [run.name for run in line.group.runs]
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                where.setdefault((line.group.name, ", ".join(names[:3]) + more, line.reason), []).append(_lower(table))
    rows = [f"{name} ({'; '.join(places)}; {names}): {reason}." for (name, names, reason), places in where.items()]
    return rows + [f"{left.name}: {left.reason}." for left in excluded]


def _lower(table: ScalingTable) -> str:
    return table.title[0].lower() + table.title[1:]


def caveats(tables: Iterable[ScalingTable]) -> list[str]:
    """What makes the figures less reliable."""
    found = []
    for table in tables:
        place = _lower(table)
        for line in table.lines:
            if line.efficiency is not None and line.efficiency > 1.05:
                found.append(
                    f"{line.group.name} ({place}) has an efficiency of {line.efficiency:.2f}, above the ideal of"
                    " 1. Check whether other programs used the baseline's device."
                )
        unchecked = [line.group.name for line in table.lines if line.speedup is not None and line.checked == UNCHECKED]
        if unchecked:
            found.append(f"{place}: the losses of {', '.join(unchecked)} were compared with no other strategy's.")
        apart = [line.group.name for line in table.lines if line.speedup is not None and line.group.variation > SPREAD]
        if apart:
            found.append(
                f"{place}: the repeats of {', '.join(apart)} are more than {SPREAD:.0%} apart. Differences of that"
                " size are noise. Check what else ran on the machine."
            )
        if min((len(line.group.runs) for line in table.lines if not line.reason), default=3) < 3:
            found.append(f"{table.title}: some rows have fewer than 3 runs, too few to judge the spread.")
    return found


def definitions() -> list[str]:
    """Definitions of the figures."""
    return [
        "A row contains the runs of one strategy on one number of nodes, ranks and devices that did the same work."
        " Figures are medians over its n runs.",
        "Speed-up: windows/s of all ranks after the first logged line, over the median of the table's baseline."
        " Efficiency: speed-up over (devices over the baseline's devices).",
        f"{RANGE:.0%} range: of the speed-up, with the variance of both sides, by a bootstrap. The repeats of the row"
        f" and those of the baseline are drawn again, with replacement, {RESAMPLES:,} times. The baseline's own row"
        " shows how far two sets of its repeats may be apart. A dash: a side has only one run.",
        "time: the whole training with warm-up and checkpoints, without start-up and evaluation. real, user, system:"
        " the whole process of a rank with start-up, median over ranks. memory: the maximum over ranks.",
        "Strong scaling: the same global batch, steps and windows on more devices. Weak scaling: the same batch per"
        " device, so the global batch grows; the same number of steps or of windows.",
        "Losses must agree. Without dropout and with the same seed, the logged losses of the first"
        f" {EARLY_STEPS} steps must agree to {EARLY_TOLERANCE:g} (relative). In any case, the means of the last quarter"
        f" of the logged losses must agree to {LAST_TOLERANCE:.0%} or {NATS} nats. On weak scaling the batch grows, so"
        " losses are compared with another strategy on as many devices. A dash: there is no such strategy.",
    ]


def table_rows(tables: Iterable[ScalingTable]) -> list[dict[str, Any]]:
    """CSV rows, one per table and group."""
    return [
        {
            "scaling": table.kind if table.scales else "side by side",
            "size": f"{table.size:g}",
            "baseline": table.baseline.name,
            "strategy": line.group.label,
            **{name: getattr(line.group.one, name) for name in ("nodes", "ranks", "devices", "global_batch", "steps")},
            "runs": len(line.group.runs),
            "train_runtime_s": line.group.median(lambda run: run.runtime_s),
            "windows_per_s": line.group.windows_per_s,
            "windows_per_s_least": line.group.spread()[0],
            "windows_per_s_most": line.group.spread()[1],
            "speedup": line.speedup,
            "speedup_least": line.speedup_min,
            "speedup_most": line.speedup_max,
            "efficiency": line.efficiency,
            "reason": line.reason,
        }
        for table in tables
        for line in table.lines
    ]


def run_rows(runs: Iterable[Run], excluded: Iterable[Excluded]) -> list[dict[str, Any]]:
    """CSV rows, one per run."""
    keys = ("strategy", "nodes", "ranks", "devices", "global_batch", "steps", "windows", "seed", "device_name")
    figures = ("windows_per_s", "step_s", "exposed_share", *PROCESS_TIMES, "memory_bytes", "last_loss")
    used = [
        {"run": run.name}
        | {key: getattr(run, key) for key in keys}
        | {"train_runtime_s": run.runtime_s}
        | {key: run.process_s(key) if key in PROCESS_TIMES else getattr(run, key) for key in figures}
        | {"left_out": ""}
        | dict(run.scores)  # last, since tasks have different ones
        for run in runs
    ]
    return used + [{"run": left.name, "left_out": left.reason} for left in excluded]
