"""Trains on two hosts over a shaped link: step times next to the projection's model, and what timelines report.

    python benchmarks/shaped_links.py                    both parts, as root, on an idle machine: about 12 minutes
    python benchmarks/shaped_links.py --only steps       the table of docs/evidence/scaling.md
    python benchmarks/shaped_links.py --only timelines   the table of docs/evidence/benchmarks.md

Brings up the cluster of tests/cluster (Debian, root), trains there on CPUs, takes it down, and prints tables in
Markdown. The link changes during one training, and each round has all shapes, so that all are measured within the same
minutes. Figures are medians over the rounds of a round's median step, with the range.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from shared import REPOSITORY, markdown_table, spread
from two_hosts import (
    FOUR_RANKS,
    ONE_HOST,
    TWO_HOSTS,
    Cluster,
    Shape,
    cluster_up,
    horovodrun,
    ranks_of,
    six_layers,
)

from hvd_bert.report.__main__ import LAUNCHERS_MARK
from hvd_bert.report.comparability import STRONG
from hvd_bert.report.projection import Link, Network, Step, doctors_link, link_of, project
from hvd_bert.runs import reading

FIRST = 3  # steps before anything is measured
CYCLE_S = 1e-3
POLL_S = 0.05
SHAPES = (Shape(), Shape(10, 0.1), Shape(10, 1), Shape(1, 0.1), Shape(1, 1))
SLOW = Shape(1, 1)
# Open MPI's threads poll. Where four of them and four ranks share two cores, they set the pace instead of the link. So
# these trainings compute little, and send all gradients in one message after the backward pass.
ONE_MESSAGE: dict[str, Any] = {"windows": 4, "more": " --deterministic"}


# --- step times next to the model -----------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Seconds of a step, of its forward and backward pass, and of its exposed communication: medians per round."""

    step_s: Sequence[float]
    compute_s: Sequence[float]
    exposed_s: Sequence[float]


def rows_of(folder: Path) -> list[dict[str, float]]:
    """The complete lines of a training's metrics so far, one per step."""
    path = folder / "out" / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wait_for(folder: Path, step: int, running: Future[str]) -> list[dict[str, float]]:
    """The lines, as soon as there are `step` of them."""
    while len(rows := rows_of(folder)) < step:
        if running.done():
            raise SystemExit(f"The training ended after {len(rows)} steps:\n{running.result()}")
        time.sleep(POLL_S)
    return rows


def steps_by_shape(cluster: Cluster, hosts: str, folder: Path, rounds: int, steps: int) -> dict[Shape, Measured]:
    """One training during which the link changes."""
    folder.mkdir()
    maximum = FIRST + rounds * len(SHAPES) * (steps + 4)  # some steps pass while the link changes
    command = horovodrun(hosts, "mpi", f"-m hvd_bert.train {six_layers(hosts, maximum)}")
    found: dict[Shape, list[list[float]]] = {shape: [] for shape in SHAPES}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(cluster.run, command, folder)
        wait_for(folder, FIRST, running)
        for number in range(rounds):
            for shape in SHAPES if number % 2 == 0 else SHAPES[::-1]:
                with cluster.shaped(shape):
                    start = len(rows_of(folder)) + 2  # not the step during which the link changed, nor the next
                    rows = wait_for(folder, start + steps, running)[start : start + steps]
                figures = [median(row[f"{key}_s"] for row in rows) for key in ("step", "compute", "exposed_comm")]
                found[shape].append(figures)
                print(hosts, shape, *(f"{figure:.3f}" for figure in figures), file=sys.stderr)
        running.result()
    return {shape: Measured(*zip(*rounds, strict=True)) for shape, rounds in found.items()}


def one_rank(cluster: Cluster, folder: Path, steps: int) -> Step:
    """The step of one rank."""
    folder.mkdir()
    cluster.run(f"python -m hvd_bert.train --strategy none {six_layers('localhost:1', steps)}", folder)
    run = reading.read(folder / "out")
    assert run.parameters is not None
    steady = [row for _, row in run.steady]
    step_s, compute_s = median(row.step_s for row in steady), median(row.phases["compute"] for row in steady)
    print(f"one rank: {step_s:.3f} s, {compute_s:.3f} s of it computation", file=sys.stderr)
    return Step(compute_s, step_s - compute_s, 4.0 * run.parameters, 4.0 * run.late_parameters)


