"""Make the tables of a comparison, as grids and CSV rows, with headline, reasons and caveats."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_bert.storage.reading import GIB
from hvd_bert.tools.rendering import DASH, SHORT, counted, number, shown
from hvd_bert.tools.rendering.page import Grid, Status, latex
from hvd_bert.tools.report.comparability import Group
from hvd_bert.tools.report.comparison import ENOUGH, RANGE, UNCHECKED, Compared, ScalingTable
from hvd_bert.tools.runs.finding import Excluded
from hvd_bert.tools.runs.record import Record
from hvd_bert.tools.runs.tolerant import converted

SPREAD = 0.1  # `Group.variation` above which a caveat is added
SHORT_S = 10.0  # seconds: shorter trainings get a caveat
LEFT_OUT = ", left out"  # added to the name of a row without a speed-up
NAMES = f"{RANGE:.0%} range", "lowest to highest"  # of the range of a speed-up, by `Compared.few`


@dataclass(frozen=True, kw_only=True)
class Column:
    """A figure of a run or of a table row, and its column title in each table ("": the table does not have it)."""

    of_run: Callable[[Record], Any] = lambda run: None  # rows combine their runs by `Group.figure`
    of_row: Callable[[Compared], Any] | None = None  # replaces `of_run`, for figures that only rows have
    runs: str = ""  # title in runs.csv
    report: str = ""  # title in report.csv
    speed: str = ""  # title in the page's first table, which is also printed and in report.tex
    cost: str = ""  # title in the page's second table
    text: Callable[[Any], str] = shown  # formats the figure for the page's tables

    def value(self, line: Compared) -> Any:
        """Return the figure of a row."""
        return self.of_row(line) if self.of_row else line.group.figure(self.of_run)


def _digits(form: str, scale: float = 1) -> Callable[[float | None], str]:
    return lambda value: number(value and value / scale, form)


def _range(ends: tuple[float, float] | None) -> str:
    return f"{ends[0]:.2f} to {ends[1]:.2f}" if ends else DASH


def _seconds(value: float | None) -> str:
    return number(value, ".1f" if value is not None and value < 1000 else ",.0f")


def _score(value: float | None) -> str:
    """Format a score: percents with two decimals, fractions with four."""
    return number(value, ".4f" if value is not None and abs(value) <= 1 else ".2f")


def _hours(value: float) -> str:
    return format(value, "#.3g" if value < 100 else ",.0f")


def _device_hours(line: Compared) -> float:
    """Compute the GPU-hours of a training; on CPUs, the core-hours."""
    run, seconds = line.group.first, line.group.figure(lambda run: run.results.train_runtime)
    return float(run.devices * (run.results.threads_per_rank if run.on_cpu else 1) * seconds / 3600)


# All tables have their columns in this order. A figure whose position differs between tables has two entries.
COLUMNS = (
    Column(of_run=lambda run: run.results.strategy, runs="strategy"),
    Column(of_row=lambda line: line.group.label, report="strategy", cost="strategy"),
    Column(of_row=lambda line: line.group.label + (LEFT_OUT if line.reason else ""), speed="strategy"),
    Column(of_run=lambda run: run.nodes, runs="nodes", report="nodes", speed="nodes"),
    Column(of_run=lambda run: run.results.world_size, runs="ranks", report="ranks", speed="ranks", cost="ranks"),
    Column(of_run=lambda run: run.devices, runs="devices", report="devices", speed="GPUs"),
    Column(of_run=lambda run: run.results.global_batch, runs="global_batch", report="global_batch"),
    Column(of_run=lambda run: run.results.train_steps, runs="steps", report="steps"),
    Column(of_run=lambda run: run.results.train_samples, runs="windows"),
    Column(of_run=lambda run: run.results.seed, runs="seed"),
    Column(of_run=lambda run: run.results.device_name, runs="device_name"),
    Column(of_row=lambda line: len(line.group.runs), report="runs"),
    Column(
        of_run=lambda run: run.results.train_runtime,
        runs="train_runtime_s",
        report="train_runtime_s",
        speed="time, min",
        text=_digits(".2f", 60),
    ),
    Column(of_run=lambda run: run.windows_per_s, runs="windows_per_s", report="windows_per_s"),
    Column(of_row=lambda line: line.group.spread[0], report="windows_per_s_least"),
    Column(of_row=lambda line: line.group.spread[1], report="windows_per_s_most"),
    Column(of_row=lambda line: line.group.spread, cost="UNIT/s, min to max", text=_range),
    Column(of_row=lambda line: line.speedup, report="speedup", speed="speed-up", text=_digits(".2f")),
    Column(of_row=lambda line: line.range and line.range[0], report="speedup_least"),
    Column(of_row=lambda line: line.range and line.range[1], report="speedup_most"),
    Column(of_row=lambda line: None if line.few else line.range, speed=NAMES[False], text=_range),
    Column(of_row=lambda line: line.range if line.few else None, speed=NAMES[True], text=_range),
    Column(of_row=lambda line: line.total_speedup, report="total_speedup"),
    Column(of_row=lambda line: line.efficiency, report="efficiency", speed="efficiency", text=_digits(".2f")),
    Column(of_row=lambda line: line.total_speedup, speed="total speed-up", text=_digits(".2f")),
    Column(of_row=lambda line: line.serial, report="serial_fraction", speed="serial fraction", text=_digits(".3f")),
    Column(of_run=lambda run: run.windows_per_s, speed="UNIT/s", text=_digits(".2f")),
    Column(of_row=_device_hours, report="device_hours", speed="HOURS", text=_hours),
    Column(of_row=lambda line: len(line.group.runs), speed="runs"),
    Column(of_run=lambda run: run.steps.mean("step_s"), runs="step_s"),
    Column(of_run=lambda run: run.exposed_share, runs="exposed_share"),
    Column(of_run=lambda run: run.of_processes("real_s"), runs="real_s", cost="real, s", text=_seconds),
    Column(of_run=lambda run: run.of_processes("user_s"), runs="user_s", cost="user, s", text=_seconds),
    Column(of_run=lambda run: run.of_processes("system_s"), runs="system_s", cost="system, s", text=_seconds),
    Column(of_run=lambda run: run.memory_bytes, runs="memory_bytes", cost="memory, GiB", text=_digits(".2f", GIB)),
    Column(
        of_run=lambda run: run.number("energy_wh"),
        runs="energy_wh",
        report="energy_wh",
        cost="energy, Wh",
        text=_digits(".3g"),
    ),
    Column(
        of_run=lambda run: run.wh_per_1000,
        runs="wh_per_1000_windows",
        report="wh_per_1000_windows",
        cost="Wh per 1,000 UNIT",
        text=_digits(".3g"),
    ),
    Column(of_run=lambda run: run.exposed_share, cost="exposed comm.", text=_digits(".1%")),
    Column(of_run=lambda run: run.last_loss, runs="last_loss", cost="last loss", text=_digits(".4f")),
    Column(of_row=lambda line: line.checked or DASH, cost="compared with"),
    Column(of_row=lambda line: line.reason, report="reason"),
)


BRIEF = ("total speed-up", "serial fraction")  # columns that a terminal has no room for


def speedups(table: ScalingTable, omit: Collection[str] = ()) -> Grid:
    """Make the table of times, speed-ups and efficiencies. `omit`: titles of columns to omit."""
    runs = [line.group.first for line in table.lines]
    hidden = {*omit}
    hidden |= {"nodes"} if all(run.nodes == 1 for run in runs) else set()
    hidden |= {"GPUs"} if all(run.devices == run.results.world_size for run in runs) else set()
    columns = [(column.speed, column) for column in COLUMNS if column.speed and column.speed not in hidden]
    return _grid(table, columns)


def costs(table: ScalingTable) -> Grid:
    """Make the table of process times, memory, losses and scores."""
    columns = [(column.cost, column) for column in COLUMNS if column.cost]
    runs = [run for line in table.lines for run in line.group.runs]
    scores = dict.fromkeys((name, run.rules) for run in runs for name in run.final_scores)
    columns += [(SHORT.get(name, name) + rules, _score_column(name, rules)) for name, rules in scores]
    return _grid(table, columns)


def _score_column(name: str, rules: str) -> Column:
    return Column(of_run=lambda run: run.final_scores.get(name) if run.rules == rules else None, text=_score)


def _grid(table: ScalingTable, columns: Sequence[tuple[str, Column]]) -> Grid:
    base = table.baseline.first
    hours = "core-hours" if base.on_cpu else "GPU-hours"
    head = [title.replace("UNIT", base.unit).replace("HOURS", hours) for title, _ in columns]
    rows = [[column.text(column.value(line)) for _, column in columns] for line in table.lines]
    return Grid(head, rows).without_empty()


def table_rows(tables: Iterable[ScalingTable]) -> list[dict[str, Any]]:
    """Make the rows of report.csv, one per table and group."""
    return [
        {"scaling": table.kind if table.scales else "side by side", "size": f"{table.size:g}"}
        | {"baseline": table.baseline.name}
        | {column.report: column.value(line) for column in COLUMNS if column.report}
        for table in tables
        for line in table.lines
    ]


def run_rows(runs: Iterable[Record], excluded: Iterable[Excluded]) -> list[dict[str, Any]]:
    """Make the rows of runs.csv, one per run. Scores come last, since they differ by task."""
    used = [
        {"run": run.name}
        | {column.runs: column.of_run(run) for column in COLUMNS if column.runs}
        | {"left_out": "", **{name + run.rules: score for name, score in run.final_scores.items()}}
        for run in runs
    ]
    return used + [{"run": name, "left_out": reason} for name, reason in excluded]


def headline(table: ScalingTable, brief: bool = False) -> Status:
    """Describe the speed-ups on the largest number of devices, the fastest strategy first, with doubts about them.

    `brief`: whether to omit the other strategies.
    """
    rows = [line for line in table.measured if line.group is not table.baseline]
    rows.sort(key=lambda line: (-line.group.first.devices, -(line.speedup or 0)))
    best, *others = (line for line in rows if line.group.first.devices == rows[0].group.first.devices)
    run = best.group.first
    devices = counted(run.devices, "rank" if run.devices == run.results.world_size else "GPU")
    text = f"with {best.group.label} compared with {table.baseline.name} (efficiency {best.efficiency:.0%}"
    text += f", {NAMES[best.few]} {_range(best.range)})" if best.range else ")"
    doubtful = doubts(table, [best])
    text += f", which is uncertain: {', '.join(doubtful)}." if doubtful else "."
    rest = ", ".join(
        f"{line.group.label} {line.speedup:.2f} ({line.efficiency:.0%}{', uncertain' * bool(doubts(table, [line]))})"
        for line in others
    )
    text += f" Others: {rest}." if rest and not brief else ""
    faster = (best.range[0] if best.range else best.speedup or 0) > 1 and not doubtful
    return Status(f"{best.speedup:.2f} times as fast on {devices}", text, "good" if faster else "busy")


def reasons(tables: Iterable[ScalingTable], excluded: Sequence[Excluded]) -> list[str]:
    """List the runs and rows without a speed-up, each with the reason."""
    where: dict[tuple[str, str, str], list[str]] = {}
    for table in tables:
        for line in table.lines:
            if line.reason:
                names = [run.name for run in line.group.runs]
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                where.setdefault((line.group.name, ", ".join(names[:3]) + more, line.reason), []).append(lower(table))
    rows = [f"{name} ({'; '.join(titles)}; {names}): {reason}." for (name, names, reason), titles in where.items()]
    return rows + [f"{name}: {reason}." for name, reason in excluded]


def lower(table: ScalingTable) -> str:
    """Return a table's title with a lower-case first letter, for use within a sentence."""
    return table.title[0].lower() + table.title[1:]


