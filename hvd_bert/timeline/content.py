"""Findings as text, tables and JSON, for a terminal and for the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hvd_bert.rendering.page import DASH, Grid, Listing, Page, Text
from hvd_bert.timeline.advice import NO_CACHE, bytes_text
from hvd_bert.timeline.analysis import BIG
from hvd_bert.timeline.figures import Findings

FEW = 5  # tensors shown on a terminal
KINDS = {
    "negotiation": "negotiation: until all ranks are ready",
    "wait": "waiting for the device's data",
    "queue": "queue: NCCL is busy with another",
    "copy": "copies",
    "collective": "on the wire",
    "set-up": "set-up",
}


def seconds(value: float) -> str:
    """With a unit that fits."""
    if math.isnan(value):
        return DASH
    if value >= 1:
        return f"{value:.2f} s" if value < 100 else f"{value:.0f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"


def speed(bytes_per_s: float) -> str:
    """Bytes and bits, as networks are sold."""
    if math.isnan(bytes_per_s):
        return DASH
    if bytes_per_s < 1e6:
        return f"{bytes_per_s / 1e3:.3g} kB/s"
    return f"{bytes_per_s / 1e6:.4g} MB/s ({bytes_per_s * 8e-9:.3g} Gb/s)"


def percent(share: float) -> str:
    """To a tenth."""
    return f"{share:.1%}"


def facts(findings: Findings) -> list[str]:
    """What the file is, and what it leaves out."""
    ranks = f"{findings.ranks} ranks" if findings.ranks else "ranks that it does not name (--ranks N tells how many)"
    lines = [
        f"{findings.path}: {findings.events:,} events of {ranks} in {seconds(findings.covered_s)}, "
        f"{bytes_text(findings.size)}."
    ]
    if findings.cut_short:
        lines.append(
            "The file has no end: the run was killed, or is still going on. All that is whole in it is counted."
        )
    if findings.unfinished:
        lines.append(f"Spans without an end in it, left out: {findings.unfinished}.")
    if findings.cycles:
        lines.append(f"{findings.cycles:,} cycles are marked, {seconds(findings.cycle_s)} apart (median).")
    if findings.naming_ranks < findings.negotiations:
        share = findings.naming_ranks / findings.negotiations
        lines.append(
            f"{percent(share)} of the negotiations name ranks. Horovod's response cache, which answers for tensors "
            f"that it knows, leaves ranks out: {NO_CACHE} names them in every step."
        )
    return lines


def step_lines(findings: Findings) -> list[str]:
    """The step, and what of it is communication."""
    step = findings.step
    if step is None:
        return ["Steps cannot be told: no tensor was allreduced in 3 of them."]
    exposed = f"{seconds(step.exposed_least_s)} ({percent(step.exposed_least_share)})"
    if step.exposed_most_s - step.exposed_least_s > 0.05 * step.exposed_most_s:
        exposed += f" to {seconds(step.exposed_most_s)} ({percent(step.exposed_most_share)})"
    return [
        f"{step.steps} steps of {seconds(step.step_s)} (median; p99 {seconds(step.p99_s)}), {step.messages:.0f} "
        f"messages and {bytes_text(step.size)} each.",
        f"Messages are under way for {seconds(step.busy_s)} of it; {percent(step.hidden_share)} of that is hidden "
        "behind the backward pass.",
        f"Exposed, after the last gradient was ready on all ranks: {exposed}.",
        f"The first rank waits {seconds(step.wait_s)} ({percent(step.wait_share)}; p99 {seconds(step.wait_p99_s)}) for "
        "the last at the end of the backward pass.",
    ]


def phases(findings: Findings) -> Grid:
    """Time in each phase."""
    rows = [
        [phase.name, KINDS[phase.kind], f"{phase.count:,}", seconds(phase.total_s), percent(phase.share),
         seconds(phase.median_s), seconds(phase.p99_s)]
        for phase in findings.phases
    ]  # fmt: skip
    return Grid(["phase", "what it is", "count", "total", "of all time", "median", "p99"], rows, words=2)


def sizes(findings: Findings) -> Grid:
    """Messages by size."""
    rows = []
    for row in findings.sizes:
        name = f"up to {bytes_text(row.up_to)}" if row.up_to else "larger"
        tensors = f"{row.tensors / row.messages:.1f}"
        rows.append(
            [name, f"{row.messages:,}", tensors, bytes_text(row.size), seconds(row.median_s), speed(row.bytes_per_s)]
        )
    return Grid(["allreduces", "messages", "tensors each", "bytes in all", "median", "bandwidth"], rows)


def bandwidth(findings: Findings) -> list[str]:
    """One figure for the network."""
    if math.isnan(findings.bytes_per_s):
        return ["Sizes and bandwidth cannot be told: the file gives no tensor's dtype and shape."]
    limit = f"messages above {bytes_text(BIG)}, which carry most bytes" if _mostly_big(findings) else "all messages"
    lines = [f"Bandwidth: {speed(findings.bytes_per_s)} of gradients, over {limit}."]
    if not math.isnan(findings.wire_bytes_per_s):
        lines.append(
            f"On the wire of each rank {speed(findings.wire_bytes_per_s)}: a ring sends 2(n-1)/n of a message, "
            f"n = {findings.ranks}."
        )
    if not math.isnan(findings.fast_bytes_per_s):
        fast = f"The fastest twentieth of those above {bytes_text(BIG)} reach {speed(findings.fast_bytes_per_s)}"
        if not math.isnan(findings.link_bytes_per_s):
            fast += f", {speed(findings.link_bytes_per_s)} on the link of each of the {findings.hosts} hosts"
        if not math.isnan(findings.inside_bytes_per_s):
            fast += f" (sums inside a host go at {speed(findings.inside_bytes_per_s)}; their time is taken off)"
        lines.append(f"{fast}: what the network gives, unless computing beside it held up these as well.")
    return lines


def _mostly_big(findings: Findings) -> bool:
    big = sum(row.size for row in findings.sizes if row.up_to is None or row.up_to > BIG)
    return 2 * big >= sum(row.size for row in findings.sizes)


def ranks(findings: Findings) -> Grid:
    """Who comes last."""
    rows = [
        [f"rank {row.rank}", f"{row.last:,}", percent(row.share), seconds(row.median_s), seconds(row.p99_s),
         f"{row.steps} of {row.of_steps}", seconds(row.step_median_s), seconds(row.waited_s or math.nan)]
        for row in findings.rank_rows
    ]  # fmt: skip
    head = ["rank", "last for tensors", "share", "by (median)", "p99", "last in steps", "by (median)", "waited for it"]
    return Grid(head, rows)


def tensors(findings: Findings, maximum: int) -> Grid:
    """The slowest."""
    rows = [
        [row.name, f"{row.count:,}", DASH if row.size is None else bytes_text(row.size), seconds(row.negotiation_s),
         seconds(row.operation_s), seconds(row.longest_s)]
        for row in findings.tensors[:maximum]
    ]  # fmt: skip
    return Grid(["tensor", "times", "bytes", "negotiation (mean)", "operation (mean)", "longest"], rows)


def ranks_line(findings: Findings) -> str:
    """What the table of ranks rests on."""
    if not findings.rank_rows:
        return "No negotiation in this file names a rank."
    told = findings.rank_rows[0].of_steps
    return f"Which rank was last is told in {told} of {findings.step.steps if findings.step else told} steps."


def page(findings: Findings) -> Page:
    """The page, without its pictures."""
    found = Page("Horovod timeline")
    found.add(Listing(facts(findings)), Text("Advice", 2), Listing(findings.advice))
    found.add(Text("Steps", 2), Listing(step_lines(findings)))
    found.add(Text("Phases", 2), phases(findings))
    found.add(Text("Ranks", 2), Text(ranks_line(findings)))
    if findings.rank_rows:
        found.add(ranks(findings))
    found.add(Text("Messages", 2), Listing(bandwidth(findings)))
    if findings.sizes:
        found.add(sizes(findings))
    found.add(Text("Slowest tensors", 2), tensors(findings, len(findings.tensors)))
    found.add(Text("How the figures come about", 2), Listing(DEFINITIONS))
    return found


DEFINITIONS = (
    "The file is rank 0's. Tensors that go in one message count once in its phases; a negotiation is one tensor's.",
    "Total: the time in which at least one was in that phase. Phases overlap each other, and the computing.",
    "A step begins with the first tensor that had been allreduced in the step before; the first step is left out, and "
    "those with less than half the usual tensors. Figures of steps are medians.",
    "Exposed: what messages take after the last tensor of the step was ready on all ranks. Over MPI and Gloo the "
    "thread that sends also negotiates, so a tensor may have been ready before it was seen: hence from ... to.",
    "A rank is late where it came more than 2 ms after the first; ranks less apart were seen by Horovod at once.",
    "Slowest tensors: of those that were sent at least half as often as any.",
)


def terminal(findings: Findings) -> str:
    """All of it in short."""
    parts: list[Sequence[str]] = [
        facts(findings), step_lines(findings), [phases(findings).for_terminal()],
        [ranks_line(findings), *([ranks(findings).for_terminal()] if findings.rank_rows else [])],
        bandwidth(findings) + ([sizes(findings).for_terminal()] if findings.sizes else []),
        [tensors(findings, FEW).for_terminal()],
        ["Advice:", *(f"  - {line}" for line in findings.advice)],
    ]  # fmt: skip
    return "\n\n".join("\n".join(part) for part in parts)


def as_json(findings: Findings) -> dict[str, Any]:
    """Plain values; what is not known is null."""
    record = asdict(findings)
    del record["curves"]
    plain: dict[str, Any] = _plain(record)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value
