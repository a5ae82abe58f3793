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
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_OK, UserError
from hvd_bert.rendering.page import Listing, Page, Picture, Text
from hvd_bert.rendering.text import visible
from hvd_bert.storage import written
from hvd_bert.storage.reading import parse_json, read_text
from hvd_bert.storage.writing import check_folder, make_folder, replacing, writing_to
from hvd_bert.streams import end_when_lost
from hvd_bert.tools.report import comparison, content, plots, projection, run_page, runs_page
from hvd_bert.tools.report.comparability import Group
from hvd_bert.tools.report.comparison import ScalingTable
from hvd_bert.tools.report.flags import check, make_parser
from hvd_bert.tools.report.projection import Fusion, Network, Projection
from hvd_bert.tools.runs import reading, record
from hvd_bert.tools.runs.record import Record
from hvd_bert.tools.runs.run import LeftOut

PAGE = "report.html"
CSV_FILES = ("report.csv", "runs.csv", "projection.csv")
# horovodrun puts a mark before each piece of output that it reads, even in the middle of a long line.
LAUNCHERS_MARK = re.compile(r"\[\d+(,\d+)?\]<std(out|err)>:")


def main(argv: list[str] | None = None) -> int:
    """The command. Returns the exit status."""
    try:
        write(make_parser().parse_args(argv))
    except UserError as error:
        print(f"hvd_bert: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return EXIT_OK


def write(flags: argparse.Namespace) -> None:
    """Read the runs, and write and print the report. Raises UserError."""
    check(flags)
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
    projections = _projections(projection.baselines(tables, groups, baseline), networks, flags)
    left_out += _without_table(groups, tables, projections, flags.baseline)
    compared = [line for table in tables for line in table.lines if line.speedup and line.group is not table.baseline]
    reasons = content.reasons(tables, left_out)
    if (networks or baseline) and not compared and not any(projected.series for projected in projections):
        raise UserError(_no_result(reasons, projections, flags))
    alone = len(records) == 1
    shown = [table for table in tables if any(line in compared for line in table.lines)]
    page = run_page.page_of(records[0]) if alone else runs_page.page_of(records, kept, groups, shown, reasons)
    for projected in projections:
        _add_projection(page, projected, projected.measured(tables), networks, flags)
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
    if (flags.gbps or flags.doctor) and not projections:
        lines.append(f"Projection not possible: none of these runs is {flags.baseline or 'usable'}.")
    if not (flags.gbps or flags.doctor):
        lines.append("One run is enough for a projection to more devices: add --gbps N or --doctor FILE.")
    return "\n  ".join(lines)


def _projections(
    baselines: Sequence[Group], networks: Sequence[tuple[str, Network]], flags: argparse.Namespace
) -> list[Projection]:
    """Strong and weak scaling from each of `baselines`; empty if no projection was requested."""
    if not networks:
        return []
    fusion = Fusion(flags.fusion_mb * 2**20, flags.cycle_ms / 1000)
    return [
        projected
        for baseline in baselines
        for projected in projection.both_kinds(
            baseline,
            networks,
            fusion,
            flags.most_devices,
            flags.parameters,
            flags.backward_share,
            flags.ns_per_weight,
        )
    ]


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
    """The networks to project for, by name. Raises UserError."""
    inner = projection.link_of(flags.inner_gbps, flags.inner_latency_us) if flags.inner_gbps else None
    links = [(f"{gbps:g} Gb/s", projection.link_of(gbps, flags.latency_us)) for gbps in flags.gbps or []]
    if flags.doctor:
        try:
            text = LAUNCHERS_MARK.sub("", read_text(flags.doctor))
            report = parse_json(text[max(0, text.find("{")) :])
            link = projection.doctors_link(report, flags.cycle_ms / 1000)
        except OSError as error:
            raise UserError(f"--doctor {flags.doctor}: cannot be read: {error.strerror or error}.") from None
        except UserError as error:
            raise UserError(f"--doctor {flags.doctor} {error}") from None
        except ValueError:
            raise UserError(f"--doctor {flags.doctor}: is not the output of `hvd-bert doctor --json`.") from None
        links.append((f"{link.bytes_per_s * 8e-9:.3g} Gb/s (doctor)", link))
    return [(name, Network(link, inner, flags.gpus_per_node)) for name, link in links]


def _add_projection(
    page: Page,
    projected: Projection,
    table: ScalingTable | None,
    networks: Sequence[tuple[str, Network]],
    flags: argparse.Namespace,
) -> None:
    """Add a projection with the measured points of `table`, or the reason why there is none."""
    page.add(Text(f"Projection. {projected.title}", 2))
    if projected.step is None:
        page.add(Text(f"{projected.ends[0].upper()}{projected.ends[1:]}."))
        return
    latencies = ", ".join(f"{name}: {network.outer.latency_s * 1e6:.3g} us per message" for name, network in networks)
    notes = [f"{latencies}; fusion of up to {flags.fusion_mb:g} MiB, cycle time {flags.cycle_ms:g} ms."]
    if flags.inner_gbps:
        inside = f"{flags.inner_gbps:g} Gb/s and {flags.inner_latency_us:g} us inside"
        notes.append(f"Nodes of {flags.gpus_per_node} GPUs, {inside}; the bandwidths above are per node.")
    notes.append(
        f"On 2 devices or more {projected.step.overhead_s * 1e3:.3g} ms per step are added ({flags.ns_per_weight:g} ns"
        " per weight, --ns_per_weight), which published runs need beyond the network."
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
