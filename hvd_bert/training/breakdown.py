"""What each line of the metrics says of the steps' work, and what all lines come to: the table at a training's end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.model.flops import training_flops
from hvd_bert.training.meter import Meter

NAMES = {
    "data": "waiting for data",
    "compute": "forward and backward",
    "exposed_comm": "exposed communication",
    "optimizer": "clipping and optimizer",
    "checkpoint": "checkpoint pause",
    "other": "other",
}
# What to do where a phase takes this much of the step.
LARGE_SHARE = 0.1
ADVICE = {
    "data": "batches are made too slowly: look at a rank's cores (the job's CPUs per task) and the file system.",
    "exposed_comm": "--timeline_file or --profile records some steps that say why (docs/guides/profiling.md).",
    "checkpoint": "--save_steps says how often one is made.",
}


class Breakdown:
    """Reads a training's meter, adds what follows from the windows' lengths alone, and sums up.

    The first line is left out of the sums where there are more: its steps, as a rule one, are warm-up.
    """

    def __init__(self, meter: Meter, plan: BatchPlan, shape: Any, peak_flops: float | None, step: int) -> None:
        """`shape`: the model's config; `peak_flops`: of all devices, None: not known; `step`: how many were taken."""
        self.meter, self.plan, self.shape, self.peak_flops = meter, plan, shape, peak_flops
        self.taken = 0  # steps, by this process
        self._imbalances = sum(plan.imbalance(before) for before in range(meter.last_step, step))
        self._lines = 0
        self._forget()

    def _forget(self) -> None:
        self._seconds = self._flops = self._imbalance = 0.0
        self._steps = self._watched = self._windows = self._tokens = self._positions = 0
        self._phases = torch.zeros(self.plan.size, len(self.meter.phases), dtype=torch.float64)

    def count(self, step: int) -> None:
        """Step number `step` (0, 1, ...) is being taken."""
        self.taken += 1
        self._imbalances += self.plan.imbalance(step)  # now, while the plan remembers who has which windows

    def read(self, step: int) -> dict[str, float]:
        """What the meter gives (`Meter.read`), and `imbalance`, `tflops_per_s`, `mfu` if the peak is known.

        A collective.
        """
        steps = range(self.meter.last_step, step)
        row = self.meter.read(step)
        windows = np.concatenate([self.plan.step_windows(before) for before in steps])
        flops = training_flops(self.shape, self.plan.lengths[windows])
        imbalances, self._imbalances = self._imbalances, 0.0
        self._add(len(steps), flops, imbalances)
        row |= {"imbalance": imbalances / len(steps)}
        return row | self._rates(flops / self.meter.look.seconds)

    def _rates(self, flops_per_s: float) -> dict[str, float]:
        rates = {"tflops_per_s": flops_per_s / 1e12}
        return rates if self.peak_flops is None else rates | {"mfu": flops_per_s / self.peak_flops}

    def _add(self, steps: int, flops: float, imbalances: float) -> None:
        if self._lines == 1:
            self._forget()
        self._lines += 1
        look = self.meter.look
        self._steps += steps
        self._flops += flops
        self._imbalance += imbalances
        self._seconds += look.seconds
        self._windows += look.windows
        self._tokens += look.tokens
        self._positions += look.positions
        self._watched += look.watched
        self._phases += look.phases

    def results(self) -> dict[str, Any]:
        """For train_results.json (docs/reference/output-files.md); empty if there was no line."""
        if not self._lines:
            return {}
        milliseconds = 1000 * self._phases / self._watched  # [ranks, phases]
        step = milliseconds.sum(1)
        return {
            "taken_steps": self.taken,
            "steps": self._watched,
            "step": _over_ranks(step, step),
            "phases": {
                name: _over_ranks(column, step) for name, column in zip(self.meter.phases, milliseconds.T, strict=True)
            },
            "windows_per_s": self._windows / self._seconds,
            "tokens_per_s": self._tokens / self._seconds,
            **self._rates(self._flops / self._seconds),
            "padding_share": 1 - self._tokens / self._positions,
            "imbalance": self._imbalance / self._steps,
        }


