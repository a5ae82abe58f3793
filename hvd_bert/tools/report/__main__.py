"""Show one run, or compare several: differing settings, and speed-ups of runs with the same work.

    hvd-bert report runs/one
    hvd-bert report runs/sweep --out report
    hvd-bert report runs/one runs/two

RUNS are output folders of `python -m hvd_bert.train`, or folders above them. Exit status: 0 written, 2 bad input.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, which take seconds
    from hvd_bert.startup import start_command

    start_command()

import argparse
import csv
import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_bert.config.parser import Parser
from hvd_bert.errors import UserError, visible
from hvd_bert.startup import run_command
from hvd_bert.storage.writing import writing_to
from hvd_bert.streams import end_when_lost
from hvd_bert.tools.rendering import counted, report_files
from hvd_bert.tools.rendering.page import Page
from hvd_bert.tools.rendering.report_files import CSV_FILES, LATEX, PAGE
from hvd_bert.tools.report import comparison, run_page, runs_page, setup, tables
from hvd_bert.tools.report.comparability import Group
from hvd_bert.tools.report.comparison import ScalingTable
from hvd_bert.tools.runs import finding, record
from hvd_bert.tools.runs.finding import Excluded
from hvd_bert.tools.runs.record import Record


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    return run_command(lambda: write(make_parser().parse_args(argv)))


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the report's flags."""
    parser = Parser(prog="hvd-bert report")
    parser.description = (
        "Show one run, finished or running, or compare several: curves, scores, settings and speed-ups, as an HTML page"
        " and tables."
    )
    parser.add_argument(
        "runs", metavar="RUNS", nargs="+", type=Path, help="Output folders of trainings, or folders above them."
    )
    out = (
        "Folder to write the report to. (default: report in a single run's folder; report-with-OTHER in the first of"
        " several RUNS; report for a folder above several runs)"
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help=out)
    parser.add_argument("--overwrite", action="store_true", help="Replace a report in --out DIR. (default: False)")
    baseline = (
        "Runs that speed-ups are relative to. (default: none:1, else the smallest world of horovod, else the smallest)"
    )
    parser.add_argument("--baseline", metavar="STRATEGY:RANKS", help=baseline)
    return parser


def write(flags: argparse.Namespace) -> None:
    """Read the runs, then write and print the report. Raises UserError."""
    folders = finding.find(flags.runs)
    if flags.out is None:
        flags.out = _default_out(flags.runs, folders)
        # A report in a run's own folder may be replaced: its name tells which runs it has.
        flags.overwrite |= len(folders) == 1 or len(folders) == len(flags.runs) == 2
    with writing_to("--out", flags.out):
        report_files.check(flags.out, flags.overwrite)
    baseline = comparison.parse_baseline(flags.baseline) if flags.baseline else None
    records = [record.read(folder) for folder in folders]
    if len(records) == 1 and not baseline:
        _write_files(flags, run_page.make_page(records[0]), {})
        print(visible("\n".join([*run_page.summary(records[0]), f"HTML page: {flags.out / PAGE}"])))
    else:
        _write_comparison(records, baseline, flags)


def _default_out(paths: Sequence[Path], folders: Sequence[Path]) -> Path:
    """Return the folder of a report: in the run, in the first of several paths, else `report`."""
    if len(folders) == 1:
        return folders[0] / "report"
    if len(paths) == 1:
        return Path("report")
    _, other, *more = finding.short_names([str(path) for path in paths])
    rest = f"-and-{len(more)}-more" if more else ""
    return paths[0] / f"report-with-{other.replace(os.sep, '-')}{rest}"


def _write_comparison(records: Sequence[Record], baseline: tuple[str, int] | None, flags: argparse.Namespace) -> None:
    commands, by_sweeps = finding.sweeps(flags.runs)
    runs, excluded = comparison.comparable(records, by_sweeps)
    groups = comparison.grouped(runs)
    scaling = comparison.tables(groups, baseline)
    excluded += _without_table(groups, scaling, flags.baseline)
    reasons = tables.reasons(scaling, excluded)
    shown = [table for table in scaling if len(table.measured) > 1]
    if baseline and not shown:
        no_result = "No two of these runs can be compared, so there is no speed-up to report:"
        raise UserError("\n  ".join([no_result, *reasons]))
    used = [run for group in groups for run in group.runs] or records
    page = runs_page.make_page(records, groups, shown, reasons, setup.blocks(used, commands))
    rows = (tables.table_rows(scaling), tables.run_rows(runs, excluded))
    texts = {name: _csv(found) for name, found in zip(CSV_FILES, rows, strict=True) if found}
    if shown:
        texts[LATEX] = tables.as_latex(shown, setup.paragraph(used))
    _write_files(flags, page, texts)
    if len(records) == 2:
        scores = runs_page.verdict(*records)
        print(visible(f"{scores.label} {scores.text}\n"))
    if not shown:
        print(visible(runs_page.overview(records).for_terminal() + "\n"))
    for table in shown:
        speedups = tables.speedups(table, tables.BRIEF).for_terminal()
        print(visible(f"{table.title} (baseline: {table.baseline.name})\n{speedups}\n"))
    if reasons:
        print(visible("\n  ".join(["Without a speed-up:", *reasons]) + "\n"))
    plots = [f"{counted(len(page.pictures), 'plot')} as PNG, SVG and PDF"] if page.pictures else []
    print(visible(f"In {flags.out}: {', '.join([PAGE, *texts, *plots])}."))


def _without_table(groups: Sequence[Group], scaling: Sequence[ScalingTable], baseline: str | None) -> list[Excluded]:
    shown = {line.group for table in scaling for line in table.lines}
    reason = "no other run has the same global batch, or the same batch per device on other devices"
    if baseline:
        reason += f", with a baseline of {baseline}"
    return [(run.name, reason) for group in groups if group not in shown for run in group.runs]


def _write_files(flags: argparse.Namespace, page: Page, texts: Mapping[str, str]) -> None:
    """Write the page, its pictures and other files. Raises UserError."""
    contents = {PAGE: page.as_html().encode()}
    contents |= {name: text.encode(errors="backslashreplace") for name, text in texts.items()}
    for picture in page.pictures:
        contents |= {picture.name: picture.png, **picture.others}
    with writing_to("--out", flags.out):
        report_files.write(flags.out, contents, flags.overwrite)


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


if __name__ == "__main__":
    end_when_lost()
    sys.exit(main())
