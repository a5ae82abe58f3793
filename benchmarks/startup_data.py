"""Tokenization and the cache of windows: the part of startup.py that grows with the data.

python benchmarks/startup_data.py FILE MODEL       one call of `windows.prepare` in a new process; prints JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared import REPOSITORY
from startup_commands import memory_mib


def repeat_questions(train_file: Path, count: int, target: Path) -> None:
    """Write a SQuAD file of `count` questions: those of `train_file` again and again, with new ids."""
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


def run_prepare(file: Path, model: Path) -> dict[str, float]:
    """The figures of `prepare`, from a process of its own."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), str(file), str(model)],
        check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures | {"process_s": time.perf_counter() - start}


def prepare(file: str, model: str) -> dict[str, float]:
    """Time and memory of one call of `windows.prepare` in this process."""
    start = time.perf_counter()
    from transformers import AutoTokenizer

    from hvd_bert.data import squad, windows

    imported = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    before, cpu_before, memory_before = time.perf_counter(), time.process_time(), memory_mib("self")
    source = squad.open_file(file, version_2_with_negative=False)
    digested = time.perf_counter()
    table = windows.prepare(source, tokenizer, windows.WindowOptions())
    end, cpu_end, memory = time.perf_counter(), time.process_time(), memory_mib("self")
    touched, whole = mapped_mib("windows.arrow")
    return {
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


def mapped_mib(name: str) -> tuple[float, float]:
    """Of the files called `name` that this process has mapped, in MiB: the part it has read, and the whole."""
    kib, matches = {"Rss": 0, "Size": 0}, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first, *others = line.split()
        if first[:-1] in kib:
            kib[first[:-1]] += int(others[0]) if matches else 0
        elif "-" in first:
            matches = line.endswith(f"/{name}")
    return kib["Rss"] / 1024, kib["Size"] / 1024


if __name__ == "__main__":
    print(json.dumps(prepare(sys.argv[1], sys.argv[2])))
