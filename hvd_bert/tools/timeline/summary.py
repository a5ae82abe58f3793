"""Present the findings as text, tables and JSON."""

from __future__ import annotations

import json
import math

from hvd_bert.tools.rendering import DASH, byte_size, counted, percent, seconds
from hvd_bert.tools.rendering.page import Grid, Listing, Page, Text
from hvd_bert.tools.timeline.events import MAX_BYTES
from hvd_bert.tools.timeline.findings import BIG, KINDS, NO_CACHE, Findings, exposed

TITLE = "Horovod timeline"


def speed(bytes_per_s: float) -> str:
    """Format a bandwidth in bytes and bits per second."""
    if math.isnan(bytes_per_s):
        return DASH
    if bytes_per_s < 1e6:
        return f"{bytes_per_s / 1e3:.3g} kB/s"
    return f"{bytes_per_s / 1e6:.4g} MB/s ({bytes_per_s * 8e-9:.3g} Gb/s)"


def facts(findings: Findings) -> list[str]:
    """Describe the timeline file and its gaps."""
    ranks = counted(findings.ranks, "rank") if findings.ranks else "an unknown number of ranks (set it with --ranks N)"
    events = f"{findings.events:,} events of {ranks} in {seconds(findings.covered_s)}"
    lines = [f"{findings.path}: {events}, {byte_size(findings.size)}."]
    if findings.size > MAX_BYTES:
        lines.append(f"Only its first {byte_size(MAX_BYTES)} are analyzed; --timeline_steps records fewer steps.")
    elif findings.cut_short:
        lines.append("The file is incomplete: the run was killed or is still running. Its complete events are counted.")
    if findings.unfinished:
        lines.append(f"Spans without an end, left out: {findings.unfinished}.")
    if findings.naming_ranks < findings.negotiations:
        share = findings.naming_ranks / findings.negotiations
        lines.append(
            f"{percent(share)} of the negotiations name ranks, except answers of Horovod's response cache. With "
            f"{NO_CACHE}, all steps name ranks."
        )
    return lines


def step_lines(findings: Findings) -> list[str]:
    """Describe the step time and its share of communication."""
    step = findings.step
    if step is None:
        return ["No steps found: no tensor was allreduced in 3 steps."]
    return [
        f"{step.steps} steps of {seconds(step.step_s)} (median; p99 {seconds(step.p99_s)}), {step.messages:.0f} "
        f"messages and {byte_size(step.size)} each.",
        f"Messages take {seconds(step.busy_s)} of it; {percent(step.hidden_share)} of that is hidden "
        "behind the backward pass.",
        f"Exposed, after the last gradient was ready on all ranks: {exposed(step)}.",
        f"The first rank waits {seconds(step.wait_s)} ({percent(step.wait_share)}; p99 {seconds(step.wait_p99_s)}) for "
        "the last at the end of the backward pass.",
    ]


def phases(findings: Findings) -> Grid:
    """Make the table of phases."""
    rows = []
    for phase in findings.phases:
        cells = [phase.name, KINDS[phase.kind], f"{phase.count:,}", seconds(phase.total_s), percent(phase.share)]
        rows.append([*cells, seconds(phase.median_s), seconds(phase.p99_s)])
    return Grid(["phase", "meaning", "count", "total", "of all time", "median", "p99"], rows, words=2)


def sizes(findings: Findings) -> Grid:
    """Make the table of messages by size."""
    rows = []
    for row in findings.sizes:
        name = f"up to {byte_size(row.up_to)}" if row.up_to else "larger"
        tensors = f"{row.tensors / row.messages:.1f}"
        rate = DASH if findings.ranks == 1 else speed(row.bytes_per_s)
        rows.append([name, f"{row.messages:,}", tensors, byte_size(row.size), seconds(row.median_s), rate])
    return Grid(["allreduces", "messages", "tensors each", "total bytes", "median", "bandwidth"], rows)


