"""The checks of gpu_acceptance.py of --cuda_graphs: the losses of steps without graphs, and the speed next to them.

Eager steps are compared on the same padded batches, from the same seed. Both use deterministic kernels, so a difference
is an error of the graphs. Each precision runs in its own process:

    python benchmarks/acceptance_graphs.py cuda FOUND.json bf16
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from acceptance_place import NotHere, Outcome, OutOfTime, Place
from acceptance_speed import measure_ours, window_flops
from acceptance_steps import prepare
from acceptance_training import SAME_PRECISION, SAME_SUMS

from hvd_bert.model.cuda_graphs import parts_of
from hvd_bert.tools.bench.host_time import FIGURES as TIMES
from hvd_bert.tools.bench.measure import Recorder
from hvd_bert.training import graphs

GRAPHS, COMPILE = "--cuda_graphs", "--torch_compile"
TOLERANCES = {"fp32": SAME_SUMS, "bf16": SAME_PRECISION, "fp16": SAME_PRECISION}
# Ten sections of two steps: a loss per section, and the first step's.
STEPS = ["--strategy", "none", GRAPHS, "--deterministic", "--per_device_train_batch_size", "8", "--steps", "2"]
MIN_LOSSES = 6  # of 11: at first, fp16 skips steps until its scale fits
VARIANTS = {"eager": [], "graphs": [GRAPHS], "compiled": [COMPILE], "both": [COMPILE, GRAPHS]}
SECTIONS = ["--steps", "10", "--repeats", "2"]
RECORDED = re.compile(r"recorded in ([\d.]+) s")
MAX_LAUNCHES = {8: 150, 32: 150, 64: None}  # windows per step -> the goal with graphs


def trained(flags: Sequence[str], graphed: bool, whole: bool = True) -> Any:
    """Loss and gradient norm of each logged step, [steps, 2]. `whole`: one graph, not one per layer.

    Without `graphed` no size of the padded batches has graphs.
    """
    recorder, most = Recorder(), graphs.MOST if graphed else 0
    with (
        patch.object(graphs, "MOST", most),
        patch.object(graphs, "parts_of", lambda model, _: parts_of(model, whole)),
    ):
        prepare([*STEPS, *flags], 9, "").run(recorder)
    return np.array([[row["loss"], row["grad_norm"]] for row in recorder.rows])


def difference(found: Any, expected: Any) -> float:
    """The largest relative difference; infinity if other steps were skipped, or too many."""
    one, other = np.isfinite(found).all(1), np.isfinite(expected).all(1)
    if not np.array_equal(one, other) or one.sum() < MIN_LOSSES:
        return math.inf
    return float(np.abs(found[one] / expected[one] - 1).max())


def check(precision: str, *flags: str) -> Outcome:
    """Steps with a graph for the model and with one per layer, each without dropout and with it. `flags`: further ones
    of `hvd-bert bench`."""
    flags += () if precision == "fp32" else (f"--{precision}",)
    found = {}
    for dropout in ("0", "0.1"):
        own = [*flags, "--dropout", dropout]
        eager = trained(own, graphed=False)
        for unit in ("model", "layers"):
            found[f"{unit}, dropout {dropout}"] = difference(trained(own, True, unit == "model"), eager)
    text = "; ".join(f"{name}: {worst:.1e}" for name, worst in found.items())
    return Outcome(text, all(worst <= TOLERANCES[precision] for worst in found.values()), {"differences": found})


def check_apart(place: Place, precision: str) -> Outcome:
    if place.device != "cuda":
        raise NotHere("needs a GPU")
    return place.outcome(f"graphs-{precision}", __file__, precision)


def measured(place: Place, windows: int, name: str) -> dict[str, Any]:
    """The figures of a variant. Raises UserError."""
    flags = [*VARIANTS[name], *SECTIONS, "--per_device_train_batch_size", str(windows)]
    log = f"graphs-{windows}-{name}"
    record = measure_ours(place, flags, log)
    recorded = RECORDED.search((place.out / f"{log}.log").read_text(encoding="utf-8"))
    return {
        "windows_per_s": record["figures"]["windows_per_s"]["median"],
        "padded_equivalent": 1e9 * record["figures"]["useful_gflops"]["median"] / window_flops(place),
        **{key: record[key] for key in TIMES},
        "gib": max(record["memory_bytes"]) / 2**30,
        "recorded_s": float(recorded[1]) if recorded else None,
    }


def described(found: dict[str, Any]) -> str:
    rates = "{windows_per_s:.0f} windows/s ({padded_equivalent:.0f} padded-equivalent)".format(**found)
    host, busy, count = ("?" if found[key] is None else form.format(found[key]) for key, (_, form) in TIMES.items())
    made = "" if found["recorded_s"] is None else f", recorded in {found['recorded_s']:.1f} s"
    return f"{rates}, host {host} ms, busy {busy} ms, {count} launches, {found['gib']:.2f} GiB{made}"


def speed(place: Place, windows: int) -> Outcome:
    """All variants, one after the other, next to eager steps. A variant that fails does not keep the others from
    running."""
    if place.device != "cuda":
        raise NotHere("needs a GPU")
    found, errors, limit = {}, {}, MAX_LAUNCHES[windows]
    for name in VARIANTS:
        try:
            found[name] = measured(place, windows, name)
        except OutOfTime:
            raise
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    graphed = [row["launches_per_step"] for name, row in found.items() if GRAPHS in VARIANTS[name]]
    reached = all(count is not None and count <= limit for count in graphed) if limit else None
    texts = [f"{name}: {described(row)}" for name, row in found.items()] + [f"{name}: failed" for name in errors]
    return Outcome("; ".join(texts), False if errors else reached, found | {"errors": errors})


LOSSES: dict[str, tuple[str, Callable[[Place], Outcome]]] = {
    f"losses with CUDA graphs, {name}": (f"those without, to {tolerance:g}", partial(check_apart, precision=name))
    for name, tolerance in TOLERANCES.items()
}
SPEEDS: dict[str, tuple[str, Callable[[Place], Outcome]]] = {
    f"CUDA graphs, {windows} windows per step": (
        f"<= {most} launches" if most else "-",
        partial(speed, windows=windows),
    )
    for windows, most in MAX_LAUNCHES.items()
}

if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asdict(check(sys.argv[3]))), encoding="utf-8")
