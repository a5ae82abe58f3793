"""Make the page of several runs: speed-ups of comparable runs, differing settings, curves, an overview."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Sequence

from hvd_bert.tools.rendering import DASH, SHORT, duration, number, shown
from hvd_bert.tools.rendering.page import Block, Details, Grid, Listing, Page, Picture, Status, Text
from hvd_bert.tools.rendering.report_files import FORMATS, PANEL
from hvd_bert.tools.report import comparability, comparison, curves, plots, setup, tables
from hvd_bert.tools.report.comparability import Group
from hvd_bert.tools.report.comparison import ScalingTable
from hvd_bert.tools.report.setup import TEXTS
from hvd_bert.tools.runs.finding import short_names
from hvd_bert.tools.runs.record import Record
from hvd_bert.tools.runs.tolerant import converted, finite_number

# Flags that name validation data and how much of it is used.
VALIDATION = ("dataset_name", "dataset_config_name", "validation_file", "version_2_with_negative", "max_eval_samples")
INTERVAL = "95 % interval of the mean"
LONG = 20  # rows: longer tables are folded


def make_page(
    records: Sequence[Record],
    groups: Sequence[Group],
    compared: Sequence[ScalingTable],
    reasons: Sequence[str],
    set_up: Sequence[Block],
) -> Page:
    """Make the page. `groups`: the comparable runs. `compared`: the tables with speed-ups.

    `reasons`: lines on the runs without a speed-up. `set_up`: blocks of the section "Set-up".
    """
    page = Page(f"Report on {len(records)} runs")
    costs: list[Block] = []
    differing = setup.differences(records)
    same = Text("All recorded settings, inputs and versions are the same.")
    differ = "What differs", differing if len(differing.head) > 1 else same
    two = len(records) == 2
    if two:
        page.add_section("Scores", verdict(*records), *_score_table(*records))
        page.add_section(*differ)
    for index, table in enumerate(compared, start=1):
        speeds = _panels(table, index, "speedup", "efficiency")
        page.add_section(table.title, tables.headline(table), *speeds, tables.speedups(table))
        costs += [Text(table.title, 3)] if len(compared) > 1 else []
        costs += [tables.costs(table), *_panels(table, index, "throughput", "memory")]
    if not compared:
        none = Text("No two of these runs can be compared for speed, so there are no measured speed-ups.")
        page.add_section("Speed", none, Listing(reasons if two else []))
    page.add_section("Caveats", Listing([*tables.caveats(compared), *_other_rules(records)]))
    if not two:
        page.add_section(*differ)
    page.add_section("Set-up", *set_up)
    page.add_section("Runs", _folded(overview(records)))
    page.add_section("Time, memory and loss", *costs)
    if repeated := repeats(groups):
        how = f"The {INTERVAL} uses the t-distribution: it assumes normally distributed values."
        page.add_section("Repeats over seeds", _folded(repeated), Text(how if INTERVAL in repeated.head else ""))
    page.add_section("Curves", *curves.of_runs(records, groups))
    page.add_section("Without a speed-up", Listing(reasons if compared or not two else []))
    if compared:
        modules = {"comparability": comparability, "comparison": comparison, "tables": tables}
        kinds = {line.few for table in compared for line in table.measured if line.range}
        absent = tuple(tables.NAMES[few] for few in (False, True) if few not in kinds)
        definitions = [text.format(**modules) for text in TEXTS["definitions"]]
        page.add_section("Definitions", Listing([text for text in definitions if not text.startswith(absent)]))
    return page


def verdict(first: Record, second: Record) -> Status:
    """Describe by how much one of two runs is better in their main score, and the doubts about it."""
    both, short = (first, second), short_names([first.name, second.name])
    known = [[name for name in run.score_names if run.score(name) is not None] for run in both]
    common = [name for name in known[0] if name in known[1]]
    if not common:
        has = [", ".join(map(curves.score_name, names)) or "none" for names in known]
        text = f"{short[0]} has {has[0]}, {short[1]} has {has[1]}." if any(known) else "Neither run has one."
        return Status("No score to compare.", text, "busy")
    name = next(name for name in ("f1", first.settings.get("metric_for_best_model"), *common) if name in common)
    values = [run.score(name) or 0.0 for run in both]
    score, gap, doubts = curves.score_name(name), abs(values[0] - values[1]), _score_doubts(both)
    if not gap:
        return Status(f"Both have {score} {number(values[0])}.", " ".join(doubts), "busy")
    lower = name in converted(first.facts.get("lower_is_better"), list[str], [])
    worse, better = sorted(zip(values, both, short, strict=True), key=lambda side: side[0], reverse=lower)
    form = ".1f" if max(map(abs, values)) > 1 and gap >= 0.1 else ".4g"
    label = f"{better[2]} is better by {gap:{form}} {score}"
    if doubts:
        label = f"The {score} of {better[2]} is {gap:{form}} {'lower' if lower else 'higher'}"
    how = "train each with several seeds"
    if name in SHORT:
        models = [_model(run) for _, run, _ in (better, worse)]
        how = f"run hvd-bert evaluate {models[0]} --compare {models[1]}"
    text = f"({better[0]:{form}} against {worse[0]:{form}}). {' '.join(doubts)} No interval is known: {how}."
    return Status(label, " ".join(text.split()), "busy" if doubts else "good")


def _model(run: Record) -> str:
    return shlex.quote(run.name if run.trained else str(run.settings.get("model_name_or_path")))


def _score_doubts(both: Sequence[Record]) -> list[str]:
    """List as sentences why the scores of two runs cannot be compared, or perhaps not."""
    found = [f"{run.name} has not finished: its scores are the last ones." for run in both if run.state != "finished"]
    if both[0].rules != both[1].rules:
        found.append("The scores follow different rules (--answer_language): do not compare them.")
    totals = [run.score("total") for run in both]
    values = {flag: [shown(run.settings.get(flag)) for run in both] for flag in VALIDATION}
    differing = [f"--{flag} {' and '.join(pair)}" for flag, pair in values.items() if pair[0] != pair[1]]
    if None not in totals and totals[0] != totals[1]:
        counts = " and ".join(number(total, ",.0f") for total in totals)
        what = "; ".join([f"{counts} questions", *differing])
        found.append(f"The scores are from different data ({what}): do not compare them.")
    elif differing:
        found.append(f"They may be from different data ({'; '.join(differing)}).")
    elif not any(run.settings for run in both):
        found.append("Their validation data is not recorded.")
    return found


def _score_table(first: Record, second: Record) -> list[Grid]:
    """Make the table of the scores of two runs; none without any scores."""
    both = first, second
    names = dict.fromkeys((name, run.rules) for run in both for name in run.score_names)
    found = {
        curves.score_name(name) + rules: [run.score(name) if run.rules == rules else None for run in both]
        for name, rules in names
    }
    found |= {"validation loss": [run.score("eval_loss") for run in both]}
    found |= {"questions": [run.score("total") for run in both]}
    rows = []
    for name, (one, two) in found.items():
        difference = None if one is None or two is None else one - two
        rows.append([name, number(one, ".5g"), number(two, ".5g"), number(difference, "+.4g")])
    rows = [row for row in rows if row[1:] != [DASH] * 3]
    return [Grid(["score", first.name, second.name, "first minus second"], rows)] if names else []


def _other_rules(records: Sequence[Record]) -> list[str]:
    """Make the caveat on runs whose scores follow different rules."""
    found = list(dict.fromkeys(f"F1{record.rules}" for record in records if record.score_names))
    text = f"{' and '.join(found)} follow different rules (--answer_language), as does EM: do not compare them."
    return [text] if len(found) > 1 else []


def _folded(grid: Grid) -> Block:
    """Hide a long table until the reader opens it."""
    return grid if len(grid.rows) <= LONG else Details(f"{len(grid.rows)} rows", [grid])


def _panels(table: ScalingTable, index: int, *names: str) -> list[Picture]:
    """Plot the panels whose figures are known, in all formats; none if all rows have the same number of devices.

    `index`: the table's number.
    """
    pictures = []
    known = [name for name in names if any(map(plots.MEASURES[name][0], table.measured))]
    for name in known if table.scales else ():
        files = {PANEL.format(index, name, form): data for form, data in plots.panel(table, name, FORMATS).items()}
        (png, data), *others = files.items()
        pictures.append(Picture(png, data, f"{table.title}: {name}", half=True, others=dict(others)))
    return pictures


def overview(records: Sequence[Record]) -> Grid:
    """Make the table with the main figures of each run."""
    scores = list(dict.fromkeys((name, record.rules) for record in records for name in record.score_names))
    head = ["run", "state", "strategy", "ranks", "step", "time", "last logged loss"]
    rows = []
    for record in records:
        losses, seconds = record.steps["loss"], record.number("train_runtime")
        cells = [record.name, record.state if record.state != "ended" else "not finished"]
        cells += [shown(record.facts.get(key)) for key in ("strategy", "world_size")]
        cells += [str(record.step), DASH if seconds is None else duration(seconds)]
        cells.append(number(finite_number(losses[-1]) if len(losses) else None))
        cells += [number(record.score(name) if record.rules == rules else None) for name, rules in scores]
        rows.append(cells)
    return Grid([*head, *(SHORT.get(name, name) + rules for name, rules in scores)], rows, words=3)


# 97.5 % quantiles of Student's t-distribution for 1, 2, ... degrees of freedom.
_QUANTILES = """
12.7062 4.3027 3.1824 2.7764 2.5706 2.4469 2.3646 2.3060 2.2622 2.2281 2.2010 2.1788 2.1604 2.1448 2.1314
2.1199 2.1098 2.1009 2.0930 2.0860 2.0796 2.0739 2.0687 2.0639 2.0595 2.0555 2.0518 2.0484 2.0452 2.0423
"""
T_QUANTILES = [float(quantile) for quantile in _QUANTILES.split()]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Compute the 95 % confidence interval of the mean. For more than 31 values, it is up to 4 % too wide."""
    quantile = T_QUANTILES[min(len(values) - 1, len(T_QUANTILES)) - 1]
    mean, half = statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def repeats(groups: Sequence[Group]) -> Grid | None:
    """Make the table of scores, loss and throughput of groups with several seeds; None without such groups."""
    named = zip(curves.group_names(groups), groups, strict=True)
    rows = [
        row for name, group in named if len({run.results.seed for run in group.runs}) > 1 for row in _rows(name, group)
    ]
    head = ["runs", "figure", "n", "mean", "standard deviation", INTERVAL, "lowest", "highest"]
    return Grid(head, rows, words=2).without_empty() if rows else None


def _rows(row: str, group: Group) -> list[list[str]]:
    figures: dict[str, list[float | None]] = {
        curves.score_name(name) + rules: [run.final_scores.get(name) for run in group.runs if run.rules == rules]
        for name, rules in dict.fromkeys((name, run.rules) for run in group.runs for name in run.final_scores)
    }
    figures["last loss"] = [run.last_loss for run in group.runs]
    figures[f"{group.first.unit}/s"] = [run.windows_per_s for run in group.runs]
    rows = []
    for name, values in figures.items():
        known = [value for value in values if value is not None]
        spread = [DASH] * 4
        if len(known) > 1:
            low, high = interval(known)
            ends = [number(min(known)), number(max(known))]
            between = f"{low:.4g} to {high:.4g}" if len(known) >= comparison.ENOUGH else DASH
            spread = [number(statistics.stdev(known)), between, *ends]
        if known:
            rows.append([row, name, str(len(known)), number(statistics.fmean(known)), *spread])
    return rows