def bandwidth(findings: Findings) -> list[str]:
    """Describe the network's bandwidth, or why it is unknown."""
    if findings.ranks == 1:
        return ["Bandwidth: none, as one rank sends nothing. Its messages are copies in its memory."]
    if math.isnan(findings.bytes_per_s):
        return ["Sizes and bandwidth are unknown: the file has no dtypes and shapes of tensors."]
    big = sum(row.size for row in findings.sizes if row.up_to is None or row.up_to > BIG)
    mostly_big = 2 * big >= sum(row.size for row in findings.sizes)
    limit = f"messages above {byte_size(BIG)}, which carry most bytes" if mostly_big else "all messages"
    lines = [f"Bandwidth: {speed(findings.bytes_per_s)} of gradients, over {limit}."]
    if not math.isnan(findings.wire_bytes_per_s):
        lines.append(
            f"On the wire, per rank: {speed(findings.wire_bytes_per_s)}. A ring sends 2(n-1)/n of a message, "
            f"n = {findings.ranks}."
        )
    if not math.isnan(findings.fast_bytes_per_s):
        lines.append(
            f"The fastest 5 % of messages above {byte_size(BIG)} reach {speed(findings.fast_bytes_per_s)}: the"
            " bandwidth of the network, unless computation delayed these messages, too."
        )
    return lines


def ranks(findings: Findings) -> Grid:
    """Make the table of ranks: how often each is last, and by how long."""
    rows = []
    for row in findings.rank_rows:
        tensors = [f"{row.last:,}", percent(row.share), seconds(row.median_s), seconds(row.p99_s)]
        steps = [f"{row.steps} of {row.of_steps}", seconds(row.step_median_s), seconds(row.waited_s or math.nan)]
        rows.append([f"rank {row.rank}", *tensors, *steps])
    head = ["rank", "last for tensors", "share", "by (median)", "p99", "last in steps", "by (median)", "total wait"]
    return Grid(head, rows)


def ranks_line(findings: Findings) -> str:
    """Describe in how many steps the last rank to become ready is found, or why there is no table of ranks."""
    if findings.ranks == 1:
        return "A single rank does not wait."
    if not findings.rank_rows:
        return "No negotiation in this file names a rank."
    known = findings.rank_rows[0].of_steps
    return f"The last rank is known in {known} of {findings.step.steps if findings.step else known} steps."


def page(findings: Findings, definitions: bool = False) -> Page:
    """Make the page. `definitions`: whether to add the definitions of the figures."""
    found = Page(TITLE)
    found.add(Text(" ".join(facts(findings))), Text("Advice", 2), Listing(findings.advice))
    found.add(Text("Steps", 2), Listing(step_lines(findings)))
    found.add(Text("Phases", 2), phases(findings))
    found.add(Text("Ranks", 2), Text(ranks_line(findings)))
    if findings.rank_rows and findings.ranks != 1:
        found.add(ranks(findings))
    found.add(Text("Messages", 2), Listing(bandwidth(findings)))
    if findings.sizes:
        found.add(sizes(findings))
    if definitions:
        found.add(Text("Definitions", 2), Listing(DEFINITIONS))
    return found


DEFINITIONS = (
    "Rank 0 wrote the file. Tensors sent in one message count once in its phases. Each tensor has its own negotiation.",
    "Total: the time with at least one message in the phase. Phases overlap with each other and with computation.",
    "A step begins with the first tensor that was already allreduced in the step before. The first step is left out, "
    "and so are steps with less than half the usual tensors. Figures of steps are medians. A step ends when the next "
    "step begins; times of steps before a step that is left out are not counted.",
    "Exposed: the time of messages after the last tensor of the step was ready on all ranks. Over MPI and Gloo the "
    "thread that sends also negotiates, so it may notice late that a tensor is ready: this gives a range.",
    "A rank is late if it is ready more than 2 ms after the first. Horovod may not notice a smaller difference.",
)


def as_json(findings: Findings) -> str:
    """Convert the findings to a JSON object; unknown values are null."""
    return json.dumps(json.loads(json.dumps(findings, default=vars), parse_constant=lambda nan: None))
