"""A report of runs: which strategy is how much faster on how many devices, and whether that can be believed.

    python -m hvd_bert.report runs/sweep --out report
    python -m hvd_bert.report runs/one runs/two --out report --gbps 25 200 --latency_us 20

With a bandwidth one run suffices: there is nothing to compare, but its step is projected to more devices.
RUNS are output folders of `python -m hvd_bert.train`, or folders above them. Exit status: 0 written, 2 bad input.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_OK, UserError
from hvd_bert.rendering.page import Listing, Page, Picture, Text
from hvd_bert.report import comparison, content, plots, projection
from hvd_bert.report.comparability import Group, Tolerance
from hvd_bert.report.comparison import Table
from hvd_bert.report.flags import check, make_parser
from hvd_bert.report.projection import Fusion, Network, Projection
from hvd_bert.runs import reading
from hvd_bert.runs.run import LeftOut, Run

# horovodrun puts one before each piece of output that it reads: in the middle of a long line, too.
LAUNCHERS_MARK = re.compile(r"\[\d+(,\d+)?\]<std(out|err)>:")


def main(argv: list[str] | None = None) -> int:
    """The command. Returns the exit status."""
    flags = make_parser().parse_args(argv)
    try:
        write(flags)
    except UserError as error:
        print(f"hvd_bert: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return EXIT_OK


def write(flags: argparse.Namespace) -> None:
    """Read, compare, write, print. Raises UserError."""
    check(flags)
    baseline = comparison.parse_baseline(flags.baseline) if flags.baseline else None
    networks = _networks(flags)
    runs, left_out = reading.read_all(reading.find(flags.runs), reading.unrun(flags.runs))
    kept, other_hardware = comparison.same_hardware(runs) if runs else ([], [])
    left_out += other_hardware
    groups = comparison.grouped(kept)
    tolerance = Tolerance(flags.loss_tolerance, flags.final_loss_tolerance)
    tables = comparison.tables(groups, baseline, tolerance)
    projections = _projections(projection.baselines(tables, groups, baseline), networks, flags)
    left_out += _without_table(groups, tables, projections, flags.baseline)
    compared = [line for table in tables for line in table.lines if line.speedup and line.group is not table.baseline]
    reasons = content.reasons(tables, left_out)
    if not compared and not any(held.series for held in projections):
        raise UserError(_nothing(reasons, projections, flags))
    page = _page(tables, kept, reasons)
    for held in projections:
        _project(page, held, held.measured(tables), networks, flags)
    page.add(Text("How the figures come about", 2), Listing(content.definitions(tolerance)))
    csv_files = {
        "report.csv": content.table_rows(tables),
        "runs.csv": content.run_rows(kept, left_out),
        "projection.csv": content.projection_rows(projections),
    }
    _write_files(flags.out, page, csv_files)
    _tell(tables, reasons, projections, flags.out)


def _nothing(reasons: Sequence[str], projections: Sequence[Projection], flags: argparse.Namespace) -> str:
    """For runs of which there is no speed-up and no projection: why, and what would help."""
    said = ["No two of these runs can be compared, so there is no speed-up to report:", *reasons]
    said += [f"Projection of {held.baseline.name}. {held.title}: {held.ends}." for held in projections]
    if (flags.gbps or flags.doctor) and not projections:
        said.append(f"Projection: not possible: none of these runs is {flags.baseline or 'usable'}.")
    if not (flags.gbps or flags.doctor):
        said.append("One run suffices for a projection to more devices: give --gbps N or --doctor FILE.")
    return "\n  ".join(said)


def _projections(
    baselines: Sequence[Group], networks: Sequence[tuple[str, Network]], flags: argparse.Namespace
) -> list[Projection]:
    """Strong and weak scaling from each of `baselines`; empty where no projection is asked for."""
    if not networks:
        return []
    fusion = Fusion(flags.fusion_mb * 2**20, flags.cycle_ms / 1000)
    return [
        held
        for baseline in baselines
        for held in projection.both_kinds(
            baseline, networks, fusion, flags.most_devices, flags.parameters, flags.backward_share
        )
    ]


def _without_table(
    groups: Sequence[Group], tables: Sequence[Table], projections: Sequence[Projection], baseline: str | None
) -> list[LeftOut]:
    shown = {id(line.group) for table in tables for line in table.lines}
    shown |= {id(held.baseline) for held in projections if held.series}
    why = "no other run has its global batch, or its batch per device on other devices"
    if baseline:
        why += f", together with {baseline}"
    return [LeftOut(run.name, why) for group in groups if id(group) not in shown for run in group.runs]


def _page(tables: Sequence[Table], runs: Sequence[Run], reasons: Sequence[str]) -> Page:
    page = Page("Speed-up report")
    hardware = f"{runs[0].device_name}; torch {runs[0].versions.get('torch', 'unknown')}"
    nothing = "No two of these runs can be compared, so there is no speed-up but the projected one."
    summary = content.summary(tables) or [nothing]
    page.add(Text(f"{len(runs)} run{'s' * (len(runs) > 1)} on {hardware}."), Listing(summary))
    remarks = content.remarks(tables, runs)
    if remarks:
        page.add(Text("Before you believe it", 2), Listing(remarks))
    for table in tables:
        page.add(Text(table.title, 2), Text(f"Baseline: {table.baseline.name}."), content.speedups(table))
        if table.scales:
            alt = f"{table.title}: speed-up, efficiency and more"
            page.add(Picture(_free(page, table.slug), plots.scaling(table), alt))
        page.add(content.costs(table))
        page.add(Picture(_free(page, f"{table.slug}_loss"), plots.losses(table), f"{table.title}: loss curves"))
    if reasons:
        page.add(Text("Left out, and why", 2), Listing(reasons))
    return page


def _free(page: Page, stem: str) -> str:
    """A picture's file name that no other has: several tables may be of one batch, with other work or baselines."""
    taken = {picture.name for picture in page.pictures}
    names = [f"{stem}.png", *(f"{stem}_{number}.png" for number in range(2, len(taken) + 2))]
    return next(name for name in names if name not in taken)


