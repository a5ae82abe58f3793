"""The file that a peer writes for compare_peers.py, a row per optimizer step, and the peer's end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn


def write_times(path: Path, ends: Sequence[float], losses: Mapping[int, float], tokens: Sequence[int] = ()) -> None:
    """Write the rows. `ends`: the start, then the end of each step, in seconds; `losses`: by step (1, 2, ...), if
    recorded; `tokens`: up to each of the `ends`, if counted."""
    rows = [
        {
            "step": step,
            "step_s": ends[step] - ends[step - 1],
            "loss": losses.get(step),
            "tokens": (tokens[step] - tokens[step - 1] if tokens else 0) or None,
        }
        for step in range(1, len(ends))
    ]
    path.write_text(json.dumps(rows))


def leave() -> NoReturn:
    """End without finalizing Python, during which Gloo's threads can abort the process (pytorch#190489, #117762)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
