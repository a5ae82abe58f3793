"""What commands take to start, in this clone and in a baseline clone: the part of startup.py without data."""

from __future__ import annotations

import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil  # a requirement of Horovod

TRAIN, PREDICT = ["-m", "hvd_bert.train"], ["-m", "hvd_bert.predict"]
# Rows of the table -> the words after `python`; {model}: --model_name_or_path.
COMMANDS = {
    "import torch": ["-c", "import torch"],
    "train --help": [*TRAIN, "--help"],
    "predict --help": [*PREDICT, "--help"],
    "report --help": ["-m", "hvd_bert.report", "--help"],
    "timeline --help": ["-m", "hvd_bert.timeline", "--help"],
    "doctor --help": ["-m", "hvd_bert.doctor", "--help"],
    "bench --help": ["-m", "hvd_bert.bench", "--help"],
    "bench sweep --help": ["-m", "hvd_bert.bench", "sweep", "--help"],
    "tune --help": ["-m", "hvd_bert.tune", "--help"],
    "a rank to its parsed configuration": [*TRAIN, "--learning_rate", "-1"],  # refused as soon as it is parsed
    "an answer by predict": [*PREDICT, "{model}", "--context", "Ada was born in London.", "--question", "Where?"],
}
SAMPLE = ["--config", "sample", "--model_name_or_path", "{model}"]
# What the trainer prints at each point. Launchers put their own marks before it.
MILESTONES = {"world_s": r"\d+ rank\(s\) on ", "loaded_s": r"Training: ", "first_step_s": r"step 1/"}

Runs = dict[str, list[dict[str, float]]]  # row -> wall_s and cpu_s of each run


def measure(
    clones: dict[str, Path], model: Path, ranks: int, repeats: int, place: Path, commands: bool = True
) -> dict[str, Runs]:
    """Clone -> its runs. The clones take turns, and the first turn of each row is not counted.

    `commands`: measure COMMANDS, and not only the first step. `place`: a folder for caches and runs.
    """
    runs: dict[str, Runs] = {name: {} for name in clones}
    row = f"{ranks} ranks to the first step, windows cached (CPU: per rank)"
    rows = {**(COMMANDS if commands else {}), row: SAMPLE}
    for name, words in rows.items():
        filled = [word.replace("{model}", str(model)) for word in words]
        for repeat in range(repeats + 1):
            for clone, path in clones.items():
                # A cache of its own: clones may disagree on the format.
                environ = os.environ | {"PYTHONPATH": str(path), "HVD_BERT_CACHE": str(place / f"cache of {clone}")}
                if name == row:
                    figures = run_to_first_step([*filled, "--no_do_eval"], place / "run", ranks, path, environ)
                    taken = {"wall_s": figures["first_step_s"], "cpu_s": statistics.mean(figures["cpu_s"])}
                else:
                    taken = run_command(filled, path, environ)
                if repeat:
                    runs[clone].setdefault(name, []).append(taken)
    return runs


def run_command(words: Sequence[str], clone: Path, environ: dict[str, str]) -> dict[str, float]:
    """Wall and CPU seconds of a Python command in `clone`, whatever its status."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *words], check=False, cwd=clone, env=environ, capture_output=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"wall_s": seconds, "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def run_to_first_step(
    flags: Sequence[str], output: Path, ranks: int, clone: Path, environ: dict[str, str]
) -> dict[str, Any]:
    """Train two steps. Returns the seconds from the command to each milestone, and each rank's memory and CPU time."""
    horovodrun = [str(Path(sys.executable).with_name("horovodrun")), "-np", str(ranks)]
    command = [*horovodrun, sys.executable, *TRAIN, *flags, "--output_dir", str(output), "--overwrite_output_dir"]
    command += ["--max_steps", "2", "--logging_steps", "1", "--save_steps", "0"]
    figures: dict[str, Any] = {}
    lines: list[str] = []
    processes: list[psutil.Process] = []
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=clone, env=environ
    ) as launcher:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            lines.append(line)
            for name, pattern in MILESTONES.items():
                if name not in figures and re.search(pattern, line):
                    figures[name] = time.perf_counter() - start
                    if name == "world_s":
                        processes = rank_processes(launcher.pid)
                    if name == "loaded_s":
                        figures["loaded_mib"] = [memory_mib(rank.pid) for rank in processes]
                    if name == "first_step_s":
                        figures["first_step_mib"] = [memory_mib(rank.pid) for rank in processes]
                        figures["cpu_s"] = [sum(rank.cpu_times()[:2]) for rank in processes]  # user and system
    if launcher.returncode or len(figures) < len(MILESTONES) or len(processes) != ranks:
        raise SystemExit("".join(lines) + f"The command ended with status {launcher.returncode}.")
    return figures


def rank_processes(launcher: int) -> list[psutil.Process]:
    """The ranks among the launcher's descendants."""
    children = psutil.Process(launcher).children(recursive=True)
    return [child for child in children if child.cmdline()[1:3] == TRAIN]


def memory_mib(pid: int | str) -> dict[str, float]:
    """A process's private memory (`anon`), its pages of files (`file`) and its peak (`peak`), in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    kib = {name: int(value.split()[0]) for name, value in (line.split(":", 1) for line in lines) if "kB" in value}
    return {"anon": kib["RssAnon"] / 1024, "file": kib["RssFile"] / 1024, "peak": kib["VmHWM"] / 1024}
