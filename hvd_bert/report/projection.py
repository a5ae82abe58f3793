"""What a step would take on more devices: a ring allreduce that the backward pass hides in part, on paper.

`docs/evidence/scaling.md` has the formulas with their sources, and how far they are off.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hvd_bert.errors import UserError
from hvd_bert.model.flops import BACKWARD
from hvd_bert.report.comparability import STRONG, WEAK, Group
from hvd_bert.report.comparison import Table, baseline_of, title_of

MAX_DEVICES = 1024


class NoStep(Exception):
    """Why the step of a group of runs cannot be projected."""


@dataclass(frozen=True)
class Link:
    """What one end of a link sends per second, and how long one message of no length takes."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Network:
    """`outer`: the link of a node, which its `devices_per_node` share; `inner`: of a device to its node's others."""

    outer: Link
    inner: Link | None = None
    devices_per_node: int = 1


@dataclass(frozen=True)
class Fusion:
    """Horovod's: once per cycle it sends the gradients that are there, at most so many bytes at once."""

    threshold_bytes: float = 128 * 2**20
    cycle_s: float = 1e-3


@dataclass(frozen=True)
class Step:
    """An optimizer step on one device, all of whose windows take `compute_s` forward and backward.

    `rest_s`: what more windows do not lengthen (optimizer, waiting for data, all else). `gradient_bytes` as they are
    sent, of which `late_bytes` are there only when the backward pass is over (embeddings). `passes`: forward and
    backward passes of the step, behind the last of which gradients can hide, for `backward_share` of it.
    """

    compute_s: float
    rest_s: float
    gradient_bytes: float
    late_bytes: float = 0.0
    passes: int = 1
    backward_share: float = BACKWARD / (1 + BACKWARD)


@dataclass(frozen=True)
class Projected:
    """A step on `devices`."""

    devices: int
    step_s: float
    exposed_s: float
    speedup: float

    @property
    def efficiency(self) -> float:
        """Speed-up over devices."""
        return self.speedup / self.devices