def caveats(tables: Sequence[ScalingTable]) -> list[str]:
    """List reasons why the figures are less reliable, as sentences. `doubts` has the same reasons in a few words."""
    found = []
    for table in tables:
        suffix = f" ({lower(table)})" if len(tables) > 1 else ""
        lines = table.measured
        for line in lines:
            if _above_ideal(line):
                found.append(
                    f"{line.group.name}{suffix} has an efficiency of {line.efficiency:.2f}, above the ideal of 1. Check"
                    " whether other programs used the baseline's device."
                )
        limits: dict[str, list[str]] = {}
        for line in lines:
            if highest := _highest_efficiency(line, table):
                cores = counted(converted(line.group.first.results.machine.get("cores"), int, 0), "core")
                limit = f"had {cores} per host for {line.group.first.needed_cores} threads, so the efficiency cannot"
                limits.setdefault(f"{limit} exceed {highest:.2f}.", []).append(line.group.name)
        found += [f"{_joined(names)}{suffix} {limit}" for limit, names in limits.items()]
        unchecked = [line.group.name for line in lines if line.checked == UNCHECKED]
        if unchecked:
            found.append(f"The losses of {_joined(unchecked)}{suffix} were compared with no other strategy's.")
        apart = [line.group.name for line in lines if line.group.variation > SPREAD]
        if apart:
            found.append(
                f"The repeats of {_joined(apart)}{suffix} are more than {SPREAD:.0%} apart, so smaller differences are"
                " noise. Check whether other programs ran on the machine."
            )
        shortest = _shortest(line.group for line in lines)
        if shortest < SHORT_S:
            found.append(f"Trainings{suffix} took only {shortest:.1f} s, too short to compare: use a minute or more.")
        few = min(len(line.group.runs) for line in lines)
        if few < ENOUGH:
            found.append(f"Some rows{suffix} have only {counted(few, 'run')}, too few to judge the spread.")
    return found


