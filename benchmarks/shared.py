"""What benchmarks share: a command's environment, hardware and versions, a tiny model, exact kills, tables."""

from __future__ import annotations

import itertools
import json
import os
import platform
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hvd_bert.machine import cpu_name, package_version

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "horovod", "transformers", "accelerate", "lightning", "datasets", "numpy")
SMALL_RUN = "--config sample --max_train_samples 64 --max_eval_samples 4 --per_device_train_batch_size 4 --dropout 0.1"
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "open"}  # Python's audit events
T = TypeVar("T")


def machine() -> dict[str, Any]:
    """Hardware and versions."""
    cores = len(os.sched_getaffinity(0))
    versions = {"python": platform.python_version()} | {package: package_version(package) for package in PACKAGES}
    return {"hardware": {"cpu": cpu_name(), "cores": cores}, "versions": versions}


def launch_environment() -> dict[str, str]:
    """Variables by which a command finds this Python's programs, and Open MPI runs as root, too."""
    env = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    if os.geteuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env | {"TOKENIZERS_PARALLELISM": "false"}


def small_run(flags: str) -> list[str]:
    """The trainer's flags for a run on 64 questions, with some more. On 2 ranks it takes 8 steps per epoch."""
    return [*SMALL_RUN.split(), *flags.split()]


def tiny_bert(folder: Path) -> list[str]:
    """The trainer's flag for a BERT of one small layer, whose configuration this writes to `folder`."""
    config = json.loads((REPOSITORY / "hvd_bert" / "sample" / "config.json").read_text(encoding="utf-8"))
    config |= {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return ["--config_name", str(folder / "model")]


def size_of(path: Path) -> int:
    """Bytes of a file or a folder."""
    return sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())


def in_turns(names: Sequence[T], number: int) -> Sequence[T]:
    """The order of a round: every second one is reversed, so that a drift of the machine's speed favours no variant."""
    return names if number % 2 == 0 else names[::-1]


def peer_columns(
    ids: Sequence[Sequence[int]], context_starts: Sequence[int], starts: Sequence[int], ends: Sequence[int]
) -> dict[str, Any]:
    """Windows as the peers read them."""
    pairs = list(zip(ids, context_starts, strict=True))
    return {
        "input_ids": ids,
        "token_type_ids": [[int(place >= start) for place in range(len(tokens))] for tokens, start in pairs],
        "attention_mask": [[1] * len(tokens) for tokens in ids],
        "start_positions": starts,
        "end_positions": ends,
    }


@contextmanager
def killed_before_change(number: int) -> Iterator[None]:
    """Inside, this process is killed before it opens, makes, renames or removes a file for the `number`th time."""
    changes, watches = itertools.count(1), True

    def kill(event: str, arguments: tuple[Any, ...]) -> None:
        if watches and event in CHANGES and next(changes) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)  # for the rest of the process
    yield
    watches = False


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median and range."""
    middle, low, high = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column holds words, the others numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))