def measured_link(cluster: Cluster, hosts: str, folder: Path) -> Link:
    """The link as the preflight check measures it."""
    output = cluster.run(horovodrun(hosts, "mpi", "-m hvd_bert.doctor --json --size 44 --repeats 3"), folder)
    lines = LAUNCHERS_MARK.sub("", output).splitlines()
    report = json.loads(next(line for line in lines if line.startswith("{")))
    link, _ = doctors_link(report, CYCLE_S)
    print(f"preflight check, {hosts}: {as_text(link)}", file=sys.stderr)
    return link


def as_text(link: Link) -> str:
    """The link's bandwidth and latency."""
    return f"{link.bytes_per_s * 8e-9:.2f} Gb/s, {link.latency_s * 1e3:.2f} ms"


def steps_table(cluster: Cluster, folder: Path, rounds: int, steps: int) -> None:
    """Print measured and projected steps."""
    ones = [one_rank(cluster, folder / "one-rank-1", FIRST + 2 * steps)]
    found = {}
    for hosts in (TWO_HOSTS, FOUR_RANKS):
        found[hosts] = steps_by_shape(cluster, hosts, folder / f"ranks-{ranks_of(hosts)}", rounds, steps)
    ones.append(one_rank(cluster, folder / "one-rank-2", FIRST + 2 * steps))
    one = replace(ones[0], compute_s=mean(s.compute_s for s in ones), rest_s=mean(s.rest_s for s in ones))
    links = {}
    for shape in SHAPES:
        with cluster.shaped(shape):
            links[shape] = measured_link(cluster, TWO_HOSTS, folder)
    inner = measured_link(cluster, ONE_HOST, folder)
    print(f"One rank: {(one.compute_s + one.rest_s) * 1e3:.0f} ms, {one.compute_s * 1e3:.0f} ms of it computation.")
    print(f"Gradients: {one.gradient_bytes / 1e6:.1f} MB. Link inside a host: {as_text(inner)}.\n")
    head = ["ranks", "link", "link, measured", "step, ms", "computation, ms", "exposed, ms", "efficiency"]
    head += ["model, link as set", "model, link as measured", "model, link as set, computation as measured"]
    rows = [row for hosts, measured in found.items() for row in step_rows(one, ranks_of(hosts), measured, links, inner)]
    print(markdown_table(head, rows))


def step_rows(
    one: Step, ranks: int, found: dict[Shape, Measured], links: dict[Shape, Link], inner: Link
) -> Iterator[list[str]]:
    """A row per shape."""
    crowd = max(1.0, ranks / len(os.sched_getaffinity(0)))  # ranks that share a core compute so much longer
    shared = replace(one, compute_s=one.compute_s * crowd, rest_s=one.rest_s * crowd)
    own = own_step(one, ranks, found[Shape()])
    one_s = one.compute_s + one.rest_s
    for shape, measured in found.items():
        step_s = median(measured.step_s)
        given = links[shape] if shape.gbps is None else link_of(shape.gbps, shape.latency_ms * 1e3)
        yield [
            f"{ranks}", f"{shape}", as_text(links[shape]), spread([1e3 * step for step in measured.step_s], 0),
            f"{median(measured.compute_s) * 1e3:.0f}", f"{median(measured.exposed_s) * 1e3:.0f}",
            f"{one_s / ranks / step_s:.1%}",
            *(
                projected(step, one_s, ranks, Network(link) if ranks == 2 else Network(link, inner, 2), step_s)
                for step, link in ((shared, given), (shared, links[shape]), (own, given))
            ),
        ]  # fmt: skip


def own_step(one: Step, ranks: int, measured: Measured) -> Step:
    """One rank's step with the computation of that many ranks, which slow each other down."""
    compute_s = median(measured.compute_s)
    rest_s = median(measured.step_s) - compute_s - median(measured.exposed_s)
    return replace(one, compute_s=ranks * compute_s, rest_s=rest_s)


