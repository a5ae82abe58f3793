"""The page of several runs: side by side, what differs, and the speed-ups of those that can be compared."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_bert.rendering.page import DASH, Figures, Grid, Listing, Page, Picture, Text
from hvd_bert.tools.report import content, curves, plots, repeats, run_page, settings
from hvd_bert.tools.report.comparability import Group
from hvd_bert.tools.report.comparison import Table
from hvd_bert.tools.runs.record import Record, number_of
from hvd_bert.tools.runs.run import Run


def page_of(
    records: Sequence[Record],
    runs: Sequence[Run],
    groups: Sequence[Group],
    tables: Sequence[Table],
    reasons: Sequence[str],
) -> Page:
    """The page, without projections.

    `runs`: those whose speeds can be compared, in `groups`. `tables`: those with a speed-up.
    """
    page = Page(f"Report on {len(records)} runs")
    page.add(Figures(_figures(records, runs)))
    summary = content.summary(tables)
    if summary:
        page.add(Listing(summary))
    else:
        page.add(Text("No two of these runs can be compared for speed, so there are no measured speed-ups."))
    caveats = content.caveats(tables, runs) if tables else []
    if caveats:
        page.add(Text("Caveats", 2), Listing(caveats))
    page.add(Text("Runs", 2), overview(records))
    differing = settings.differences(records)
    same = "All recorded settings, inputs and versions are the same."
    page.add(Text("What differs", 2), differing if len(differing.head) > 1 else Text(same))
    for table in tables:
        _add_table(page, table)
    repeated = repeats.repeats(groups)
    if repeated:
        page.add(Text("Repeats over seeds", 2), repeated)
        page.add(
            Text("The 95 % interval of the mean is by the t-distribution: it assumes normally distributed values.")
        )
    page.add(Text("Curves", 2), *curves.of_runs(records))
    if reasons:
        page.add(Text("Without a speed-up", 2), Listing(reasons))
    return page


def _figures(records: Sequence[Record], runs: Sequence[Run]) -> list[tuple[str, str]]:
    found = [("runs", str(len(records)))]
    for state in ("finished", "running", "ended"):
        count = sum(record.state == state for record in records)
        if count and count < len(records):
            found.append((state if state != "ended" else "not finished", str(count)))
    if runs:
        found += [("hardware", runs[0].device_name), ("torch", runs[0].versions.get("torch", "unknown"))]
    return found


def overview(records: Sequence[Record]) -> Grid:
    """A row per run with its main figures."""
    scores = list(dict.fromkeys(name for record in records for name in record.score_names))
    head = ["run", "state", "strategy", "ranks", "step", "time", "last loss"]
    rows = []
    for record in records:
        losses, seconds = record.steps["loss"], record.number("train_runtime")
        cells = [record.name, record.state if record.state != "ended" else "not finished"]
        cells += [settings.shown(record.facts.get(key)) for key in ("strategy", "world_size")]
        cells += [str(record.step), DASH if seconds is None else run_page.duration(seconds)]
        cells.append(content.number(number_of(losses[-1]) if len(losses) else None, ".4g"))
        cells += [content.number(record.score(name), ".4g") for name in scores]
        rows.append(cells)
    return Grid([*head, *(content.SHORT.get(name, name) for name in scores)], rows, words=3)


def _add_table(page: Page, table: Table) -> None:
    page.add(Text(table.title, 2), Text(f"Baseline: {table.baseline.name}."), content.speedups(table))
    if table.scales:
        alt = f"{table.title}: speed-up, efficiency and more"
        page.add(Picture(free_name(page, table.slug), plots.scaling(table), alt))
    page.add(content.costs(table))
    page.add(Picture(free_name(page, f"{table.slug}_loss"), plots.losses(table), f"{table.title}: loss curves"))


def free_name(page: Page, stem: str) -> str:
    """A file name that no other plot has: several tables may have the same batch, but other work or baselines."""
    taken = {picture.name for picture in page.pictures}
    names = [f"{stem}.png", *(f"{stem}_{number}.png" for number in range(2, len(taken) + 2))]
    return next(name for name in names if name not in taken)
