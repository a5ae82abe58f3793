"""Show one run, or compare several: what differs, and the speed-up of those that did the same work.

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
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_bert.config.parser import Parser
from hvd_bert.errors import UserError, visible
from hvd_bert.startup import run_command
from hvd_bert.storage.writing import writing_to
from hvd_bert.streams import end_when_lost
from hvd_bert.tools.rendering import counted, files
from hvd_bert.tools.rendering.files import CSV_FILES, LATEX, MARKDOWN, PAGE
from hvd_bert.tools.rendering.page import Listing, Page, Text
from hvd_bert.tools.report import comparison, content, run_page, runs_page, setup
from hvd_bert.tools.report.comparability import Group
from hvd_bert.tools.report.comparison import ScalingTable
from hvd_bert.tools.runs import reading
from hvd_bert.tools.runs.reading import Excluded
from hvd_bert.tools.runs.record import Record


def main(argv: list[str] | None = None) -> int:
    """The command. Returns the exit status."""
    return run_command(lambda: write(make_parser().parse_args(argv)))


def make_parser() -> argparse.ArgumentParser:
    """The parser of the report's flags."""
    parser = Parser(prog="hvd-bert report")
    parser.description = (
        "Show one run, also one that is still going, or compare several: curves, scores, settings and speed-ups, as an"
        " HTML page and tables."
    )
    parser.add_argument(
        "runs", metavar="RUNS", nargs="+", type=Path, help="Output folders of trainings, or folders above them."
    )
    out = "Folder to write the report to. (default: of one run, its folder report; else report, in this folder)"
    parser.add_argument("--out", metavar="DIR", type=Path, help=out)
    parser.add_argument("--overwrite", action="store_true", help="Replace a report in --out DIR. (default: False)")
    baseline = (
        "Runs that speed-ups are relative to. (default: none:1, else the smallest world of horovod, else the smallest)"
    )
    parser.add_argument("--baseline", metavar="STRATEGY:RANKS", help=baseline)
    return parser


def write(flags: argparse.Namespace) -> None:
    """Read the runs, and write and print the report. Raises UserError."""
    if flags.out is None:
        folder, *others = reading.find(flags.runs)
        flags.out = Path("report") if others else folder / "report"
        flags.overwrite |= not others  # the page in a run's own folder may always be replaced
    with writing_to("--out", flags.out):
        files.check(flags.out, flags.overwrite)
    baseline = comparison.parse_baseline(flags.baseline) if flags.baseline else None
    records = [reading.read(folder, strict=False) for folder in reading.find(flags.runs)]
    if len(records) == 1 and not baseline:
        _write_files(flags, run_page.make_page(records[0]), dict.fromkeys(CSV_FILES, ()))
        print(visible("\n".join([*run_page.summary(records[0]), f"The page: {flags.out / PAGE}"])))
    else:
        _write_comparison(records, baseline, flags)


def _write_comparison(records: Sequence[Record], baseline: tuple[str, int] | None, flags: argparse.Namespace) -> None:
    """Compare runs."""
    runs, excluded = reading.comparable(records, reading.excluded_by_sweeps(flags.runs))
    kept, other_hardware = comparison.same_hardware(runs) if runs else ([], [])
    excluded += other_hardware
    groups = comparison.grouped(kept)
    tables = comparison.tables(groups, baseline)
    excluded += _without_table(groups, tables, flags.baseline)
    compared = [line for table in tables for line in table.lines if line.speedup and line.group is not table.baseline]
    reasons = content.reasons(tables, excluded)
    if baseline and not compared:
        no_result = "No two of these runs can be compared, so there is no speed-up to report:"
        raise UserError("\n  ".join([no_result, *reasons]))
    shown = [table for table in tables if any(line in compared for line in table.lines)]
    by_name = {record.name: record for record in records}
    used = [by_name[run.name] for group in groups for run in group.runs] or records
    set_up = setup.blocks(used, reading.sweep_commands(flags.runs))
    page = runs_page.make_page(records, groups, shown, reasons, set_up)
    if compared:
        page.add(Text("Definitions", 2), Listing(content.definitions()))
    rows = (content.table_rows(tables), content.run_rows(kept, excluded))
    latex = content.as_latex(shown, setup.paragraph(used))
    written = _write_files(flags, page, dict(zip(CSV_FILES, rows, strict=True)), latex)
    if not compared:
        print(visible(runs_page.overview(records).for_terminal() + "\n"))
    _print_summary(shown, reasons)
    print(visible(f"In {flags.out}: {', '.join(written)}."))


def _without_table(groups: Sequence[Group], tables: Sequence[ScalingTable], baseline: str | None) -> list[Excluded]:
    shown = {id(line.group) for table in tables for line in table.lines}
    reason = "no other run has the same global batch, or the same batch per device on other devices"
    if baseline:
        reason += f", with a baseline of {baseline}"
    return [Excluded(run.name, reason) for group in groups if id(group) not in shown for run in group.runs]


def _write_files(
    flags: argparse.Namespace, page: Page, csv_files: Mapping[str, Sequence[dict[str, Any]]], latex: str = ""
) -> list[str]:
    """Write the page, its pictures and the tables that have rows. Returns what was written. Raises UserError."""
    contents = {picture.name: picture.png for picture in page.pictures}
    contents |= {name: data for picture in page.pictures for name, data in picture.others.items()}
    contents |= {LATEX: latex.encode(errors="backslashreplace")} if latex else {}
    contents |= {MARKDOWN: page.as_markdown().encode(), PAGE: page.as_html().encode()}
    contents |= {name: _csv(rows).encode(errors="backslashreplace") for name, rows in csv_files.items() if rows}
    with writing_to("--out", flags.out):
        files.write(flags.out, contents, flags.overwrite)
    tables = [name for name in (*CSV_FILES, LATEX) if name in contents]
    plots = [f"{counted(len(page.pictures), 'plot')} as PNG, SVG and PDF"] if page.pictures else []
    return [PAGE, MARKDOWN, *tables, *plots]


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _print_summary(tables: Sequence[ScalingTable], reasons: Sequence[str]) -> None:
    """Print the tables, and what is left out."""
    for table in tables:
        rows = content.speedups(table, brief=True).for_terminal()
        print(visible(f"{table.title} (baseline: {table.baseline.name})\n{rows}\n"))
    if reasons:
        print(visible("Without a speed-up:\n" + "\n".join(f"  {reason}" for reason in reasons) + "\n"))


if __name__ == "__main__":
    end_when_lost()
    sys.exit(main())
