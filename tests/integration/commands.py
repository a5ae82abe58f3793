"""Commands for small runs on the sample, and functions that read their outputs."""

from __future__ import annotations

import gzip
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from launch import SAMPLE, TRAIN, Outcome

from hvd_bert.config.command_line import override_argv

# horovodrun prefixes lines with "[1,0]<stdout>:" under --mpi, and with "[0]<stdout>:" under --gloo.
_PREFIX = re.compile(r"\[\d+(,\d+)?\]<std(out|err)>:")
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
GLOBAL_BATCH = 16
TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (INFO|WARNING) ", re.MULTILINE)  # at the start of a log line


def skip_without(strategy: str) -> None:
    """Skip a DeepSpeed test if DeepSpeed is not installed."""
    if strategy == "deepspeed" and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed (env/setup.sh --deepspeed)")


def small_run(size: int, out: Path | str, *flags: str | float | Path, preset: str = "sample") -> list[str]:
    """Return a command that trains 2 epochs of 3 steps, the third with one window, and evaluates 7 questions."""
    words = [] if "--config" in flags else ["--config", preset]
    words += ["--max_train_samples", 33, "--max_eval_samples", 7, "--num_train_epochs", 2]
    words += ["--per_device_train_batch_size", GLOBAL_BATCH // size, "--logging_steps", 1, "--dropout", 0]
    words += ["--output_dir", out]
    return [*TRAIN, *override_argv([str(word) for word in words], [str(flag) for flag in flags])]


def printed(outcome: Outcome) -> str:
    """Return the ranks' output, without times, launchers' prefixes and horovodrun's own lines."""
    lines = outcome.output.splitlines(keepends=True)
    if "horovodrun" in outcome.command[0]:
        lines = [line for line in lines if _PREFIX.match(line)]
    return TIME.sub("", _PREFIX.sub("", "".join(lines)))


def read_report(outcome: Outcome) -> dict[str, Any]:
    """Parse the doctor's JSON object from an output that may also have lines of launchers."""
    (line,) = [line for line in printed(outcome).splitlines() if line.startswith("{")]
    report: dict[str, Any] = json.loads(line)
    return report


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def losses(out: Path) -> list[float]:
    """Return the training losses in a run folder, one per log line."""
    return [line["loss"] for line in read_lines(out / "metrics.jsonl") if "loss" in line]


def sample_ids(name: str, count: int) -> list[str]:
    """Return the ids of the first `count` questions in a file of the sample."""
    articles = json.loads(gzip.decompress((SAMPLE / name).read_bytes()))["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    return [entry["id"] for paragraph in paragraphs for entry in paragraph["qas"]][:count]
