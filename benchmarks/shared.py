"""Code shared by the benchmarks: commands and their environment, hardware and versions, a tiny model, tables."""

from __future__ import annotations

import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_bert.errors import EXIT_BAD_INPUT, UserError
from hvd_bert.machine import cpu_name, package_version

if TYPE_CHECKING:
    from hvd_bert.data.batch_plan import Ids
    from hvd_bert.data.window_table import WindowTable

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "horovod", "transformers", "accelerate", "datasets", "numpy")
SMALL_RUN = "--config sample --max_train_samples 64 --max_eval_samples 4 --per_device_train_batch_size 4 --dropout 0.1"


def machine() -> dict[str, Any]:
    """Return this machine's CPU and number of cores, and the versions of Python and PACKAGES."""
    cores = len(os.sched_getaffinity(0))
    versions = {"python": platform.python_version()} | {package: package_version(package) for package in PACKAGES}
    return {"hardware": {"cpu": cpu_name(), "cores": cores}, "versions": versions}


def launch_environment() -> dict[str, str]:
    """Return environment variables that let commands find this Python's programs, and let Open MPI run as root."""
    env = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    if os.geteuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env | {"TOKENIZERS_PARALLELISM": "false"}


def run(words: Sequence[str], env: dict[str, str], log: Path, timeout_s: float, grace_s: float = 30.0) -> None:
    """Run a command. After `timeout_s` seconds, terminate its processes; `grace_s` seconds later, kill them.

    Raises UserError if the command fails.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            words, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | str = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = f"none after {timeout_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # launchers forward it to their ranks
                try:
                    process.wait(grace_s)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    if status != 0:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise UserError(
            f"{last}\nended with status {status}; above are the last lines of {log}. Command:\n  {shlex.join(words)}"
        )


def small_run(flags: str) -> list[str]:
    """Return the trainer's flags for a run on 64 questions, plus `flags`. An epoch has 8 steps on 2 ranks."""
    return [*SMALL_RUN.split(), *flags.split()]


def tiny_bert(folder: Path) -> list[str]:
    """Write the configuration of a BERT with one small layer to `folder`. Returns the trainer's flags for the model."""
    config = json.loads((REPOSITORY / "hvd_bert" / "sample" / "config.json").read_text(encoding="utf-8"))
    config |= {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return ["--config_name", str(folder / "model")]


def make_folder(out: Path) -> Path:
    """Make the folder `out`. Raises UserError if it is not empty."""
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise UserError(f"--out {out}: the folder is not empty. Name a new folder.")
    return out


def in_turns(names: Sequence[str], number: int) -> Sequence[str]:
    """Return the order of round `number`. Odd rounds are reversed, so that drifts favour no variant."""
    return names if number % 2 == 0 else names[::-1]


def peer_columns(windows: WindowTable, order: Ids) -> dict[str, list[Any]]:
    """Convert windows to the columns that peers read."""
    import pyarrow as pa  # imported here, because the campaigns' ranks do not need it

    rows = pa.Table.from_batches(windows.batches).take(order).to_pydict()
    pairs = list(zip(rows["input_ids"], rows["context_start"], strict=True))
    return {
        "input_ids": rows["input_ids"],
        "token_type_ids": [[int(position >= start) for position in range(len(ids))] for ids, start in pairs],
        "attention_mask": [[1] * len(ids) for ids, _ in pairs],
        "start_positions": rows["start_position"],
        "end_positions": rows["end_position"],
    }


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Format the median and range of values, such as `3.1 (2.9 to 3.4)`."""
    middle, low, high = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table whose first column is text and whose other columns are numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def end(main: Callable[[], int | None]) -> None:
    """Run a program and exit with its status. A UserError is printed as one line, without a traceback."""
    try:
        sys.exit(main())
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
