"""The report's text, tables and CSV rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from operator import methodcaller
from typing import Any

from hvd_bert.storage.reading import GIB
from hvd_bert.tools.rendering import DASH, SHORT, counted, number
from hvd_bert.tools.rendering.page import Grid, Status, latex
from hvd_bert.tools.report.comparability import EARLY_STEPS, EARLY_TOLERANCE, LAST_TOLERANCE, NATS, Group
from hvd_bert.tools.report.comparison import RANGE, RESAMPLES, UNCHECKED, ScalingTable
from hvd_bert.tools.runs.reading import PROCESS_TIMES, Excluded, Run
from hvd_bert.tools.runs.record import kept

SPREAD = 0.1  # of the repeats, over their median; a larger spread is a caveat
SHORT_S = 10.0  # a shorter training is a caveat


LEFT_OUT = ", left out"  # after the name of a row without a speed-up


def _range(minimum: float | None, maximum: float | None, form: str) -> str:
    return DASH if minimum is None or maximum is None else f"{minimum:{form}} to {maximum:{form}}"


def _seconds(value: float | None) -> str:
    return number(value, ".1f" if value is not None and value < 1000 else ",.0f")


def speedups(table: ScalingTable, brief: bool = False) -> Grid:
    """The table of times, speed-ups and efficiencies, without empty columns. `brief`: fits a terminal's width."""
    runs = [line.group.one for line in table.lines]
    shown = {"nodes": any(run.nodes > 1 for run in runs), "GPUs": any(run.devices != run.ranks for run in runs)}
    shown |= dict.fromkeys(("total speed-up", "serial fraction"), not brief)
    unit = "core-hours" if table.baseline.one.on_cpu else "GPU-hours"
    rows: list[dict[str, str]] = []
    for line in table.lines:
        run, group, hours = line.group.one, line.group, _hours(line.group)
        cells = {"strategy": group.label + (LEFT_OUT if line.reason else "")}
        cells |= {"nodes": str(run.nodes), "ranks": str(run.ranks), "GPUs": str(run.devices)}
        cells["time, min"] = number(group.median(lambda run: run.runtime_s / 60), ".2f")
        cells["speed-up"] = number(line.speedup, ".2f")
        cells[f"{RANGE:.0%} range"] = _range(line.speedup_min, line.speedup_max, ".2f")
        cells["efficiency"] = number(line.efficiency, ".2f")
        cells["total speed-up"] = number(line.total_speedup, ".2f")
        cells["serial fraction"] = number(line.serial, ".3f")
        cells[f"{table.baseline.one.unit}/s"] = number(group.windows_per_s, ".2f")
        cells |= {unit: format(hours, "#.3g" if hours < 100 else ",.0f"), "runs": str(len(group.runs))}
        rows.append({name: cell for name, cell in cells.items() if shown.get(name, True)})
    return Grid([*rows[0]], [[*row.values()] for row in rows]).without_empty()


def costs(table: ScalingTable) -> Grid:
    """The table of process times, memory, losses and scores."""
    head = ["strategy", "ranks", f"{table.baseline.one.unit}/s, min to max", "real, s", "user, s", "system, s"]
    head += ["memory, GiB", "exposed comm.", "last loss", "compared with"]
    scores = list(dict.fromkeys(name for line in table.lines for name in line.group.one.scores))
    head += [SHORT.get(name, name) for name in scores]
    rows = []
    for line in table.lines:
        group = line.group
        memory = group.median(lambda run: run.memory_bytes)
        share = group.median(lambda run: run.exposed_share)
        cells = [group.label, str(group.one.ranks), _range(*group.spread(), ".2f")]
        cells += [_seconds(group.median(methodcaller("process_s", kind))) for kind in PROCESS_TIMES]
        cells += [number(None if memory is None else memory / GIB, ".2f"), number(share, ".1%")]
        cells += [number(group.median(lambda run: run.last_loss), ".4f"), line.checked or DASH]
        cells += [_score(group, name) for name in scores]
        rows.append(cells)
    return Grid(head, rows).without_empty()


def _score(group: Group, name: str) -> str:
    """Percent with two digits, fractions with four."""
    value = group.median(lambda run: run.scores.get(name))
    return number(value, ".4f" if value is not None and abs(value) <= 1 else ".2f")


def _hours(group: Group) -> float:
    """GPU-hours of the training, or core-hours on CPUs: the median."""
    units = group.one.devices * (group.one.threads if group.one.on_cpu else 1)
    return units * statistics.median(run.runtime_s for run in group.runs) / 3600


def headline(table: ScalingTable) -> Status:
    """The speed-up of the fastest strategy on the largest number of devices, and those of the others there."""
    rows = [line for line in table.lines if line.speedup is not None and line.group is not table.baseline]
    rows.sort(key=lambda line: (-line.group.one.devices, -(line.speedup or 0)))
    best, *others = (line for line in rows if line.group.one.devices == rows[0].group.one.devices)
    run = best.group.one
    devices = counted(run.devices, "rank" if run.devices == run.ranks else "GPU")
    text = f"with {best.group.label} compared with {table.baseline.name} (efficiency {best.efficiency:.0%}"
    text += f", {RANGE:.0%} range {_range(best.speedup_min, best.speedup_max, '.2f')})." if best.speedup_min else ")."
    rest = ", ".join(f"{line.group.label} {line.speedup:.2f} ({line.efficiency:.0%})" for line in others)
    text += f" Others: {rest}." if rest else ""
    faster = (best.speedup_min or best.speedup or 0) > 1
    return Status(f"{best.speedup:.2f} times as fast on {devices}", text, "good" if faster else "busy")


