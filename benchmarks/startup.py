"""How soon a command answers and a training begins: imports, tokenising, opening what is cached, the first step.

    python benchmarks/startup.py --train_file train-v1.1.json --model_name_or_path FOLDER --out startup.json
    python benchmarks/startup.py --only commands --baseline OTHER_CLONE --model_name_or_path FOLDER --out startup.json

`--train_file` (SQuAD's own layout) is repeated with fresh ids up to the wanted number of questions. Measured, each in
fresh processes:

1. commands, in this clone and in turns with another one (`--baseline`): CPU time of `--help`, of a rank from the
   command to its parsed configuration (a value that is refused there; to the end of its process), of an answer by
   `hvd_bert.predict`, and of the imports alone;
2. `hvd_bert.data.windows.prepare` on `--questions` questions with all cores, cold and from the cache;
3. `horovodrun -np N python -m hvd_bert.train` on cached data of several `--sizes`, by what it prints: when the world is
   there, when everything is loaded, when the first step is done, and each rank's memory and CPU time at that time.

Prints Markdown tables of medians and ranges, and writes every single figure to `--out`. The files are read from the
page cache: they were written just before. A busy machine shows in the load average and in wall time over CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # comes with Horovod

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "pyarrow", "horovod")
TRAIN, PREDICT = ["-m", "hvd_bert.train"], ["-m", "hvd_bert.predict"]
# What is measured of each clone -> the words after `python`; {model}: --model_name_or_path.
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
    "a rank to its parsed configuration": [*TRAIN, "--learning_rate", "-1"],
    "an answer by predict": [*PREDICT, "{model}", "--context", "Ada was born in London.", "--question", "Where?"],
}
# What the trainer says, and when that is. Launchers put marks of their own before it.
MILESTONES = {"world_s": r"\d+ rank\(s\) on ", "loaded_s": r"Training: ", "first_step_s": r"step 1/"}
RANK = ["-m", "hvd_bert.train"]
MIB = 2**20


def repeat(train_file: Path, count: int, target: Path) -> None:
    """SQuAD's JSON with `count` questions: those of `train_file` again and again, each with an id of its own."""
    articles = json.loads(train_file.read_text(encoding="utf-8"))["data"]

    def repeated() -> Iterator[dict[str, Any]]:
        left, turn = count, 0
        while left:
            for article in articles:
                paragraphs = []
                for paragraph in article["paragraphs"]:
                    qas = [{**entry, "id": f"{entry['id']}-{turn}"} for entry in paragraph["qas"][:left]]
                    left -= len(qas)
                    if qas:
                        paragraphs.append({**paragraph, "qas": qas})
                if paragraphs:
                    yield {**article, "paragraphs": paragraphs}
            turn += 1

    with target.open("w", encoding="utf-8") as file:
        file.write('{"version": "1.1", "data": [')
        for number, article in enumerate(repeated()):
            file.write((", " if number else "") + json.dumps(article))
        file.write("]}")


# --- one process that tokenises, or opens what is cached -----------------------------------------


