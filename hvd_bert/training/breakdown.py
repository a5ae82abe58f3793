"""Imbalance, FLOP/s and MFU for each line of metrics.jsonl, and the step-time summary at the end of a training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from hvd_bert.data.batch_plan import BatchPlan, Lengths
from hvd_bert.monitoring import PHASES
from hvd_bert.training.meter import Meter


class Breakdown:
    """Reads the meter's log lines, adds imbalance, FLOP/s and MFU, and sums up the lines for the step-time summary.

    If there are several lines, the sums exclude the first line, whose steps (usually one) are warm-up.
    """

    def __init__(
        self,
        meter: Meter,
        plan: BatchPlan,
        flops: Callable[[Lengths, int], float | None],
        peak_flops: float | None,
        step: int,
    ) -> None:
        """Start at `step`, the number of steps that are already done. Includes the imbalance since the last log line.

        `flops`: `Task.flops`. `peak_flops`: the peak FLOP/s of all devices together; None if unknown.
        """
        self.meter, self.plan, self.flops, self.peak_flops = meter, plan, flops, peak_flops
        self.taken = 0  # number of steps since this process started, unlike the step number of a resumed run
        self._imbalances = sum(plan.imbalance(before) for before in range(meter.last_step, step))
        self._lines = 0
        self._sums: Counter[str] = Counter()  # sums over the log lines; "flops" is NaN if unknown
        self._phases = torch.zeros(plan.size, len(meter.phases), dtype=torch.float64)

    def count(self, step: int) -> None:
        """Count step `step` (0, 1, ...) and add its imbalance. Call this while the step runs."""
        self.taken += 1
        self._imbalances += self.plan.imbalance(step)  # now, because the plan still caches the step's assignment

    def end_line(self, step: int) -> None:
        """End a log line after step `step`."""
        self.meter.end_line(step)
        self._line_imbalances, self._imbalances = self._imbalances, 0.0

    def read(self) -> dict[str, float]:
        """Return the row of `Meter.read` with `imbalance` and, if known, `tflops_per_s` and `mfu`. A collective.

        Adds the line to the sums for `results`.
        """
        before, row = self.meter.last_step, self.meter.read()
        steps = range(before, self.meter.last_step)
        windows = np.concatenate([self.plan.step_windows(before) for before in steps])
        flops = self.flops(self.plan.lengths[windows], len(steps) * self.plan.total_micro_batches)
        if self._lines == 1:
            self._sums.clear()
            self._phases.zero_()
        self._lines += 1
        self._phases += self.meter.phase_s
        sums = self.meter.sums | {"steps": len(steps), "imbalance": self._line_imbalances}
        sums["flops"] = math.nan if flops is None else flops
        self._sums.update(sums)
        return row | {"imbalance": self._line_imbalances / len(steps)} | self._rates(sums)

    def _rates(self, sums: Mapping[str, float]) -> dict[str, float]:
        flops_per_s = sums["flops"] / sums["seconds"]
        if math.isnan(flops_per_s):
            return {}
        rates = {"tflops_per_s": flops_per_s / 1e12}
        return rates if self.peak_flops is None else rates | {"mfu": flops_per_s / self.peak_flops}

    def results(self) -> dict[str, Any]:
        """Return the value of train_results.json's key `breakdown` (docs/reference/output-files.md).

        Empty if no line was logged.
        """
        if not self._lines:
            return {}
        sums = self._sums
        milliseconds = 1000 * self._phases / sums["watched"]  # [ranks, phases]
        step = milliseconds.sum(1)
        columns = zip(self.meter.phases, milliseconds.T, strict=True)
        return {
            "taken_steps": self.taken,
            "steps": sums["watched"],
            "step": _over_ranks(step, step),
            "phases": {name: _over_ranks(column, step) for name, column in columns},
            "windows_per_s": sums["windows"] / sums["seconds"],
            "tokens_per_s": sums["tokens"] / sums["seconds"],
            **self._rates(sums),
            "padding_share": 1 - sums["tokens"] / sums["positions"],
            "imbalance": sums["imbalance"] / sums["steps"],
        }


def _over_ranks(milliseconds: torch.Tensor, step: torch.Tensor) -> dict[str, float]:
    """Return a phase's mean, minimum and maximum time over the ranks, and its share of the mean step time.

    `milliseconds`, `step`: time of the phase and of the whole step, [ranks].
    """
    mean, minimum, maximum = milliseconds.mean(), milliseconds.min(), milliseconds.max()
    figures = {"ms": mean, "min_ms": minimum, "max_ms": maximum, "share": mean / step.mean()}
    return {name: float(value) for name, value in figures.items()}


def describe_steps(results: Mapping[str, Any], resumed: bool = False) -> list[str]:
    """Format the step-time summary as lines; none if no line was logged. `results`: content of train_results.json.

    `resumed`: whether the run was resumed, so that `results["breakdown"]` covers only its last steps.
    """
    found = results["breakdown"]
    if not found:
        return []
    of_ranks = results["world_size"] > 1
    since = " since the resume" if resumed else ""
    lines = [f"Step time by phase, mean of {found['steps']} step(s){since}:"]
    lines.append(f"  {'':<24}{'ms':>10}" + (f"{'min':>10}{'max':>10}" if of_ranks else "") + f"{'share':>9}")

    waits = of_ranks and "exposed_comm" not in found["phases"]
    names = PHASES | {"compute": "forward, backward, waiting"} if waits else PHASES
    rows = {names[phase]: figures for phase, figures in found["phases"].items()} | {"step": found["step"]}
    for name, figures in rows.items():
        ends = f"{figures['min_ms']:>10.1f}{figures['max_ms']:>10.1f}" if of_ranks else ""
        lines.append(f"  {name:<24}{figures['ms']:>10.1f}{ends}{figures['share']:>9.1%}")
    return [*lines, *_totals(results, found, since)]


def _totals(results: Mapping[str, Any], found: Mapping[str, Any], since: str) -> list[str]:
    """Format the summary's lines on evaluations, checkpoints and throughput. `found`: `Breakdown.results`."""
    lines = []
    if results.get("evaluations"):
        lines.append(f"{results['evaluations']} evaluation(s) in {results['evaluation_s']:.1f} s.")
    if results["checkpoints"]:
        waited, wrote = results["checkpoint_pause_s"], results["checkpoint_write_s"]
        lines.append(
            f"{results['checkpoints']} checkpoint(s): training waited {waited:.2f} s, writing took {wrote:.2f} s."
        )
    tokens, work = "", ""
    if found["tokens_per_s"] != found["windows_per_s"]:  # equal if the examples have no tokens: each counts as one
        tokens = f", {found['tokens_per_s']:,.0f} tokens/s"
        work = (
            f"; padding {found['padding_share']:.1%}; maximum tokens per rank {found['imbalance']:.3f} times the mean"
        )
    useful = f", {found['tflops_per_s']:.3g} TFLOP/s useful" if "tflops_per_s" in found else ""
    mfu = f", MFU {found['mfu']:.1%}" if "mfu" in found else ""
    lines.append(f"{found['windows_per_s']:.1f} {results.get('unit', 'windows')}/s{since}{tokens}{useful}{mfu}{work}.")
    if "energy_wh" in results:
        energy, rate = results["energy_wh"], 1000 * results["energy_wh"] / results["train_samples"]
        lines.append(f"GPU energy {energy:.3g} Wh, {rate:.3g} Wh per 1,000 {results.get('unit', 'windows')}.")
    if "tflops_per_s" in found and not mfu and results["ranks"][0]["device"] != "cpu":
        lines.append(
            f"No MFU: the peak of {results['device_name']} in {results['precision']} is unknown. Give --peak_tflops."
        )
    return lines