@dataclass(frozen=True)
class Projection:
    """One kind of scaling from the step of `baseline`, with `size` windows fixed: of the global batch, or of a device.

    `series`: for each network's name, and whether fp16 is on the wire, a step on 1, 2, 4, ... devices; `ends`: where it
    does, and why. Without a projection `step` is None or `series` empty, and `ends` says why.
    """

    kind: str
    size: float
    baseline: Group
    ends: str
    step: Step | None = None
    series: Mapping[tuple[str, bool], Sequence[Projected]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Which scaling, and what is fixed."""
        return title_of(self.kind, self.size)

    def measured(self, tables: Sequence[Table]) -> Table | None:
        """The table of the same scaling from the same baseline, whose points may stand beside the projection's.

        Speed-ups of the other kind are of other work per device: beside these they would be wrong.
        """
        return next((table for table in tables if table.kind == self.kind and table.baseline is self.baseline), None)


def allreduce_s(num_bytes: float, devices: int, network: Network) -> float:
    """Seconds to sum `num_bytes` over `devices`: 2(N-1) messages of 1/N of them, one after another, around a ring.

    With two levels: reduce-scatter inside the nodes; rings of the nodes, which share their links; allgather inside.
    """
    if network.inner is None:
        return _ring_s(num_bytes, devices, network.outer)
    inside = min(devices, network.devices_per_node)
    nodes = math.ceil(devices / network.devices_per_node)
    return _ring_s(num_bytes, inside, network.inner) + _ring_s(num_bytes, nodes, network.outer)


def _ring_s(num_bytes: float, ends: int, link: Link) -> float:
    return 2 * (ends - 1) * (link.latency_s + num_bytes / ends / link.bytes_per_s)


def exposed_s(step: Step, backward_s: float, devices: int, network: Network, fusion: Fusion) -> float:
    """Seconds that the allreduce goes on after a backward pass of `backward_s` during which gradients come evenly."""
    if devices == 1:
        return 0.0
    early, total = step.gradient_bytes - step.late_bytes, step.gradient_bytes
    now = sent = looked = 0.0
    while True:
        ready = total if now >= backward_s else early * now / backward_s
        while ready - sent > 1e-9 * total:
            size = min(ready - sent, fusion.threshold_bytes)
            now += allreduce_s(size, devices, network)
            sent += size
        if total - sent <= 1e-9 * total:
            return max(0.0, now - backward_s)
        now = looked = max(now, looked + fusion.cycle_s)  # the next look: a cycle after the last


def project(step: Step, devices: int, kind: str, network: Network, fusion: Fusion | None = None) -> Projected:
    """A step on `devices`, of the same global batch (`kind` strong) or of the same batch per device (weak)."""
    share = devices if kind == STRONG else 1
    compute_s = step.compute_s / share
    passes = math.ceil(step.passes / share)
    hidden_behind = step.backward_share * compute_s / passes
    exposed = exposed_s(step, hidden_behind, devices, network, fusion or Fusion())
    step_s = compute_s + step.rest_s + exposed
    alone_s = step.compute_s + step.rest_s
    return Projected(devices, step_s, exposed, (devices / share) * alone_s / step_s)


def in_fp16(step: Step) -> Step:
    """The same with gradients sent as fp16; packing and unpacking them is not counted."""
    return replace(step, gradient_bytes=step.gradient_bytes / 2, late_bytes=step.late_bytes / 2)


def device_counts(maximum: int) -> list[int]:
    """1, 2, 4, ... up to `maximum`."""
    return [2**power for power in range(maximum.bit_length()) if 2**power <= maximum]


def end_of(kind: str, size: float, maximum: int) -> tuple[int, str]:
    """The largest of `device_counts(maximum)` on which `size` windows can be projected, and why there are no more."""
    counts = device_counts(maximum)
    if kind == STRONG:
        counts = [devices for devices in counts if devices <= size]
    last = counts[-1]
    said = f"ends at {last} device{'s' * (last > 1)}: "
    if kind == STRONG and 2 * last > size:
        windows = f"a global batch of {size:g} window{'s' * (size != 1)}"
        return last, f"{said}{windows}, of which each of {2 * last} devices would need one"
    return last, f"{said}--most_devices {maximum}"


def measured_step(group: Group, kind: str, parameters: int | None, backward_share: float | None) -> Step:
    """The step of one device, by the phases of a group: with all of its global batch (strong), or a device's (weak).

    `parameters`: weights of the model, None: as recorded. Raises NoStep where the phases or these are unknown.
    """
    run = group.one
    step_s, compute = group.median(lambda run: run.step_s), group.median(lambda run: run.phase_s("compute"))
    exposed = group.median(lambda run: run.phase_s("exposed_comm"))
    size = parameters or run.parameters
    if step_s is None or compute is None or exposed is None:
        raise NoStep(
            f"{group.name} lacks its phases: its metrics.jsonl does not tell exposed communication (exposed_comm_s)"
            " from computing (compute_s), as under fsdp and deepspeed. Give another strategy's run, as --baseline where"
            " there are several"
        )
    if size is None:
        raise NoStep(f"{group.name} does not say how many weights its model has: give --parameters")
    late = run.late_parameters if parameters is None else 0
    # Weak scaling takes what a device did as it was measured. Strong scaling takes what all of them did on one device:
    # the shares of the baseline's devices one after another.
    scale = run.devices if kind == STRONG else 1
    step = Step(compute * scale, max(0.0, step_s - compute - exposed), 4.0 * size, 4.0 * late, run.passes * scale)
    return step if backward_share is None else replace(step, backward_share=backward_share)


def link_of(gbps: float, latency_us: float) -> Link:
    """From gigabits per second and microseconds."""
    return Link(gbps * 1e9 / 8, latency_us * 1e-6)


def doctors_link(report: Mapping[str, Any], cycle_s: float) -> tuple[Link, str]:
    """The link that `python -m hvd_bert.doctor --json` measured, and a word on how. Raises UserError.

    Latency: of the 4-byte sum, by MPI in ceil(log2 N) rounds; by Horovod alone, less its cycle, around the ring.
    Bandwidth: of the large sum by Horovod, less the latency of a ring.
    """
    try:
        timings = [
            (str(held["method"]), int(held["num_bytes"]), int(held["world_size"]), statistics.median(held["seconds"]))
            for held in report["allreduce"]
        ]
        large = max(num_bytes for _, num_bytes, _, _ in timings)
        method, _, ranks, seconds = next(held for held in timings if held[1] == large and held[0].startswith("Horovod"))
        small = {name.startswith("Horovod"): held for name, size, _, held in timings if size == 4}
        if False in small:
            latency = small[False] / math.ceil(math.log2(ranks))
        else:
            latency = max(0.0, small[True] - cycle_s) / (2 * (ranks - 1))
        sending = max(seconds - 2 * (ranks - 1) * latency, 1e-3 * seconds)
    except (KeyError, TypeError, ValueError, StopIteration, ZeroDivisionError):
        raise UserError(
            "holds no allreduce of two ranks or more: run `horovodrun -np 2 python -m hvd_bert.doctor --json`."
        ) from None
    link = Link(2 * (ranks - 1) / ranks * large / sending, latency)
    return link, f"measured by doctor, {ranks} ranks, {method}"


def baselines(tables: Sequence[Table], groups: Sequence[Group], chosen: tuple[str, int] | None) -> list[Group]:
    """What to project: the baselines of the tables, each once; without tables the one that `groups` would have."""
    found = {id(table.baseline): table.baseline for table in tables}
    alone = None if found else baseline_of(groups, chosen)
    return [alone] if alone else list(found.values())


def both_kinds(
    baseline: Group,
    networks: Sequence[tuple[str, Network]],
    fusion: Fusion,
    maximum: int = MAX_DEVICES,
    parameters: int | None = None,
    backward_share: float | None = None,
) -> list[Projection]:
    """Strong and weak scaling on up to `maximum` devices from a baseline's step, whatever else was measured.

    Strong scaling ends where a device would have less than one window.
    """
    made = []
    for kind, size in ((STRONG, float(baseline.one.global_batch)), (WEAK, baseline.windows_per_device)):
        try:
            step = measured_step(baseline, kind, parameters, backward_share)
        except NoStep as error:
            made.append(Projection(kind, size, baseline, f"not possible: {error}"))
            continue
        last, ends = end_of(kind, size, maximum)
        if last == 1:
            made.append(Projection(kind, size, baseline, f"not possible: it {ends}"))
        else:
            made.append(Projection(kind, size, baseline, ends, step, series(step, kind, last, networks, fusion)))
    return made


def series(
    step: Step, kind: str, last: int, networks: Sequence[tuple[str, Network]], fusion: Fusion
) -> dict[tuple[str, bool], list[Projected]]:
    """For each network's name, and whether fp16 is on the wire: a step on 1, 2, 4, ... devices up to `last`."""
    return {
        (name, fp16): [
            project(in_fp16(step) if fp16 else step, devices, kind, network, fusion) for devices in device_counts(last)
        ]
        for name, network in networks
        for fp16 in (False, True)
    }
