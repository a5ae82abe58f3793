"""Measures how soon commands answer and a training begins: imports, tokenization, the cache, the first step.

    python benchmarks/startup.py --train_file train-v1.1.json --model_name_or_path FOLDER --out startup.json
    python benchmarks/startup.py --only commands --baseline OTHER_CLONE --model_name_or_path FOLDER --out startup.json

Each measurement uses new processes:

1. Commands: CPU and wall time of `--help`, of a rank from the command to its parsed configuration, of an answer by
   `hvd_bert.predict`, of the imports alone, and of a training on 2 ranks from the command to its first step. With
   `--baseline`, this clone and the other one take turns.
2. `hvd_bert.data.windows.prepare` on `--questions` questions, with all cores: tokenization, and from the cache.
3. `horovodrun -np N python -m hvd_bert.train` on cached windows of several `--sizes`: when the world is joined, when
   everything is loaded, when the first step is done; memory and CPU time of each rank.

`--train_file`, in SQuAD's layout, is repeated with new ids up to the number of questions. Files come from the page
cache, since they have just been written. Prints Markdown tables of medians with their range, and writes every figure to
`--out`. On a busy machine the load average is high and wall time exceeds CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import startup_commands as commands
from shared import REPOSITORY, markdown_table, spread
from startup_data import repeat_questions, run_prepare

PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "pyarrow", "horovod")


def measure(args: argparse.Namespace, place: Path) -> dict[str, Any]:
    """All figures."""
    clones = {"this clone": REPOSITORY} | ({"baseline": args.baseline} if args.baseline else {})
    model, everything = args.model_name_or_path, args.only != "first_step"
    results: dict[str, Any] = {"cold": [], "cached": [], "sizes": {}}
    results["commands"] = commands.measure(clones, model, args.ranks, args.repeats, place, everything)
    return results if args.only else results | measure_data(args, place)


def measure_data(args: argparse.Namespace, place: Path) -> dict[str, Any]:
    """What depends on the amount of data."""
    results: dict[str, Any] = {"cold": [], "cached": []}
    model = args.model_name_or_path
    os.environ["HVD_BERT_CACHE"] = str(place / "cache")
    file = place / "questions.json"
    repeat_questions(args.train_file, args.questions, file)
    for _ in range(args.repeats):
        shutil.rmtree(place / "cache", ignore_errors=True)
        results["cold"].append(run_prepare(file, model))
        results["cached"].append(run_prepare(file, model))
    file.unlink()
    shutil.rmtree(place / "cache")

    sizes: dict[int, dict[str, Any]] = {}
    for size in args.sizes:
        file = place / f"{size}.json"
        repeat_questions(args.train_file, size, file)
        sizes[size] = {"file_mb": file.stat().st_size / 1e6}
        sizes[size] |= {"cold": run_prepare(file, model), "cached": [], "command": []}
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    for _ in range(args.repeats):
        for size, figures in sizes.items():  # in turns
            file = place / f"{size}.json"
            figures["cached"].append(run_prepare(file, model))
            flags = ["--train_file", str(file), "--model_name_or_path", str(model)]
            flags += ["--per_device_train_batch_size", str(args.batch)]
            run = commands.run_to_first_step(flags, place / "run", args.ranks, REPOSITORY, environ)
            figures["command"].append(run)
    return results | {"sizes": sizes}


# --- tables --------------------------------------------------------------------------------------


def column(rows: list[dict[str, float]], name: str, digits: int = 1) -> str:
    """Median and range of a figure."""
    return spread([row[name] for row in rows], digits)


def print_commands(clones: dict[str, commands.Runs]) -> None:
    """Table 1."""
    kinds = {"CPU, s": "cpu_s", "wall, s": "wall_s"}
    head = ["command", *(f"{clone}: {kind}" for kind in kinds for clone in clones)]
    rows = [
        [name, *(column(runs[name], key, 2) for key in kinds.values() for runs in clones.values())]
        for name in next(iter(clones.values()))
    ]
    print("\n" + markdown_table(head, rows))


def print_data(results: dict[str, Any]) -> None:
    """Tables 2 and 3."""
    rows = []
    for name, label in (("cold", "tokenization"), ("cached", "from the cache")):
        runs = results[name]
        rows.append(
            [label, column(runs, "prepare_s", 2), column(runs, "prepare_cpu_s", 2), column(runs, "peak_mib", 0)]
        )
    head = [f"{results['settings']['questions']:,} questions", "wall, s", "CPU, s", "peak memory, MiB"]
    print("\n" + markdown_table(head, rows))

    rows, first_steps = [], []
    for figures in results["sizes"].values():
        cold, cached = figures["cold"], figures["cached"]
        cells = [f"{cold['windows']:,}", f"{figures['file_mb']:.1f}"]
        cells += [f"{cold['prepare_s']:.1f}", f"{cold['prepare_cpu_s']:.1f}", f"{cold['peak_mib']:.0f}"]
        cells += [column(cached, "prepare_s", 2), column(cached, "prepare_cpu_s", 2)]
        rows.append([*cells, column(cached, "table_mib", 0), column(cached, "touched_mib")])
        first_steps.append([cells[0], *first_step_cells(figures["command"])])
    head = ["windows", "file, MB", "tokenization: wall, s", "CPU, s", "peak memory, MiB"]
    print("\n" + markdown_table([*head, "from the cache: wall, s", "CPU, s", "table, MiB", "of it read, MiB"], rows))
    head = ["windows", "world, s", "loaded, s", "first step, s", "CPU per rank, s"]
    head += ["memory per rank when loaded, MiB", "of it private, MiB", "peak at the first step, MiB"]
    print("\n" + markdown_table(head, first_steps))


def first_step_cells(runs: list[dict[str, Any]]) -> list[str]:
    """Cells of a row of table 3."""
    loaded = [rank for run in runs for rank in run["loaded_mib"]]
    cells = [column(runs, name) for name in commands.MILESTONES]
    cells.append(spread([seconds for run in runs for seconds in run["cpu_s"]]))
    cells += [spread([rank["anon"] + rank["file"] for rank in loaded], 0), column(loaded, "anon", 0)]
    return [*cells, column([rank for run in runs for rank in run["first_step_mib"]], "peak", 0)]


def parse() -> argparse.Namespace:
    """The command line, with absolute paths."""
    parser = argparse.ArgumentParser(description="Seconds and memory until a command answers or a training begins.")
    parser.add_argument("--train_file", type=Path, help="SQuAD file, repeated as often as needed.")
    parser.add_argument("--model_name_or_path", type=Path, required=True, help="Folder of a BERT.")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write.")
    parser.add_argument("--questions", type=int, default=87_599, help="Questions to tokenize. (default: SQuAD v1.1's)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000], help="Questions to train on.")
    parser.add_argument("--ranks", type=int, default=2, help="Ranks of a training. (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="Windows per rank and step. (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="Runs of each measurement. (default: %(default)s)")
    parser.add_argument(
        "--only", choices=["commands", "first_step"],
        help="Measure commands and the first step, or only the latter, and no data. (default: everything)",
    )  # fmt: skip
    parser.add_argument("--baseline", type=Path, help="Another clone, whose commands take turns with this one's.")
    args = parser.parse_args()
    if not (args.train_file or args.only):
        parser.error("--train_file is missing. Give it, or --only commands.")
    for name in ("train_file", "model_name_or_path", "baseline"):
        path = getattr(args, name)
        setattr(args, name, path and path.resolve())
    return args


def main() -> None:
    """Measure, write, print."""
    args = parse()
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
    print_commands(results["commands"])
    if results["cold"]:
        print_data(results)


if __name__ == "__main__":
    main()
