"""The checks of gpu_acceptance.py that train: losses, resume, strategies, ranks."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from acceptance_place import BATCH, NotHere, Outcome, Place, checkpoint_of, launched

from hvd_bert.errors import UserError

# Relative differences of a loss in 20 steps from the same weights.
SAME_PRECISION, HALF_PRECISION, SAME_SUMS = 1e-3, 5e-2, 1e-4
MAX_SKIPPED = 3  # steps of fp16, until the first scale of the loss fits
RESUMED_STEP, LAST_STEP = 5, 10

Check = Callable[[Place], Outcome]


def preflight(place: Place) -> Outcome:
    words = [sys.executable, "-m", "hvd_bert.tools.doctor", "--output_dir", str(place.out)]
    printed = place.run("doctor", words)
    warnings = len(re.findall(r"^\s*warning", printed, re.MULTILINE | re.IGNORECASE))
    return Outcome(f"a training would start; {warnings} warning(s) in doctor.log")


def _compared(
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
    one, other = torch.tensor(pairs, dtype=torch.float64).T
    worst, allowed = float(((one - other) / other).abs().max()), tolerance * (1 + skipped)  # NaN if any loss is NaN
    compared = f"{len(pairs)} losses" + (f", {skipped} skipped," if skipped else "")
    if not worst <= allowed:
        return Outcome(f"{compared} differ by {worst:.1e} (relative), more than {allowed:g}", False, figures)
    return Outcome(f"{compared} agree to {worst:.1e}", figures=figures | {"worst": worst})


def _alone(place: Place) -> list[float | None]:
    return place.losses_of("fp32", "--strategy", "none")


def losses_of_the_cpu(place: Place) -> Outcome:
    on_cpu = place.losses_of("cpu", "--strategy", "none", device="cpu")
    return _compared(on_cpu, _alone(place), SAME_PRECISION)


def half_precision(precision: str) -> Check:
    def check(place: Place) -> Outcome:
        losses = place.losses_of(precision, "--strategy", "none", f"--{precision}")
        return _compared(_alone(place), losses, HALF_PRECISION, MAX_SKIPPED if precision == "fp16" else 0)

    return check


def resume(*flags: str) -> Check:
    """A run that is resumed from its checkpoint leaves the same bytes as one that was not interrupted."""

    def check(place: Place) -> Outcome:
        name = "-".join(["resume", *(flag.strip("-") for flag in flags)])
        common = ["--strategy", "none", "--deterministic", "--dropout", "0.1", "--max_steps", str(LAST_STEP), *flags]
        common += ["--per_device_train_batch_size", str(BATCH), "--save_steps", str(RESUMED_STEP)]
        whole = place.train(f"{name}-whole", *common)
        checkpoint = checkpoint_of(whole, RESUMED_STEP)
        resumed = place.train(f"{name}-resumed", *common, "--resume_from_checkpoint", str(checkpoint))
        first, second = ((folder / "model.safetensors").read_bytes() for folder in (whole, resumed))
        same = first == second
        return Outcome("the same weights to the bit" if same else "the weights differ", same)

    return check


def strategy(name: str, several: bool = False) -> Check:
    """The losses of a strategy, on one device or on all of them, are those of one process."""

    def check(place: Place) -> Outcome:
        if several:
            place.several()
        if name == "dp":
            if place.device == "cpu":
                raise NotHere("needs 2 GPUs")
            losses = place.losses_of("dp", "--strategy", "dp", gpus=place.ranks)
        else:
            ranks = place.ranks if several else 1
            under = ranks if several or name == "horovod" else 0
            losses = place.losses_of(f"{name}-{ranks}", "--strategy", name, ranks=under, gpus=ranks)
        return _compared(_alone(place), losses, SAME_PRECISION if several else SAME_SUMS)

    return check


def allreduce(place: Place) -> Outcome:
    """Sums over the ranks are right, and of tensors on GPUs NCCL sends them."""
    place.several()
    words = [sys.executable, "-m", "hvd_bert.tools.doctor", "--size", "400", "--output_dir", str(place.out)]
    if place.device == "cpu":
        words[words.index("400")] = "1"
    printed = place.run("allreduce", launched(place.ranks) + words, gpus=place.ranks)
    rows = [re.sub(r"^\[[\d,]+\]<\w+>:", "", line).strip() for line in printed.splitlines() if "Horovod, " in line]
    large = " ".join(rows[0].split()) if rows else "no allreduce was measured"
    return Outcome(large, bool(rows) and (place.device == "cpu" or "NCCL" in large), {"rows": rows})


# name -> goal, check
CHECKS: dict[str, tuple[str, Check]] = {
    "preflight check": ("no failure", preflight),
    "losses of 20 steps, fp32": (f"the CPU's, to {SAME_PRECISION:g}", losses_of_the_cpu),
    "losses of 20 steps, bf16": (f"those of fp32, to {HALF_PRECISION:g}", half_precision("bf16")),
    "losses of 20 steps, fp16": (f"those of fp32, to {HALF_PRECISION:g}", half_precision("fp16")),
    "resume, --deterministic, fp32": ("the same to the bit", resume()),
    "resume, --deterministic, bf16": ("the same to the bit", resume("--bf16")),
    "horovod, world of 1": (f"losses of one process, to {SAME_SUMS:g}", strategy("horovod")),
    "ddp, world of 1": (f"losses of one process, to {SAME_SUMS:g}", strategy("ddp")),
    "fsdp, world of 1": (f"losses of one process, to {SAME_SUMS:g}", strategy("fsdp")),
    "horovod, world of all GPUs": (f"losses of one process, to {SAME_PRECISION:g}", strategy("horovod", True)),
    "ddp, world of all GPUs": (f"losses of one process, to {SAME_PRECISION:g}", strategy("ddp", True)),
    "dp, all GPUs": (f"losses of one process, to {SAME_PRECISION:g}", strategy("dp", True)),
    "allreduce of all GPUs": ("right sums, by NCCL", allreduce),
}
