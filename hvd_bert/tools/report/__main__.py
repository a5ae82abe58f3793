"""Show one run, or compare several: what differs, and the speed-up of those that did the same work.

    hvd-bert report runs/one
    hvd-bert report runs/sweep --out report
    hvd-bert report runs/one runs/two --gbps 25 200 --latency_us 20

With a bandwidth the step of a run is projected to more devices.
RUNS are output folders of `python -m hvd_bert.train`, or folders above them. Exit status: 0 written, 2 bad input.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_bert.config.parser import Parser
from hvd_bert.config.values import Limits
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_OK, UserError, visible
from hvd_bert.storage import written
from hvd_bert.storage.reading import MIB
from hvd_bert.storage.writing import check_folder, make_folder, replacing, writing_to
from hvd_bert.streams import end_when_lost
from hvd_bert.tools.rendering.page import Listing, Page, Picture, Text
from hvd_bert.tools.report import comparison, content, plots, projection, run_page, runs_page
from hvd_bert.tools.report.comparability import Group
from hvd_bert.tools.report.comparison import ScalingTable
from hvd_bert.tools.report.projection import Fusion, Network, Projection
from hvd_bert.tools.runs import reading, record
from hvd_bert.tools.runs.record import Record
from hvd_bert.tools.runs.run import LeftOut

PAGE = "report.html"
CSV_FILES = ("report.csv", "runs.csv", "projection.csv")
INNER_LATENCY_US = 5.0  # between GPUs of a node
POSITIVE = Limits(above=0, maximum=1e9)


def main(argv: list[str] | None = None) -> int:
    """The command. Returns the exit status."""
    try:
        write(make_parser().parse_args(argv))
    except UserError as error:
        print(f"hvd_bert: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return EXIT_OK


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
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("report"),
        help="Folder to write the report to. (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--baseline", metavar="STRATEGY:RANKS",
        help="Runs that speed-ups are relative to."
        " (default: none:1, else the smallest world of horovod, else the smallest)",
    )  # fmt: skip
    group = parser.add_argument_group("projection", "Project to more devices (docs/evidence/scaling.md). Needs --gbps.")
    add = group.add_argument
    add("--gbps", type=float, nargs="+", metavar="N", limits=POSITIVE,
        help="Network bandwidths, in gigabits/s. (default: none)")  # fmt: skip
    add("--latency_us", type=float, default=20.0, limits=Limits(minimum=0, maximum=1e9), metavar="N",
        help="Network latency per message, in microseconds. (default: %(default)g)")  # fmt: skip
    add("--gpus_per_node", type=int, default=1, limits=Limits(minimum=1), metavar="N",
        help="GPUs that share a node's network. (default: %(default)s)")  # fmt: skip
    add("--inner_gbps", type=float, limits=POSITIVE, metavar="N",
        help="Bandwidth between a node's GPUs, in gigabits/s; --gpus_per_node needs it. (default: none)")  # fmt: skip
    return parser


def write(flags: argparse.Namespace) -> None:
    """Read the runs, and write and print the report. Raises UserError."""
    if (flags.gpus_per_node > 1) != (flags.inner_gbps is not None):
        raise UserError(
            "--gpus_per_node and --inner_gbps need each other: GPUs per node, and the bandwidth between them."
        )
    if flags.inner_gbps and not flags.gbps:
        raise UserError("--inner_gbps is for the projection, which also needs the network's bandwidth: add --gbps N.")
    with writing_to("--out", flags.out):
        check_folder(flags.out)
    baseline = comparison.parse_baseline(flags.baseline) if flags.baseline else None
    networks = _networks(flags)
    folders = reading.find(flags.runs)
    records = [record.read(folder) for folder in folders]
    if len(records) == 1 and not networks and not baseline:
        _write_files(flags.out, run_page.page_of(records[0]), dict.fromkeys(CSV_FILES, ()))
        _print("\n".join([*run_page.summary(records[0]), f"The page: {flags.out / PAGE}"]))
    else:
        _write_comparison(folders, records, baseline, networks, flags)


def _write_comparison(
    folders: Sequence[Path],
    records: Sequence[Record],
    baseline: tuple[str, int] | None,
    networks: Sequence[tuple[str, Network]],
    flags: argparse.Namespace,
) -> None:
    """Compare runs, or project one."""
    runs, left_out = reading.read_all(folders, reading.unrun(flags.runs))
    kept, other_hardware = comparison.same_hardware(runs) if runs else ([], [])
    left_out += other_hardware
    groups = comparison.grouped(kept)
    tables = comparison.tables(groups, baseline)
    baselines = projection.baselines(tables, groups, baseline)
    projections = _projections(baselines, networks)
    left_out += _without_table(groups, tables, projections, flags.baseline)
    compared = [line for table in tables for line in table.lines if line.speedup and line.group is not table.baseline]
    reasons = content.reasons(tables, left_out)
    if (networks or baseline) and not compared and not any(projected.series for projected in projections):
        raise UserError(_no_result(reasons, projections, flags))
    alone = len(records) == 1
    shown = [table for table in tables if any(line in compared for line in table.lines)]
    page = run_page.page_of(records[0]) if alone else runs_page.page_of(records, kept, groups, shown, reasons)
    for projected in projections:
        _add_projection(page, projected, projected.measured(tables), flags)
    if compared or projections:
        page.add(Text("Definitions", 2), Listing(content.definitions()))
    rows = (content.table_rows(tables), content.run_rows(kept, left_out), content.projection_rows(projections))
    _write_files(flags.out, page, dict(zip(CSV_FILES, rows, strict=True)))
    if not compared:
        _print(runs_page.overview(records).for_terminal() + "\n")
    _print_summary(shown, reasons, projections, flags.out)


def _no_result(reasons: Sequence[str], projections: Sequence[Projection], flags: argparse.Namespace) -> str:
    """The error if there is neither a speed-up nor a projection: why, and what would help."""
    lines = ["No two of these runs can be compared, so there is no speed-up to report:", *reasons]
    lines += [_projection_line(projected) for projected in projections]
    if flags.gbps and not projections:
        lines.append(f"Projection not possible: none of these runs is {flags.baseline or 'usable'}.")
    if not flags.gbps:
        lines.append("One run is enough for a projection to more devices: add --gbps N.")
    return "\n  ".join(lines)


def _projections(baselines: Sequence[Group], networks: Sequence[tuple[str, Network]]) -> list[Projection]:
    """Strong and weak scaling from each of `baselines`; empty if no projection was requested."""
    if not networks:
        return []
    return [found for baseline in baselines for found in projection.both_kinds(baseline, networks)]


def _without_table(
    groups: Sequence[Group], tables: Sequence[ScalingTable], projections: Sequence[Projection], baseline: str | None
) -> list[LeftOut]:
    shown = {id(line.group) for table in tables for line in table.lines}
    shown |= {id(projected.baseline) for projected in projections if projected.series}
    reason = "no other run has the same global batch, or the same batch per device on other devices"
    if baseline:
        reason += f", with a baseline of {baseline}"
    return [LeftOut(run.name, reason) for group in groups if id(group) not in shown for run in group.runs]


def _networks(flags: argparse.Namespace) -> list[tuple[str, Network]]:
    """The networks to project for, by name."""
    inner = projection.link_of(flags.inner_gbps, INNER_LATENCY_US) if flags.inner_gbps else None
    return [
        (f"{gbps:g} Gb/s", Network(projection.link_of(gbps, flags.latency_us), inner, flags.gpus_per_node))
        for gbps in flags.gbps or []
    ]


def _add_projection(page: Page, projected: Projection, table: ScalingTable | None, flags: argparse.Namespace) -> None:
    """Add a projection with the measured points of `table`, or the reason why there is none."""
    page.add(Text(f"Projection. {projected.title}", 2))
    if projected.step is None:
        page.add(Text(f"{projected.ends[0].upper()}{projected.ends[1:]}."))
        return
    fusion = Fusion()
    notes = [
        f"{flags.latency_us:g} us per message; fusion of up to {fusion.threshold_bytes / MIB:g} MiB, cycle time"
        f" {fusion.cycle_s * 1e3:g} ms."
    ]
    if flags.inner_gbps:
        inside = f"{flags.inner_gbps:g} Gb/s and {INNER_LATENCY_US:g} us inside"
        notes.append(f"Nodes of {flags.gpus_per_node} GPUs, {inside}; the bandwidths above are per node.")
    notes.append(
        f"On 2 devices or more {projected.step.overhead_s * 1e3:.3g} ms per step are added"
        f" ({projection.NS_PER_WEIGHT:g} ns per weight), which published runs need beyond the network."
    )
    notes.append("Not modelled: stragglers that become slower with the number of devices, and ranks that share cores.")
    name = runs_page.free_name(page, f"{projected.kind}_{projected.size:g}_projected")
    page.add(
        Text(
            f"Computed from the step of {projected.baseline.name} with the model of docs/evidence/scaling.md: speed-up"
            f" over one device (efficiency). The projection {projected.ends}."
        ),
        content.projection_grid(projected),
        Picture(name, plots.projected(projected, table), f"Projected. {projected.title}"),
        Listing(content.projection_assumptions(projected, projected.step, table, notes)),
    )


def _write_files(folder: Path, page: Page, csv_files: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Replace the files of an earlier report in this folder. Raises UserError if other files are in the way."""
    contents = {picture.name: picture.png for picture in page.pictures}
    contents |= {"report.md": page.as_markdown().encode(), PAGE: page.as_html().encode()}
    contents |= {name: _csv(rows).encode(errors="backslashreplace") for name, rows in csv_files.items() if rows}
    with writing_to("--out", folder):
        make_folder(folder)
        written.claim(folder, *contents, command="report")
        for name, content_of in contents.items():
            with replacing(folder / name) as partial:
                partial.write_bytes(content_of)
        # One from an earlier report would contradict the page.
        written.remove(folder, [name for name, rows in csv_files.items() if not rows], "report")


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _print_summary(
    tables: Sequence[ScalingTable], reasons: Sequence[str], projections: Sequence[Projection], folder: Path
) -> None:
    """Print the tables, what is left out, the projections, and where the report is."""
    for table in tables:
        _print(f"{table.title} (baseline: {table.baseline.name})\n{content.speedups(table).for_terminal()}\n")
    if reasons:
        _print("Without a speed-up:\n" + "\n".join(f"  {reason}" for reason in reasons) + "\n")
    for projected in projections:
        _print(_projection_line(projected))
    _print(f"In {folder}: {PAGE}, report.md, the plots, and the figures as CSV.")


def _print(text: str) -> None:
    """Print a text in which names of runs and devices are no commands to the terminal."""
    print(visible(text))


def _projection_line(projected: Projection) -> str:
    return f"Projection of {projected.baseline.name}. {projected.title}: {projected.ends}."


if __name__ == "__main__":
    end_when_lost()
    sys.exit(main())
