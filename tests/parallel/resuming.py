"""Compare two runs bit for bit: the last checkpoints' tensors and state, and metrics.jsonl, all without times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

TIMES = ("_per_s", "_s", "_share", "mfu")
NO_TIMES = ("padding_share",)


def newest(out: Path) -> Path:
    """Return the checkpoint that the file `latest` names."""
    return out / (out / "latest").read_text(encoding="utf-8").strip()


def rows(out: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl without times."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: line[key] for key in line if key in NO_TIMES or not key.endswith(TIMES)} for line in lines]


def differences(one: Path, other: Path) -> list[str]:
    """Return the differences between two runs' last checkpoints and metrics. All values must be equal bit for bit."""
    found = []
    for name in {file.name for out in (one, other) for file in newest(out).glob("*.safetensors")}:
        mine, theirs = (load_file(newest(out) / name) for out in (one, other))
        if mine.keys() != theirs.keys():
            found.append(f"{name}: other tensors")
            continue
        found += [f"{name}: {key}" for key in mine if not _same(mine[key], theirs[key])]
    states = [json.loads((newest(out) / "state.json").read_text(encoding="utf-8")) for out in (one, other)]
    for state in states:
        for time in ("train_s", "seconds"):
            del state["meter"][time]
    found += [f"state: {key}" for key in states[0] if states[0][key] != states[1].get(key)]
    lines = [rows(out) for out in (one, other)]
    if lines[0] != lines[1]:
        pairs = zip(*lines, strict=False)
        first = next(((a, b) for a, b in pairs if a != b), f"{len(lines[0])} and {len(lines[1])} lines")
        found.append(f"metrics.jsonl: {first}")
    return found


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Compare bytes: NaN (in a generator's state without a spare number) equals NaN, and 0.0 differs from -0.0.
    return one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()