def _networks(flags: argparse.Namespace) -> list[tuple[str, Network]]:
    """The networks to project for, with their names. Raises UserError."""
    inner = projection.link_of(flags.inner_gbps, flags.inner_latency_us) if flags.inner_gbps else None
    links = [(f"{gbps:g} Gb/s", projection.link_of(gbps, flags.latency_us)) for gbps in flags.gbps or []]
    if flags.doctor:
        try:
            text = flags.doctor.read_text(encoding="utf-8")
            text = LAUNCHERS_MARK.sub("", text)
            report = json.loads(text[max(0, text.find("{")) :])
            link, _ = projection.doctors_link(report, flags.cycle_ms / 1000)
        except OSError as error:
            raise UserError(f"--doctor {flags.doctor}: cannot be read: {error.strerror or error}.") from None
        except UserError as error:
            raise UserError(f"--doctor {flags.doctor} {error}") from None
        except ValueError:
            raise UserError(f"--doctor {flags.doctor}: is no JSON of `python -m hvd_bert.doctor --json`.") from None
        links.append((f"{link.bytes_per_s * 8e-9:.3g} Gb/s (doctor)", link))
    return [(name, Network(link, inner, flags.gpus_per_node)) for name, link in links]


def _project(
    page: Page,
    held: Projection,
    table: Table | None,
    networks: Sequence[tuple[str, Network]],
    flags: argparse.Namespace,
) -> None:
    """Add a projection, beside the points of `table`, or why there is none."""
    page.add(Text(f"Projection. {held.title}", 2))
    if held.step is None:
        page.add(Text(f"{held.ends[0].upper()}{held.ends[1:]}."))
        return
    latencies = ", ".join(f"{name}: {network.outer.latency_s * 1e6:.3g} us a message" for name, network in networks)
    notes = [f"{latencies}; at most {flags.fusion_mb:g} MiB at once, a cycle of {flags.cycle_ms:g} ms."]
    if flags.inner_gbps:
        inside = f"{flags.inner_gbps:g} Gb/s and {flags.inner_latency_us:g} us inside"
        notes.append(f"Nodes of {flags.gpus_per_node} GPUs, {inside}; the bandwidths above are a whole node's.")
    notes.append("Left out: ranks that wait for slower ones, and what communication takes from computing.")
    name = _free(page, f"{held.kind}_{held.size:g}_projected")
    page.add(
        Text(
            f"On paper, by the model of docs/evidence/scaling.md, from the step of {held.baseline.name}: speed-up"
            " over one"
            f" device (efficiency). The projection {held.ends}."
        ),
        content.projection_grid(held),
        Picture(name, plots.projected(held, table), f"Projected. {held.title}"),
        Listing(content.projection_assumptions(held, held.step, table, notes)),
    )


def _write_files(folder: Path, page: Page, csv_files: dict[str, list[dict[str, Any]]]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in page.pictures:
            (folder / picture.name).write_bytes(picture.png)
        (folder / "report.md").write_text(page.as_markdown(), encoding="utf-8")
        (folder / "report.html").write_text(page.as_html(), encoding="utf-8")
        for name, rows in csv_files.items():
            if rows:
                _write_csv(folder / name, rows)
            else:  # an earlier report's would contradict the page
                (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written: {error.strerror or error}.") from None


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _tell(tables: Sequence[Table], reasons: Sequence[str], projections: Sequence[Projection], folder: Path) -> None:
    """For the terminal: the tables, what is left out, what is projected, and where the rest is."""
    for table in tables:
        print(f"{table.title} (baseline: {table.baseline.name})\n{content.speedups(table).for_terminal()}\n")
    if reasons:
        print("Left out, and why:\n" + "\n".join(f"  {reason}" for reason in reasons) + "\n")
    for held in projections:
        print(f"Projection of {held.baseline.name}. {held.title}: {held.ends}.")
    print(f"In {folder}: report.html, report.md, the pictures, and the figures as CSV.")


if __name__ == "__main__":
    sys.exit(main())
