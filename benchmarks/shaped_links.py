"""Two hosts whose link is shaped: what a step takes beside docs/evidence/scaling.md's model, and what timelines say.

    python benchmarks/shaped_links.py                    both, as root, on a quiet machine: about 12 minutes
    python benchmarks/shaped_links.py --only steps       docs/evidence/scaling.md (timelines: benchmarks.md)

It brings up the cluster of tests/cluster (Debian, root), trains there on the CPU, and takes it down. Prints tables as
Markdown. The link changes under one training after the other, all kinds in each round, so that each is measured in the
same minutes; the figures are medians over the rounds of a round's median step, with the least and the most.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "tests" / name) for name in ("cluster", "parallel", "integration")]

from commands import report_of  # noqa: E402  (the cluster's tools lie with its tests)
from harness import Cluster, script  # noqa: E402
from launch import Outcome  # noqa: E402
from recorded import FOUR_RANKS, ONE_HOST, ONE_MESSAGE, TWO_HOSTS, horovodrun, ranks_of, recorded, six_layers  # noqa: E402
from shaping import shaped  # noqa: E402

from hvd_bert.report.comparability import STRONG  # noqa: E402
from hvd_bert.report.projection import Link, Network, Step, doctors_link, link_of, project  # noqa: E402
from hvd_bert.runs import reading  # noqa: E402

FIRST = 3  # steps before anything is measured
CYCLE_S = 1e-3


@dataclass(frozen=True)
class Shape:
    """How the link is; None: as it is by itself."""

    gbps: float | None = None
    latency_ms: float = 0.0

    def __str__(self) -> str:
        return "as it is" if self.gbps is None else f"{self.gbps:g} Gb/s, {self.latency_ms:g} ms"

    def on(self, cluster: Cluster) -> AbstractContextManager[None]:
        return nullcontext() if self.gbps is None else shaped(cluster, self.gbps, self.latency_ms)


SHAPES = (Shape(), Shape(10, 0.1), Shape(10, 1), Shape(1, 0.1), Shape(1, 1))
SLOW = Shape(1, 1)


@contextmanager
def cluster_up() -> Iterator[Cluster]:
    """The cluster, which goes down on every way out."""
    place = Path(f"/tmp/hvd_bench_{os.getpid()}")
    started = script("up.sh", "--owner", str(os.getpid()), HVD_BERT_CLUSTER=str(place))
    if started.returncode:
        raise SystemExit(started.stderr.strip())
    try:
        yield Cluster(place)
    finally:
        script("down.sh", HVD_BERT_CLUSTER=str(place)).check_returncode()


# --- steps beside the model -----------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Medians of the rounds, in seconds: of the step, its forward and backward pass, its exposed communication."""

    step_s: Sequence[float]
    compute_s: Sequence[float]
    exposed_s: Sequence[float]


def rows_of(folder: Path) -> list[dict[str, float]]:
    """The whole lines of a training's metrics so far, one per step."""
    path = folder / "out" / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def until(folder: Path, step: int, running: Future[Outcome]) -> list[dict[str, float]]:
    """The lines, as soon as there are that many."""
    while len(rows := rows_of(folder)) < step:
        if running.done():
            raise SystemExit(f"the training ended after {len(rows)} steps: {running.result()}")
        time.sleep(0.05)  # between two looks
    return rows


def steps_by_shape(cluster: Cluster, hosts: str, folder: Path, rounds: int, steps: int) -> dict[Shape, Measured]:
    """One training, under which the link changes."""
    folder.mkdir()
    maximum = FIRST + rounds * len(SHAPES) * (steps + 4)  # some pass while the link changes
    command = horovodrun(hosts, "mpi", f"-m hvd_bert.train {six_layers(hosts, maximum)}")
    found: dict[Shape, list[list[float]]] = {shape: [] for shape in SHAPES}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(cluster.on, "a100-01", command, folder, None, 900)
        until(folder, FIRST, running)
        for number in range(rounds):
            for shape in SHAPES if number % 2 == 0 else SHAPES[::-1]:
                with shape.on(cluster):
                    start = len(rows_of(folder)) + 2  # the step that saw the change, and one to settle
                    rows = until(folder, start + steps, running)[start : start + steps]
                figures = [median(row[f"{key}_s"] for row in rows) for key in ("step", "compute", "exposed_comm")]
                found[shape].append(figures)
                print(hosts, shape, *(f"{figure:.3f}" for figure in figures), file=sys.stderr)
        running.result().expect(0)
    return {shape: Measured(*zip(*rounds, strict=True)) for shape, rounds in found.items()}


