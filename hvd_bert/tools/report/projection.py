"""Project the time of a step to more devices: a ring allreduce, partly hidden by the backward pass.

`docs/evidence/scaling.md` has the formulas, their sources and their errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hvd_bert.tools.report.comparability import STRONG, WEAK, Group
from hvd_bert.tools.report.comparison import ScalingTable, baseline_of, counted, title_of

MAX_DEVICES = 1024
BACKWARD_SHARE = 2 / 3  # of the computation, as in model/flops.py, which a report must not import: it needs torch
NS_PER_WEIGHT = 0.1  # cost of averaging that no network explains, fitted to published runs


class NoStep(Exception):
    """The step of a group of runs cannot be projected; the message has the reason."""


@dataclass(frozen=True)
class Link:
    """Bandwidth of a link in one direction, and latency per message."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Network:
    """`outer`: a node's link, which its `devices_per_node` share. `inner`: the link between devices of a node."""

    outer: Link
    inner: Link | None = None
    devices_per_node: int = 1


@dataclass(frozen=True)
class Fusion:
    """Horovod's tensor fusion: once per cycle it sends the gradients that are ready, up to a maximum per message."""

    threshold_bytes: float = 128 * 2**20
    cycle_s: float = 1e-3


@dataclass(frozen=True)
class Step:
    """An optimizer step on one device.

    `compute_s`: forward and backward time of all windows. `rest_s`: time that does not depend on the windows
    (optimizer, waiting for data, everything else). `gradient_bytes`: as sent; `late_bytes` of them (embeddings) are
    ready only after the backward pass. `passes`: micro-batches per step; the last one's backward pass can hide
    communication. `overhead_s`: added on 2 devices or more, whatever the network.
    """

    compute_s: float
    rest_s: float
    gradient_bytes: float
    late_bytes: float = 0.0
    passes: int = 1
    overhead_s: float = 0.0


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
    """One kind of scaling from the step of `baseline`, with a fixed batch of `size` windows, global or per device.

    `series`: (network, whether fp16 is on the wire) -> a step on 1, 2, 4, ... devices. `ends`: where the series ends,
    and why. If there is no projection, `step` is None or `series` is empty, and `ends` has the reason.
    """

    kind: str
    size: float
    baseline: Group
    ends: str
    step: Step | None = None
    series: Mapping[tuple[str, bool], Sequence[Projected]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The kind of scaling and the batch that is fixed."""
        return title_of(self.kind, self.size, self.baseline.one.unit)

    def measured(self, tables: Sequence[ScalingTable]) -> ScalingTable | None:
        """The table of the same kind of scaling and the same baseline, to draw its points next to the projection's.

        Speed-ups of the other kind have another amount of work per device and are not comparable.
        """
        return next((table for table in tables if table.kind == self.kind and table.baseline is self.baseline), None)


def allreduce_s(num_bytes: float, devices: int, network: Network) -> float:
    """Seconds of a ring allreduce of `num_bytes` over N `devices`: 2(N-1) messages of 1/N of the bytes, in sequence.

    With two levels: reduce-scatter inside the nodes, rings between the nodes over their shared links, allgather inside.
    """
    if network.inner is None:
        return _ring_s(num_bytes, devices, network.outer)
    inside = min(devices, network.devices_per_node)
    nodes = math.ceil(devices / network.devices_per_node)
    return _ring_s(num_bytes, inside, network.inner) + _ring_s(num_bytes, nodes, network.outer)


def _ring_s(num_bytes: float, ends: int, link: Link) -> float:
    return 2 * (ends - 1) * (link.latency_s + num_bytes / ends / link.bytes_per_s)


def exposed_s(step: Step, backward_s: float, devices: int, network: Network, fusion: Fusion) -> float:
    """Seconds of the allreduce after a backward pass of `backward_s`, in which gradients become ready evenly."""
    if devices == 1:
        return 0.0
    early, total = step.gradient_bytes - step.late_bytes, step.gradient_bytes
    now = sent = cycle_start = 0.0
    while True:
        ready = total if now >= backward_s else early * now / backward_s
        while ready - sent > 1e-9 * total:
            size = min(ready - sent, fusion.threshold_bytes)
            now += allreduce_s(size, devices, network)
            sent += size
        if total - sent <= 1e-9 * total:
            return max(0.0, now - backward_s)
        now = cycle_start = max(now, cycle_start + fusion.cycle_s)


def project(step: Step, devices: int, kind: str, network: Network, fusion: Fusion = Fusion()) -> Projected:
    """A step on `devices` with the same global batch (`kind` strong) or the same batch per device (weak)."""
    share = devices if kind == STRONG else 1
    compute_s = step.compute_s / share
    passes = math.ceil(step.passes / share)
    hidden_behind = BACKWARD_SHARE * compute_s / passes
    exposed = exposed_s(step, hidden_behind, devices, network, fusion)
    step_s = compute_s + step.rest_s + exposed + (step.overhead_s if devices > 1 else 0.0)
    alone_s = step.compute_s + step.rest_s
    return Projected(devices, step_s, exposed, (devices / share) * alone_s / step_s)


def in_fp16(step: Step) -> Step:
    """The same step with gradients sent as fp16; the time of the conversion is not modelled."""
    return replace(step, gradient_bytes=step.gradient_bytes / 2, late_bytes=step.late_bytes / 2)


def device_counts(maximum: int) -> list[int]:
    """The powers of 2 up to `maximum`."""
    return [2**power for power in range(maximum.bit_length()) if 2**power <= maximum]


def end_of(kind: str, size: float, unit: str = "windows") -> tuple[int, str]:
    """The last number of devices of a projection with `size` of `unit`, and why it ends there."""
    counts = device_counts(MAX_DEVICES)
    if kind == STRONG:
        counts = [devices for devices in counts if devices <= size]
    last = counts[-1]
    ends = f"ends at {last} device{'s' * (last > 1)}: "
    if kind == STRONG and 2 * last > size:
        return last, f"{ends}a global batch of {counted(size, unit)} has less than one for each of {2 * last} devices"
    return last, f"{ends}the projection's limit"


def measured_step(group: Group, kind: str) -> Step:
    """The step of one device from the phases of a group: with its global batch (strong) or its batch per device (weak).

    Raises NoStep if the phases or the number of weights are unknown.
    """
    run = group.one
    step_s, compute = group.median(lambda run: run.step_s), group.median(lambda run: run.phase_s("compute"))
    exposed = group.median(lambda run: run.phase_s("exposed_comm"))
    if step_s is None or compute is None or exposed is None:
        raise NoStep(
            f"{group.name} lacks phases: its metrics.jsonl does not separate exposed communication (exposed_comm_s)"
            " from computation (compute_s), as with fsdp and deepspeed. Use a run of another strategy, with --baseline"
            " if there are several"
        )
    if run.parameters is None:
        raise NoStep(f"{group.name} does not record the number of weights of its model")
    size, late = run.parameters, run.late_parameters or 0
    # Weak scaling starts from the measured step of a device. Strong scaling puts the work of all the baseline's devices
    # on one device.
    scale = run.devices if kind == STRONG else 1
    rest, overhead = max(0.0, step_s - compute - exposed), NS_PER_WEIGHT * 1e-9 * size
    return Step(compute * scale, rest, 4.0 * size, 4.0 * late, run.passes * scale, overhead)


def link_of(gbps: float, latency_us: float) -> Link:
    """A link from gigabits per second and microseconds."""
    return Link(gbps * 1e9 / 8, latency_us * 1e-6)


def baselines(tables: Sequence[ScalingTable], groups: Sequence[Group], chosen: tuple[str, int] | None) -> list[Group]:
    """The groups to project: the baseline of each table or, without tables, the baseline of `groups`."""
    found = {id(table.baseline): table.baseline for table in tables}
    alone = None if found else baseline_of(groups, chosen)
    return [alone] if alone else list(found.values())


def both_kinds(baseline: Group, networks: Sequence[tuple[str, Network]]) -> list[Projection]:
    """Project a baseline's step to up to MAX_DEVICES devices, with strong and with weak scaling.

    Strong scaling ends where a device would have less than one window.
    """
    made = []
    for kind, size in ((STRONG, float(baseline.one.global_batch)), (WEAK, baseline.windows_per_device)):
        try:
            step = measured_step(baseline, kind)
        except NoStep as error:
            made.append(Projection(kind, size, baseline, f"not possible: {error}"))
            continue
        last, ends = end_of(kind, size, baseline.one.unit)
        if last == 1:
            made.append(Projection(kind, size, baseline, f"not possible: it {ends}"))
            continue
        steps = {
            (name, fp16): [
                project(in_fp16(step) if fp16 else step, devices, kind, network) for devices in device_counts(last)
            ]
            for name, network in networks
            for fp16 in (False, True)
        }
        made.append(Projection(kind, size, baseline, ends, step, steps))
    return made