def reasons(tables: Iterable[ScalingTable], excluded: Sequence[Excluded]) -> list[str]:
    """A line per run or row without a speed-up, with the reason."""
    where: dict[tuple[str, str, str], list[str]] = {}
    for table in tables:
        for line in table.lines:
            if line.reason:
                names = [run.name for run in line.group.runs]
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                where.setdefault((line.group.name, ", ".join(names[:3]) + more, line.reason), []).append(lower(table))
    rows = [f"{name} ({'; '.join(places)}; {names}): {reason}." for (name, names, reason), places in where.items()]
    return rows + [f"{left.name}: {left.reason}." for left in excluded]


def lower(table: ScalingTable) -> str:
    """The title of a table within a sentence."""
    return table.title[0].lower() + table.title[1:]


def caveats(tables: Sequence[ScalingTable]) -> list[str]:
    """What makes the figures less reliable, a sentence each."""
    found = []
    for table in tables:
        place = f" ({lower(table)})" if len(tables) > 1 else ""
        lines = [line for line in table.lines if line.speedup is not None]
        for line in lines:
            if (line.efficiency or 0) > 1.05:
                found.append(
                    f"{line.group.name}{place} has an efficiency of {line.efficiency:.2f}, above the ideal of 1. Check"
                    " whether other programs used the baseline's device."
                )
        for line in lines:
            run, cores = line.group.one, kept(line.group.one.machine.get("cores"), int, 0)
            base = max(1.0, table.baseline.one.needed_cores / cores) if cores else 1.0
            if run.on_cpu and 0 < base * cores < run.needed_cores:
                found.append(
                    f"{line.group.name}{place} had {counted(cores, 'core')} per host for {run.needed_cores} threads, so"
                    f" its efficiency cannot exceed {base * cores / run.needed_cores:.2f}."
                )
        unchecked = [line.group.name for line in lines if line.checked == UNCHECKED]
        if unchecked:
            found.append(f"The losses of {_joined(unchecked)}{place} were compared with no other strategy's.")
        apart = [line.group.name for line in lines if line.group.variation > SPREAD]
        if apart:
            found.append(
                f"The repeats of {_joined(apart)}{place} are more than {SPREAD:.0%} apart, so smaller differences are"
                " noise. Check what else ran on the machine."
            )
        shortest = min(run.runtime_s for line in lines for run in line.group.runs)
        if shortest < SHORT_S:
            found.append(f"Trainings{place} took only {shortest:.1f} s. Too short to compare: give each a minute.")
        few = min(len(line.group.runs) for line in lines)
        if few < 3:
            found.append(f"Some rows{place} have only {counted(few, 'run')}, too few to judge the spread.")
    return found


def _joined(names: Sequence[str]) -> str:
    return "; ".join(names) if len(names) < 5 else f"{len(names)} rows"


def definitions() -> list[str]:
    """Definitions of the figures."""
    return [
        "A row contains the runs of one strategy on one number of nodes, ranks and devices that did the same work."
        " Figures are medians over its runs.",
        "Speed-up: windows/s of all ranks after the first logged line, over the median of the table's baseline."
        " Efficiency: speed-up over (devices over the baseline's devices).",
        f"{RANGE:.0%} range: of the speed-up, with the variance of both sides, by a bootstrap. The repeats of the row"
        f" and those of the baseline are drawn again, with replacement, {RESAMPLES:,} times. The baseline's own row"
        " shows how far two sets of its repeats may be apart. A dash: a side has only one run.",
        "time: the whole training with warm-up and checkpoints, without start-up and evaluation. Total speed-up: of"
        " windows over this time. Core- or GPU-hours: this time, of all devices (on CPUs, of all threads).",
        "Serial fraction (Karp and Flatt): (1/S - 1/N) / (1 - 1/N) of the speed-up S on N times the baseline's devices;"
        " of strong scaling, where S is above 1. If it grows with N, communication is the limit; if it stays, serial"
        " work is.",
        "real, user, system: the whole process of a rank with start-up, median over ranks. memory: the maximum over"
        " ranks.",
        "Strong scaling: the same global batch, steps and windows on more devices. Weak scaling: the same batch per"
        " device, so the global batch grows; the same number of steps or of windows.",
        "Losses must agree. Without dropout and with the same seed, the logged losses of the first"
        f" {EARLY_STEPS} steps must agree to {EARLY_TOLERANCE:g} (relative). In any case, the means of the last quarter"
        f" of the logged losses must agree to {LAST_TOLERANCE:.0%} or {NATS} nats. On weak scaling the batch grows, so"
        " losses are compared with another strategy on as many devices. A dash: there is no such strategy.",
    ]


def as_latex(tables: Iterable[ScalingTable], set_up: str) -> str:
    """The tables of speed-ups and the paragraph on the set-up for a paper; "" without a table."""
    parts = [
        f"\\begin{{table*}}\n\\centering\n\\caption{{{latex(table.title)}. Baseline: {latex(table.baseline.name)}.}}\n"
        f"{speedups(table).for_latex()}\n\\end{{table*}}\n"
        for table in tables
    ]
    return "\n".join([r"% Needs \usepackage{booktabs}.", *parts, latex(set_up) + "\n"]) if parts else ""


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
            "total_speedup": line.total_speedup,
            "efficiency": line.efficiency,
            "serial_fraction": line.serial,
            "device_hours": _hours(line.group),
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