def alone(cluster: Cluster, folder: Path, steps: int) -> Step:
    """The step of one rank."""
    folder.mkdir()
    command = f"python -m hvd_bert.train --strategy none {six_layers('a100-01:1', steps)}"
    cluster.on("a100-01", command, folder).expect(0)
    run = reading.read(folder / "out")
    assert run.parameters is not None
    steady = [row for _, row in run.steady]
    step_s, compute_s = median(row.step_s for row in steady), median(row.phases["compute"] for row in steady)
    print("one rank", f"{step_s:.3f} s, of it computing {compute_s:.3f} s", file=sys.stderr)
    return Step(compute_s, step_s - compute_s, 4.0 * run.parameters, 4.0 * run.late_parameters)


def doctor(cluster: Cluster, hosts: str, folder: Path) -> Link:
    """The link as `python -m hvd_bert.doctor` measures it."""
    command = horovodrun(hosts, "mpi", "-m hvd_bert.doctor --json --size 44 --repeats 3")
    link, _ = doctors_link(report_of(cluster.on("a100-01", command, folder).expect(0)), CYCLE_S)
    print("doctor", hosts, told(link), file=sys.stderr)
    return link


def told(link: Link) -> str:
    return f"{link.bytes_per_s * 8e-9:.2f} Gb/s, {link.latency_s * 1e3:.2f} ms"


def steps_table(cluster: Cluster, folder: Path, rounds: int, steps: int) -> None:
    """Measured beside projected."""
    ones = [alone(cluster, folder / "alone-1", FIRST + 2 * steps)]
    found = {}
    for hosts in (TWO_HOSTS, FOUR_RANKS):
        found[hosts] = steps_by_shape(cluster, hosts, folder / f"ranks-{ranks_of(hosts)}", rounds, steps)
    ones.append(alone(cluster, folder / "alone-2", FIRST + 2 * steps))
    one = replace(ones[0], compute_s=mean(s.compute_s for s in ones), rest_s=mean(s.rest_s for s in ones))
    links = {}
    for shape in SHAPES:
        with shape.on(cluster):
            links[shape] = doctor(cluster, TWO_HOSTS, folder)
    inner, cores = doctor(cluster, ONE_HOST, folder), len(os.sched_getaffinity(0))
    print(f"One rank: {(one.compute_s + one.rest_s) * 1e3:.0f} ms, of it computing {one.compute_s * 1e3:.0f} ms.")
    print(f"Gradients: {one.gradient_bytes / 1e6:.1f} MB. Inside a host: {told(inner)}. {cores} cores.\n")
    print("| ranks | link | by doctor | step, ms | computing | exposed | efficiency |", end=" ")
    print("model, link as set | as by doctor | as set, computing as measured |")
    print("| ---: | --- | --- | --- | ---: | ---: | ---: | --- | --- | --- |")
    for hosts in (TWO_HOSTS, FOUR_RANKS):
        for row in steps_rows(one, ranks_of(hosts), found[hosts], links, inner, cores):
            print(f"| {' | '.join(row)} |")


