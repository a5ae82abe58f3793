"""Up to three lines of advice, each on a figure above its threshold (listed in docs/guides/profiling.md)."""

from __future__ import annotations

from hvd_bert.rendering.text import byte_size, percent, seconds
from hvd_bert.tools.timeline.analysis import Findings, StepFigures

WAIT_SHARE = 0.05  # of the step, spent waiting for the last rank
SAME_RANK = 0.6  # of the steps, with the same rank last
ENOUGH_STEPS = 10  # that name ranks; with fewer no straggler is named
EXPOSED_SHARE = 0.10  # of the step
SMALL_MESSAGE = 1 << 20  # bytes: below that, latency matters more than bandwidth
MANY_MESSAGES = 8  # per step
COPY_SHARE = 0.25  # copies to and from the fusion buffer, over the time of collectives
COPY_OF_STEP = 0.02
NO_CACHE = "HOROVOD_CACHE_CAPACITY=0"


def advise(findings: Findings) -> list[str]:
    """The advice, most expensive problem first, or one line that there is no problem."""
    step = findings.step
    if step is None:
        return ["No training steps found in this file (no tensor was allreduced in 3 steps). Record more steps."]
    if findings.ranks == 1:
        return ["One rank sends nothing. Record a run of several ranks for advice on communication."]
    found = [advice for advice in (_waiting(findings, step), _exposed(step), _copies(findings)) if advice]
    if found:
        return [line for _, line in sorted(found, reverse=True)]
    return [
        f"Communication does not slow this run down: {percent(step.exposed_most_share)} of a step is exposed, "
        f"{percent(step.wait_share)} is waiting for the last rank. To go faster, speed up the computation."
    ]


def _waiting(findings: Findings, step: StepFigures) -> tuple[float, str] | None:
    """The share of the step that is lost, and the advice."""
    rows, named = findings.rank_rows, findings.rank_rows[0].of_steps if findings.rank_rows else 0
    known = 2 * named >= step.steps
    if known and named >= ENOUGH_STEPS:
        worst = max(rows, key=lambda row: row.waited_s)
        cost = worst.step_median_s * worst.steps / named / step.step_s if worst.steps else 0.0
        if worst.steps >= SAME_RANK * named and cost >= WAIT_SHARE:
            return cost, (
                f"Rank {worst.rank} is a straggler: it is the last in {worst.steps} of {named} steps, by "
                f"{seconds(worst.step_median_s)} (median), {percent(cost)} of a step. Check its device, its data "
                "and what else runs on its host (hvd-bert doctor under the same launcher)."
            )
        hint = (
            f"That is not always the same one (rank {worst.rank} in {worst.steps} of {named} steps). Uneven work and "
            "shared hosts cause this."
        )
    elif known:
        hint = f"{step.steps} steps are too few to find a straggler: record {ENOUGH_STEPS + 1} or more."
    else:
        hint = (
            f"This file names ranks in only {named} of {step.steps} steps: to find the straggler, record with "
            f"{NO_CACHE} (for profiling only)."
        )
    if step.wait_share < WAIT_SHARE:
        return None
    waits = f"The first rank waits {seconds(step.wait_s)} per step ({percent(step.wait_share)}) for the last."
    return step.wait_share, f"{waits} {hint}"


def _exposed(step: StepFigures) -> tuple[float, str] | None:
    if step.exposed_most_share < EXPOSED_SHARE:
        return None
    per_message = step.size / max(step.messages, 1)
    sent = f"{byte_size(step.size)} per step in {step.messages:.0f} messages"
    if per_message >= SMALL_MESSAGE:
        hint = (
            f"{sent}: bandwidth. --fp16_allreduce halves the bytes, --gradient_accumulation_steps sends them less "
            "often. Check that the fastest network is used."
        )
    elif step.messages > MANY_MESSAGES:
        hint = (
            f"{step.messages:.0f} messages of {byte_size(per_message)} each: latency. Fuse more with "
            "HOROVOD_CYCLE_TIME=5, and do not set HOROVOD_FUSION_THRESHOLD below its default of 128 MiB."
        )
    else:
        hint = (
            f"{sent}: latency or ranks without a free core, not bandwidth. Use fewer, larger steps (a larger batch, "
            "--gradient_accumulation_steps) or one core more per rank."
        )
    return step.exposed_most_share, f"Exposed communication takes {exposed(step)} per step. {hint}"


def _copies(findings: Findings) -> tuple[float, str] | None:
    copies = sum(phase.total_s for phase in findings.phases if "FUSION_BUFFER" in phase.name and phase.kind == "copy")
    sending = sum(phase.total_s for phase in findings.phases if phase.kind == "collective")
    share = copies / findings.covered_s if findings.covered_s else 0.0
    if not sending or copies < COPY_SHARE * sending or share < COPY_OF_STEP:
        return None
    return share, (
        f"Copies to and from the fusion buffer take {percent(copies / sending)} of the time of the collectives, "
        f"{percent(share)} of all time, in messages of {byte_size(findings.message_median)} (median). Try a "
        "smaller HOROVOD_FUSION_THRESHOLD (33554432), so that large tensors are sent without a copy."
    )


def exposed(step: StepFigures) -> str:
    """The time and share of exposed communication, or their range."""
    low, high = step.exposed_least_s, step.exposed_most_s
    if high - low < 0.05 * high:
        return f"{seconds(high)} ({percent(step.exposed_most_share)})"
    return (
        f"{seconds(low)} to {seconds(high)} ({percent(step.exposed_least_share)} to {percent(step.exposed_most_share)})"
    )