def projected(step: Step, one_s: float, ranks: int, network: Network, step_s: float) -> str:
    """The model's step, and its error in points of efficiency."""
    made = project(step, ranks, STRONG, network)
    error = 100 * one_s / ranks * (1 / made.step_s - 1 / step_s)
    return f"{made.step_s * 1e3:.0f} ms ({error:+.1f})"


# --- timelines ------------------------------------------------------------------------------------


def timelines_table(cluster: Cluster, folder: Path, steps: int) -> None:
    """Print what timelines report over MPI and Gloo: of usual trainings, and with one message per step."""
    usual = [(ONE_HOST, Shape()), (TWO_HOSTS, SLOW), (FOUR_RANKS, Shape()), (FOUR_RANKS, SLOW)]
    cases: list[tuple[str, Shape, str, dict[str, Any]]] = [(*case, "", {}) for case in usual]
    cases += [(*case, ", one message", ONE_MESSAGE) for case in ((ONE_HOST, Shape()), (FOUR_RANKS, SLOW))]
    rows = []
    for hosts, shape, kind, setting in cases:
        for controller in ("mpi", "gloo"):
            sums_inside_hosts = controller == "mpi" and hosts == FOUR_RANKS
            one_host = folder / f"{controller}{kind}-{ONE_HOST}-None" if sums_inside_hosts else None
            place = folder / f"{controller}{kind}-{hosts}-{shape.gbps}"
            flags = six_layers(hosts, FIRST + steps, **setting)
            with cluster.shaped(shape):
                report = record_timeline(cluster, place, hosts, controller, flags, one_host)
            rows.append(timeline_row(hosts, controller + kind, shape, report))
            print(*rows[-1], sep=", ", file=sys.stderr)
    head = ["over", "ranks", "link", "step, ms", "exposed", "gradients, MB/s", "fastest twentieth, MB/s"]
    print(markdown_table([*head, "sent per host, Gb/s"], rows))


def record_timeline(
    cluster: Cluster, folder: Path, hosts: str, controller: str, flags: str, one_host: Path | None
) -> dict[str, Any]:
    """Train in `folder`, and analyse Horovod's timeline.

    `one_host`: the folder of the same training on one host, whose sums do not use the link.
    """
    folder.mkdir(parents=True)
    timeline = folder / "timeline.json"
    command = horovodrun(hosts, controller, f"-m hvd_bert.train {flags}")
    cluster.run(command, folder, {"HOROVOD_TIMELINE": str(timeline)})
    analysis = [sys.executable, "-m", "hvd_bert.timeline", str(timeline), "--hosts", str(hosts.count(",") + 1)]
    analysis += ["--json", *(["--one_host", str(one_host / "timeline.json")] if one_host else [])]
    done = subprocess.run(analysis, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def timeline_row(hosts: str, controller: str, shape: Shape, report: dict[str, Any]) -> list[str]:
    """A row of the table."""
    step, sent = report["step"], report["link_bytes_per_s"]
    exposed = f"{step['exposed_least_share']:.0%} to {step['exposed_most_share']:.0%}"
    cells = [controller, hosts, str(shape), f"{step['step_s'] * 1e3:.0f}", exposed]
    cells += [f"{report[key] / 1e6:.0f}" for key in ("bytes_per_s", "fast_bytes_per_s")]
    return [*cells, "" if sent is None else f"{sent * 8e-9:.2f}"]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Train on two hosts over a shaped link.")
    parser.add_argument("--only", choices=["steps", "timelines"], help="Measure one part. (default: both)")
    parser.add_argument("--rounds", type=int, default=3, help="Rounds of all links. (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="Steps per link and round. (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="Keep the trainings and timelines in this folder. (default: none)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, cluster_up() as cluster:
        folder = (args.out or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if args.only != "timelines":
            steps_table(cluster, folder, args.rounds, args.steps)
        if args.only != "steps":
            timelines_table(cluster, folder, 2 * args.steps)


if __name__ == "__main__":
    main()