def doubts(table: ScalingTable, lines: Sequence[Compared]) -> list[str]:
    """List in a few words each why the speed-ups of `lines` are less reliable. Counts what concerns the baseline."""
    sides = [line.group for line in lines] + [table.baseline]
    few = min(len(side.runs) for side in sides)
    rows = f"only {counted(few, 'run')} per row" if len(lines) == 1 else f"rows with only {counted(few, 'run')}"
    found = {
        "efficiency above the ideal of 1": any(map(_above_ideal, lines)),
        "more threads than cores": any(_highest_efficiency(line, table) for line in lines),
        "losses not compared": any(line.checked == UNCHECKED for line in lines),
        f"repeats more than {SPREAD:.0%} apart": any(side.variation > SPREAD for side in sides),
        f"trainings below {SHORT_S:.0f} s": _shortest(sides) < SHORT_S,
        rows: few < ENOUGH,
    }
    return [text for text, applies in found.items() if applies]


def _above_ideal(line: Compared) -> bool:
    return (line.efficiency or 0) > 1.05


def _highest_efficiency(line: Compared, table: ScalingTable) -> float | None:
    """Compute the highest possible efficiency on a CPU with fewer cores than threads; None if that is no limit."""
    run, cores = line.group.first, converted(line.group.first.results.machine.get("cores"), int, 0)
    base = max(1.0, table.baseline.first.needed_cores / cores) if cores else 1.0
    limits = run.on_cpu and 0 < base * cores < run.needed_cores
    return base * cores / run.needed_cores if limits else None


