"""Up to three lines of advice, each on a figure above its threshold (listed in docs/guides/profiling.md)."""

from __future__ import annotations

from hvd_bert.timeline.figures import Findings, StepFigures

MAX_LINES = 3
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
    found = [*_waiting(findings, step), *_exposed(step), *_copies(findings, step)]
    if found:
        return [line for _, line in sorted(found, reverse=True)[:MAX_LINES]]
    return [
        f"Communication does not slow this run down: {_percent(step.exposed_most_share)} of a step is exposed, "
        f"{_percent(step.wait_share)} is waiting for the last rank. To go faster, speed up the computation."
    ]


def _waiting(findings: Findings, step: StepFigures) -> list[tuple[float, str]]:
    rows = findings.rank_rows
    of_steps = rows[0].of_steps if rows else 0
    if of_steps >= ENOUGH_STEPS and 2 * of_steps >= step.steps:
        worst = max(rows, key=lambda row: row.waited_s)
        cost = worst.step_median_s * worst.steps / of_steps / step.step_s if worst.steps else 0.0
        if worst.steps >= SAME_RANK * of_steps and cost >= WAIT_SHARE:
            return [
                (
                    cost,
                    f"Rank {worst.rank} is a straggler: it is the last in {worst.steps} of {of_steps} steps, by "
                    f"{_ms(worst.step_median_s)} (median), {_percent(cost)} of a step. Check its device, its data "
                    "and what else runs on its host (python -m hvd_bert.doctor under the same launcher).",
                )
            ]
        if step.wait_share >= WAIT_SHARE:
            return [
                (
                    step.wait_share,
                    f"Ranks wait {_ms(step.wait_s)} per step ({_percent(step.wait_share)}) for the last one, which "
                    f"is not always the same (rank {worst.rank} in {worst.steps} of {of_steps} steps). Uneven work and "
                    "shared hosts cause this.",
                )
            ]
        return []
    if step.wait_share < WAIT_SHARE:
        return []
    if 2 * of_steps >= step.steps:
        hint = f"{step.steps} steps are too few to find a straggler: record {ENOUGH_STEPS + 1} or more."
    else:
        hint = (
            f"This file names ranks in only {of_steps} of {step.steps} steps: to find the straggler, record with "
            f"{NO_CACHE} (for profiling only)."
        )
    waits = f"The first rank waits {_ms(step.wait_s)} per step ({_percent(step.wait_share)}) for the last."
    return [(step.wait_share, f"{waits} {hint}")]


def _exposed(step: StepFigures) -> list[tuple[float, str]]:
    if step.exposed_most_share < EXPOSED_SHARE:
        return []
    how_much = f"Exposed communication takes {_range(step)} per step"
    per_message = step.size / max(step.messages, 1)
    if per_message < SMALL_MESSAGE and step.messages > MANY_MESSAGES:
        hint = (
            f"{step.messages:.0f} messages of {bytes_text(per_message)} each: latency. Fuse more with "
            "HOROVOD_CYCLE_TIME=5, and do not set HOROVOD_FUSION_THRESHOLD below its default of 128 MiB."
        )
    elif per_message < SMALL_MESSAGE:
        hint = (
            f"{bytes_text(step.size)} per step in {step.messages:.0f} messages: latency or ranks without a free core, "
            "not bandwidth. Use fewer, larger steps (a larger batch, --gradient_accumulation_steps) or one core more "
            "per rank."
        )
    else:
        hint = (
            f"{bytes_text(step.size)} per step in {step.messages:.0f} messages: bandwidth. --fp16_allreduce halves the "
            "bytes, --gradient_accumulation_steps sends them less often. Check that the fastest network is used."
        )
    return [(step.exposed_most_share, f"{how_much}. {hint}")]


def _copies(findings: Findings, step: StepFigures) -> list[tuple[float, str]]:
    copies = sum(phase.total_s for phase in findings.phases if "FUSION_BUFFER" in phase.name and phase.kind == "copy")
    sending = sum(phase.total_s for phase in findings.phases if phase.kind == "collective")
    share = copies / findings.covered_s if findings.covered_s else 0.0
    if not sending or copies < COPY_SHARE * sending or share < COPY_OF_STEP:
        return []
    return [
        (
            share,
            f"Copies to and from the fusion buffer take {_percent(copies / sending)} of the time of the collectives, "
            f"{_percent(share)} of all time, in messages of {bytes_text(findings.message_median)} (median). Try a "
            "smaller HOROVOD_FUSION_THRESHOLD (33554432), so that large tensors are sent without a copy.",
        )
    ]


def _range(step: StepFigures) -> str:
    low, high = step.exposed_least_s, step.exposed_most_s
    if high - low < 0.05 * high:
        return f"{_ms(high)} ({_percent(step.exposed_most_share)})"
    return f"{_ms(low)} to {_ms(high)} ({_percent(step.exposed_least_share)} to {_percent(step.exposed_most_share)})"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def bytes_text(size: float) -> str:
    """A size with its unit."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