def _over_ranks(milliseconds: torch.Tensor, step: torch.Tensor) -> dict[str, float]:
    """Of each rank's milliseconds [ranks], of as many in a `step` [ranks]."""
    mean, minimum, maximum = milliseconds.mean(), milliseconds.min(), milliseconds.max()
    figures = {"ms": mean, "min_ms": minimum, "max_ms": maximum, "share": mean / step.mean()}
    return {name: float(value) for name, value in figures.items()}


def describe_steps(results: Mapping[str, Any]) -> list[str]:
    """The lines that end a training, from what train_results.json gets; none if it took no step."""
    found = results["breakdown"]
    if not found:
        return []
    of_ranks = results["world_size"] > 1
    lines = [f"Where a step's time went, mean of {found['steps']} step(s):"]
    lines.append(f"  {'':<24}{'ms':>10}" + (f"{'least':>10}{'most':>10}" if of_ranks else "") + f"{'share':>9}")

    def row(name: str, ms: float, share: float, minimum: float | None = None, maximum: float | None = None) -> None:
        ends = "".join(f"{'' if end is None else f'{end:.1f}':>10}" for end in (minimum, maximum))
        lines.append(f"  {name:<24}{ms:>10.1f}{ends if of_ranks else ''}{share:>9.1%}")

    names = NAMES if "exposed_comm" in found["phases"] else NAMES | {"compute": "forward, backward, waiting"}
    for phase, figures in found["phases"].items():
        row(names[phase], figures["ms"], figures["share"], figures["min_ms"], figures["max_ms"])
    row("step", found["step"]["ms"], 1.0, found["step"]["min_ms"], found["step"]["max_ms"])
    if results.get("evaluations"):
        per_step = 1000 * results["evaluation_s"] / found["taken_steps"]
        row("evaluation, on top", per_step, per_step / found["step"]["ms"])
    return [*lines, *_totals(results, found), *_largest(found)]


def _totals(results: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Evaluations, checkpoints, rates and work, a line each."""
    lines = []
    if results.get("evaluations"):
        lines.append(f"{results['evaluations']} evaluation(s) in {results['evaluation_s']:.1f} s.")
    if results["checkpoints"]:
        lines.append(
            f"{results['checkpoints']} checkpoint(s): training waited {results['checkpoint_pause_s']:.2f} s,"
            f" {results['checkpoint_write_s']:.2f} s of writing ran beside it."
        )
    mfu = f", MFU {found['mfu']:.1%}" if "mfu" in found else ""
    tflops = found["tflops_per_s"]
    useful = f"{tflops:.1f} TFLOP/s" if tflops >= 1 else f"{1000 * tflops:.1f} GFLOP/s"
    lines.append(
        f"{found['windows_per_s']:.1f} windows/s, {found['tokens_per_s']:,.0f} tokens/s,"
        f" {useful} useful{mfu}; padding {found['padding_share']:.1%};"
        f" the most tokens of a rank {found['imbalance']:.3f} times the mean."
    )
    if not mfu and results["ranks"][0]["device"] != "cpu":
        lines.append(
            f"No MFU: no peak of {results['device_name']} in {results['precision']} is known; give --peak_tflops."
        )
    return lines


def _largest(found: Mapping[str, Any]) -> list[str]:
    """What takes most of the step, of that which might be mended, if it takes much."""
    shares = {phase: found["phases"][phase]["share"] for phase in ADVICE if phase in found["phases"]}
    phase = max(shares, key=lambda name: shares[name])
    if shares[phase] < LARGE_SHARE:
        return []
    return [f"{NAMES[phase].capitalize()} takes {shares[phase]:.0%} of the step: {ADVICE[phase]}"]