def _shortest(groups: Iterable[Group]) -> float:
    return min(run.results.train_runtime for group in groups for run in group.runs)


def _joined(names: Sequence[str]) -> str:
    return "; ".join(names) if len(names) < 5 else f"{len(names)} rows"


def as_latex(tables: Iterable[ScalingTable], set_up: str) -> str:
    """Format the tables of speed-ups, with their caveats, and the paragraph "Set-up" in LaTeX. `set_up`: the paragraph.

    The tables are as wide as a page of LaTeX's article.
    """
    parts = [
        r"% A part of a document: put \usepackage{booktabs} before \begin{document}, and \input{report.tex} after it."
    ]
    for index, table in enumerate(tables, start=1):
        first, result = f"{table.title}. Baseline: {table.baseline.name}.", headline(table, brief=True)
        notes = caveats([table])
        parts.append(
            f"\\begin{{table*}}\n\\centering\n\\caption{{{latex(f'{first} {result.label} {result.text}')}}}\n"
            f"\\label{{tab:scaling_{index}}}\n\\footnotesize\n\\setlength{{\\tabcolsep}}{{2.5pt}}\n\\smallskip\n"
            f"{_narrow(table).for_latex()}\n"
            + (f"\n\\medskip\n\\raggedright Caveats: {latex(' '.join(notes))}\n" if notes else "")
            + "\\end{table*}\n"
        )
    return "\n".join([*parts, f"\\begin{{sloppypar}}\n{latex(set_up)}\n\\end{{sloppypar}}\n"])


def _narrow(table: ScalingTable) -> Grid:
    """Make the table of speed-ups for a page. The figures that it omits are in report.csv."""
    few = {line.few for line in table.measured if line.range}
    devices = {line.group.first.devices == line.group.first.results.world_size for line in table.lines}
    omit = {*BRIEF, "HOURS"} | ({NAMES[True]} if len(few) > 1 else set()) | ({"ranks"} if False in devices else set())
    return speedups(table, omit)