def status_mib(pid: int | str) -> dict[str, float]:
    """Of a process, in MiB: memory of its own (`anon`), pages of files it has touched (`file`), its peak (`peak`)."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    kib = {name: int(value.split()[0]) for name, value in (line.split(":", 1) for line in lines) if "kB" in value}
    return {"anon": kib["RssAnon"] / 1024, "file": kib["RssFile"] / 1024, "peak": kib["VmHWM"] / 1024}


def mapped_mib(name: str) -> tuple[float, float]:
    """Of files called `name` that this process has mapped, in MiB: what it has touched of them, and the whole."""
    kib, ours = {"Rss": 0, "Size": 0}, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first, *others = line.split()
        if first[:-1] in kib:
            kib[first[:-1]] += int(others[0]) if ours else 0
        elif "-" in first:
            ours = line.endswith(f"/{name}")
    return kib["Rss"] / 1024, kib["Size"] / 1024


def prepare(file: str, model: str) -> None:
    """In a process of its own: prints as JSON what one call of `windows.prepare` takes."""
    start = time.perf_counter()
    from transformers import AutoTokenizer

    from hvd_bert.data import squad, windows

    imported = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(model)
    before, cpu_before, memory_before = time.perf_counter(), time.process_time(), status_mib("self")
    source = squad.open_file(file, version_2_with_negative=False)
    digested = time.perf_counter()
    table = windows.prepare(source, tokenizer, windows.WindowOptions())
    end, cpu_end, memory = time.perf_counter(), time.process_time(), status_mib("self")
    touched, whole = mapped_mib("windows.arrow")
    figures = {
        "windows": len(table),
        "imports_s": imported - start,
        "digest_s": digested - before,
        "prepare_s": end - before,
        "prepare_cpu_s": cpu_end - cpu_before,
        "grown_mib": memory["anon"] - memory_before["anon"],
        "peak_mib": memory["peak"],
        "touched_mib": touched,
        "table_mib": whole,
    }
    print(json.dumps(figures))


def run_prepare(file: Path, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).resolve()), "--prepare", str(file)]
    start = time.perf_counter()
    done = subprocess.run(
        [*command, "--model_name_or_path", str(args.model_name_or_path)],
        check=True, capture_output=True, text=True, cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures | {"process_s": time.perf_counter() - start}


def run_words(words: list[str], clone: Path) -> dict[str, float]:
    """Wall and CPU seconds of one Python command with the package of `clone`; the status does not matter."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environ = os.environ | {"PYTHONPATH": str(clone)}
    subprocess.run([sys.executable, *words], check=False, cwd=clone, env=environ, capture_output=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"wall_s": seconds, "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def measure_commands(args: argparse.Namespace) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Clone -> command -> its runs: in turns, after one that is not counted."""
    clones = {"this clone": REPOSITORY} | ({"baseline": args.baseline} if args.baseline else {})
    runs: dict[str, dict[str, list[dict[str, float]]]] = {name: {} for name in clones}
    for name, words in COMMANDS.items():
        filled = [word.replace("{model}", str(args.model_name_or_path)) for word in words]
        for repeat in range(args.repeats + 1):
            for clone, path in clones.items():
                taken = run_words(filled, path)
                if repeat:
                    runs[clone].setdefault(name, []).append(taken)
    return runs


# --- the command itself --------------------------------------------------------------------------


def run_command(file: Path, output: Path, args: argparse.Namespace) -> dict[str, Any]:
    """From the command to its first step: seconds at each milestone; memory and CPU time of every rank."""
    command = [
        str(Path(sys.executable).with_name("horovodrun")),
        "-np",
        str(args.ranks),
        sys.executable,
        *RANK,
        "--train_file",
        str(file),
    ]
    command += ["--model_name_or_path", str(args.model_name_or_path), "--output_dir", str(output)]
    command += ["--per_device_train_batch_size", str(args.batch), "--max_steps", "2", "--logging_steps", "1"]
    command += ["--save_steps", "0"]
    figures: dict[str, Any] = {}
    said: list[str] = []
    ranks: list[psutil.Process] = []
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            for name, pattern in MILESTONES.items():
                if name not in figures and re.search(pattern, line):
                    figures[name] = time.perf_counter() - start
                    if name == "world_s":
                        ranks = find_ranks(process.pid)
                    if name == "loaded_s":
                        figures["loaded_mib"] = [status_mib(rank.pid) for rank in ranks]
                    if name == "first_step_s":
                        figures["first_step_mib"] = [status_mib(rank.pid) for rank in ranks]
                        figures["cpu_s"] = [sum(rank.cpu_times()[:2]) for rank in ranks]  # user and system
    if process.returncode or len(figures) < len(MILESTONES) or len(ranks) != args.ranks:
        raise SystemExit("".join(said) + f"the command ended with status {process.returncode}")
    return figures


def find_ranks(launcher: int) -> list[psutil.Process]:
    """The ranks' processes among all that descend from the launcher."""
    children = psutil.Process(launcher).children(recursive=True)
    return [child for child in children if child.cmdline()[1:3] == RANK]


# --- what is measured, and how it is told --------------------------------------------------------


def measure(args: argparse.Namespace, place: Path) -> dict[str, Any]:
    results: dict[str, Any] = {"commands": measure_commands(args), "cold": [], "cached": [], "sizes": {}}
    if args.only == "commands":
        return results
    os.environ["HVD_BERT_CACHE"] = str(place / "cache")
    file = place / "questions.json"
    repeat(args.train_file, args.questions, file)
    for _ in range(args.repeats):
        shutil.rmtree(place / "cache", ignore_errors=True)
        results["cold"].append(run_prepare(file, args))
        results["cached"].append(run_prepare(file, args))
    file.unlink()
    shutil.rmtree(place / "cache")

    sizes: dict[int, dict[str, Any]] = {}
    for size in args.sizes:
        repeat(args.train_file, size, place / f"{size}.json")
        sizes[size] = {"file_mb": (place / f"{size}.json").stat().st_size / 1e6}
        sizes[size] |= {"cold": run_prepare(place / f"{size}.json", args), "cached": [], "command": []}
    for _ in range(args.repeats):
        for size, figures in sizes.items():  # interleaved
            figures["cached"].append(run_prepare(place / f"{size}.json", args))
            figures["command"].append(run_command(place / f"{size}.json", place / "run", args))
            shutil.rmtree(place / "run")
    return results | {"sizes": sizes}


def spread(values: list[float], digits: int = 1) -> str:
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


def column(rows: list[dict[str, float]], name: str, digits: int = 1) -> str:
    return spread([row[name] for row in rows], digits)


def table(head: list[str], rows: list[list[str]]) -> None:
    print()
    for cells in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(cells)} |")