def steps_rows(
    one: Step, ranks: int, found: dict[Shape, Measured], links: dict[Shape, Link], inner: Link, cores: int
) -> Iterator[list[str]]:
    """The table's rows of so many ranks."""
    crowd = max(1.0, ranks / cores)  # ranks that share a core compute so much longer
    shared = replace(one, compute_s=one.compute_s * crowd, rest_s=one.rest_s * crowd)
    own = own_step(one, ranks, found[Shape()])
    one_s = one.compute_s + one.rest_s
    for shape, measured in found.items():
        step_s = median(measured.step_s)
        given = links[shape] if shape.gbps is None else link_of(shape.gbps, shape.latency_ms * 1e3)
        yield [
            f"{ranks}", f"{shape}", told(links[shape]), spread(measured.step_s),
            f"{median(measured.compute_s) * 1e3:.0f}", f"{median(measured.exposed_s) * 1e3:.0f}",
            f"{one_s / ranks / step_s:.1%}",
            *(
                model(step, one_s, ranks, Network(link) if ranks == 2 else Network(link, inner, 2), step_s)
                for step, link in ((shared, given), (shared, links[shape]), (own, given))
            ),
        ]  # fmt: skip


def spread(seconds: Sequence[float]) -> str:
    minimum, maximum = min(seconds), max(seconds)
    return f"{median(seconds) * 1e3:.0f} ({minimum * 1e3:.0f} to {maximum * 1e3:.0f})"


def own_step(one: Step, ranks: int, measured: Measured) -> Step:
    """As many ranks as computed with the link as it is: what they take from each other is in it."""
    compute_s = median(measured.compute_s)
    rest_s = median(measured.step_s) - compute_s - median(measured.exposed_s)
    return replace(one, compute_s=ranks * compute_s, rest_s=rest_s)


def model(step: Step, one_s: float, ranks: int, network: Network, step_s: float) -> str:
    """What the model makes of it: the step, and by how many points its efficiency is off."""
    made = project(step, ranks, STRONG, network)
    efficiency, measured = one_s / ranks / made.step_s, one_s / ranks / step_s
    off = 100 * (efficiency - measured)
    return f"{made.step_s * 1e3:.0f} ms ({off:+.1f})"


# --- timelines ------------------------------------------------------------------------------------


def timelines_table(cluster: Cluster, folder: Path, steps: int) -> None:
    """Trainings with a timeline, over MPI and Gloo; as they are, and with little computing and one message a step."""
    print("| over | ranks | link | step, ms | exposed | gradients, MB/s | fastest twentieth | a host sends, Gb/s |")
    print("| --- | --- | --- | ---: | --- | ---: | ---: | ---: |")
    usual = [(ONE_HOST, Shape()), (TWO_HOSTS, SLOW), (FOUR_RANKS, Shape()), (FOUR_RANKS, SLOW)]
    shown = [(*case, "", {}) for case in usual]
    shown += [(*case, ", one message", ONE_MESSAGE) for case in ((ONE_HOST, Shape()), (FOUR_RANKS, SLOW))]
    for hosts, shape, kind, setting in shown:
        for controller in ("mpi", "gloo"):
            sums_first = controller == "mpi" and hosts == FOUR_RANKS
            inside = folder / f"{controller}{kind}-{ONE_HOST}-None" if sums_first else None
            place = folder / f"{controller}{kind}-{hosts}-{shape.gbps}"
            flags = six_layers(hosts, FIRST + steps, **setting)
            with shape.on(cluster):
                seen = recorded(cluster, place, hosts, controller, flags, one_host=inside)
            print(timelines_row(hosts, controller + kind, shape, seen), flush=True)


def timelines_row(hosts: str, controller: str, shape: Shape, seen: dict[str, Any]) -> str:
    step, sent = seen["step"], seen["link_bytes_per_s"]
    exposed = f"{step['exposed_least_share']:.0%} to {step['exposed_most_share']:.0%}"
    return (
        f"| {controller} | {hosts} | {shape} | {step['step_s'] * 1e3:.0f} | {exposed} | "
        f"{seen['bytes_per_s'] / 1e6:.0f} | {seen['fast_bytes_per_s'] / 1e6:.0f} | "
        f"{'' if sent is None else f'{sent * 8e-9:.2f}'} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Two hosts whose link is shaped.")
    parser.add_argument("--only", choices=["steps", "timelines"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="measured for each link in a round")
    parser.add_argument("--out", type=Path, help="keep the trainings and timelines here")
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
