"""The checks of gpu_acceptance.py that train: losses, resume, strategies, ranks."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from acceptance_place import BATCH, NotHere, Outcome, Place, launched

from hvd_bert.checkpoint.files import checkpoint_name
from hvd_bert.errors import UserError

# Relative differences of a loss in 20 steps from the same weights.
SAME_PRECISION, HALF_PRECISION, SAME_SUMS = 1e-3, 5e-2, 1e-4
MAX_SKIPPED = 3  # steps of fp16, until the first scale of the loss fits
RESUMED_STEP, LAST_STEP = 5, 10
ALONE = ("--strategy", "none")
HALF_GOAL = f"those of fp32, to {HALF_PRECISION:g}"
LOSSES = {"fp32": f"the CPU's, to {SAME_PRECISION:g}", "bf16": HALF_GOAL, "fp16": HALF_GOAL}

Check = Callable[[Place], Outcome]


def preflight(place: Place) -> Outcome:
    words = [sys.executable, "-m", "hvd_bert.tools.doctor", "--verbose", "--output_dir", str(place.out)]
    printed = place.run("doctor", words)
    warnings = len(re.findall(r"^\s*warning", printed, re.MULTILINE | re.IGNORECASE))
    return Outcome(f"a training would start; {warnings} warning(s) in doctor.log")


def compared(
    reference: Sequence[float | None], losses: Sequence[float | None], tolerance: float, max_skipped: int = 0
) -> Outcome:
    """Compare the losses step by step, except skipped steps, which have none. After a skipped step the weights are one
    step behind, so each adds `tolerance` to the allowed difference.
    """
    if not reference or None in reference or len(losses) != len(reference):
        raise UserError(f"{len(losses)} losses were logged, of {len(reference)}; a reference run must skip no step")
    pairs = [(loss, right) for loss, right in zip(losses, reference, strict=True) if loss is not None]
    skipped = len(losses) - len(pairs)
    figures: dict[str, Any] = {"losses": losses, "reference": reference, "skipped": skipped}
    if skipped > max_skipped or not pairs:
        found = f"{skipped} of {len(losses)} steps were skipped or have no loss; at most {max_skipped} may be"
        return Outcome(found, False, figures)
    one, other = np.array(pairs, dtype=float).T
    worst, allowed = float(np.abs((one - other) / other).max()), tolerance * (1 + skipped)  # NaN if any loss is NaN
    said = f"{len(pairs)} losses" + (f", {skipped} skipped," if skipped else "")
    if not worst <= allowed:
        return Outcome(f"{said} differ by {worst:.1e} (relative), more than {allowed:g}", False, figures)
    return Outcome(f"{said} agree to {worst:.1e}", figures=figures | {"worst": worst})


def precision(place: Place, name: str) -> Outcome:
    """The losses on the GPU are those of fp32, and these are the CPU's."""
    alone = place.train_losses("fp32", *ALONE)
    if name == "fp32":
        return compared(place.train_losses("cpu", *ALONE, device="cpu"), alone, SAME_PRECISION)
    losses = place.train_losses(name, *ALONE, f"--{name}")
    return compared(alone, losses, HALF_PRECISION, MAX_SKIPPED if name == "fp16" else 0)


def resume(place: Place, name: str) -> Outcome:
    """A run that is resumed from its checkpoint leaves the same bytes as one that was not interrupted."""
    flags = f"--strategy none --deterministic --dropout 0.1 --max_steps {LAST_STEP} --save_steps {RESUMED_STEP}".split()
    flags += ["--per_device_train_batch_size", str(BATCH), *([] if name == "fp32" else [f"--{name}"])]
    whole = place.train(f"resume-{name}-whole", *flags)
    checkpoint = whole / checkpoint_name(RESUMED_STEP)
    resumed = place.train(f"resume-{name}-resumed", *flags, "--resume_from_checkpoint", str(checkpoint))
    first, second = ((folder / "model.safetensors").read_bytes() for folder in (whole, resumed))
    return Outcome("the same weights to the bit" if first == second else "the weights differ", first == second)


def strategy(place: Place, name: str, several: bool = False) -> Outcome:
    """The losses of a strategy, on one device or on all of them, are those of one process."""
    if several:
        place.require_several()
    if name == "dp" and place.device == "cpu":
        raise NotHere("needs 2 GPUs")
    gpus = place.ranks if several else 1
    ranks = 0 if name == "dp" else gpus if several or name == "horovod" else 0
    losses = place.train_losses(f"{name}-{gpus}", "--strategy", name, ranks=ranks, gpus=gpus)
    return compared(place.train_losses("fp32", *ALONE), losses, SAME_PRECISION if several else SAME_SUMS)


def allreduce(place: Place) -> Outcome:
    """Sums over the ranks are right, and of tensors on GPUs NCCL sends them."""
    place.require_several()
    size = "1" if place.device == "cpu" else "400"
    words = [sys.executable, "-m", "hvd_bert.tools.doctor", "--verbose", "--size", size]
    words += ["--output_dir", str(place.out)]
    printed = place.run("allreduce", launched(place.ranks) + words, gpus=place.ranks)
    rows = [re.sub(r"^\[[\d,]+\]<\w+>:", "", line).strip() for line in printed.splitlines() if "Horovod, " in line]
    large = " ".join(rows[0].split()) if rows else "no allreduce was measured"
    return Outcome(large, bool(rows) and (place.device == "cpu" or "NCCL" in large), {"rows": rows})


# name -> goal, check
CHECKS: dict[str, tuple[str, Check]] = {"preflight check": ("no failure", preflight)}
for name, goal in LOSSES.items():
    CHECKS[f"losses of 20 steps, {name}"] = (goal, partial(precision, name=name))
for name in ("fp32", "bf16"):
    CHECKS[f"resume, --deterministic, {name}"] = ("the same to the bit", partial(resume, name=name))
for name in ("horovod", "ddp", "fsdp"):
    CHECKS[f"{name}, world of 1"] = (f"losses of one process, to {SAME_SUMS:g}", partial(strategy, name=name))
for name, extent in {"horovod": "world of all GPUs", "ddp": "world of all GPUs", "dp": "all GPUs"}.items():
    goal = f"losses of one process, to {SAME_PRECISION:g}"
    CHECKS[f"{name}, {extent}"] = (goal, partial(strategy, name=name, several=True))
CHECKS["allreduce of all GPUs"] = ("right sums, by NCCL", allreduce)