def tell(results: dict[str, Any]) -> None:
    commands = results["commands"]
    rows = [[name, *(column(runs[name], "cpu_s", 2) for runs in commands.values())] for name in COMMANDS]
    table(["CPU seconds of a process", *commands], rows)
    if not results["cold"]:
        return
    rows = []
    for name in ("cold", "cached"):
        runs = results[name]
        rows += [[name, column(runs, "prepare_s", 2), column(runs, "prepare_cpu_s", 2), column(runs, "peak_mib", 0)]]
    table([f"{results['settings']['questions']:,} questions", "wall, s", "CPU, s", "peak of the process, MiB"], rows)

    rows, command_rows = [], []
    for figures in results["sizes"].values():
        cold, cached, runs = figures["cold"], figures["cached"], figures["command"]
        windows = f"{cold['windows']:,}"
        told = [
            f"{cold[name]:.{digits}f}" for name, digits in (("prepare_s", 1), ("prepare_cpu_s", 1), ("peak_mib", 0))
        ]
        told += [column(cached, "prepare_s", 2), column(cached, "prepare_cpu_s", 2)]
        told += [column(cached, "table_mib", 0), column(cached, "touched_mib")]
        rows.append([windows, f"{figures['file_mb']:.1f}", *told])
        loaded = [rank for run in runs for rank in run["loaded_mib"]]
        told = [column(runs, name) for name in MILESTONES]
        told += [spread([seconds for run in runs for seconds in run["cpu_s"]])]
        told += [spread([rank["anon"] + rank["file"] for rank in loaded], 0), column(loaded, "anon", 0)]
        told += [column([rank for run in runs for rank in run["first_step_mib"]], "peak", 0)]
        command_rows.append([windows, *told])
    head = ["windows", "file, MB", "tokenising: wall, s", "CPU, s", "its peak, MiB"]
    head += ["from the cache: wall, s", "CPU, s", "table, MiB", "touched of it, MiB"]
    table(head, rows)
    head = ["windows", "world, s", "loaded, s", "first step, s", "CPU of a rank until then, s"]
    head += ["memory of a rank when loaded, MiB", "of it its own", "peak at the first step"]
    table(head, command_rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds and memory until a training begins.")
    parser.add_argument("--train_file", type=Path, help="SQuAD's own JSON, repeated as often as needed")
    parser.add_argument("--model_name_or_path", type=Path, required=True, help="a BERT's folder")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--questions", type=int, default=87_599, help="of SQuAD v1.1's training set")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000], help="questions")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="windows of a rank per step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["commands"], help="measure the commands, and no data")
    parser.add_argument("--baseline", type=Path, help="another clone, whose commands are measured in turns with ours")
    parser.add_argument("--prepare", help=argparse.SUPPRESS)  # the file; this is the process that is measured
    args = parser.parse_args()
    if args.prepare:
        prepare(args.prepare, str(args.model_name_or_path))
        return
    if not args.out or not (args.train_file or args.only):
        parser.error("--train_file and --out are needed")
    args.train_file = args.train_file and args.train_file.resolve()
    args.model_name_or_path = args.model_name_or_path.resolve()
    args.baseline = args.baseline and args.baseline.resolve()
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="startup-") as place:
        results = measure(args, Path(place))
    results["settings"] = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    results["machine"] = {
        "cores": len(os.sched_getaffinity(0)),
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
    }
    args.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results["machine"]))
    tell(results)


if __name__ == "__main__":
    main()
