"""What a step would take on more devices: a ring allreduce that the backward pass hides in part, on paper.

`docs/scaling.md` has the formulas with their sources, and how far they are off.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvd_bert.errors import UserError
from hvd_bert.flops import BACKWARD
from hvd_bert.report.alike import STRONG
from hvd_bert.report.comparison import Table

MOST_DEVICES = 1024


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


def device_counts(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def measured_step(table: Table, parameters: int | None, backward_share: float | None) -> Step | None:
    """The step of one device, by the phases of a table's baseline; None where they or the model's size are unknown."""
    group, run = table.baseline, table.baseline.one
    step_s, compute = group.median(lambda run: run.step_s), group.median(lambda run: run.phase_s("compute"))
    exposed = group.median(lambda run: run.phase_s("exposed_comm"))
    size = parameters or run.parameters
    if step_s is None or compute is None or exposed is None or size is None:
        return None
    late = run.late_parameters if parameters is None else 0
    scale = run.devices if table.kind == STRONG else 1
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


def series(
    step: Step, table: Table, networks: Sequence[tuple[str, Network]], fusion: Fusion, most: int
) -> dict[tuple[str, bool], list[Projected]]:
    """For each network's name, and whether fp16 is on the wire: a step on 1, 2, 4, ... devices.

    A global batch that is fixed ends where a device would have less than one window.
    """
    if table.kind == STRONG:
        most = min(most, int(table.size))
    return {
        (name, fp16): [
            project(in_fp16(step) if fp16 else step, devices, table.kind, network, fusion)
            for devices in device_counts(most)
        ]
        for name, network in networks
        for fp16 in (False, True)
    }
