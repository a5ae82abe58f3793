"""Measures how long checkpoints of BERT-base stop a training, and what their writes cost the steps alongside.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint_cost.py --out DIR

One process trains a model of BERT-base's shape with random weights on the sample, and logs each step. Each save is
followed by steps during its write and by steps without one, so both kinds take turns. Prints per save how long training
waited and how long the write took, their ratio, and the time of the two kinds of steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from compare_report import machine
from shared import REPOSITORY, spread

BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
BASE |= {"vocab_size": 30522, "max_position_embeddings": 512}


def base_model(folder: Path) -> Path:
    """A model of BERT-base's shape, and the sample's tokenizer with unused words to fit."""
    sample = REPOSITORY / "hvd_bert" / "sample"
    base = folder / "base"
    base.mkdir()
    shutil.copy(sample / "tokenizer_config.json", base)
    words = (sample / "vocab.txt").read_text(encoding="utf-8").split()
    words += [f"[unused{number}]" for number in range(len(words), BASE["vocab_size"])]
    (base / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    (base / "config.json").write_text(json.dumps(json.loads((sample / "config.json").read_text()) | BASE))
    return base


def train(out: Path, saves: int, every: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The lines of metrics.jsonl and the results of a training with so many saves, each `every` steps."""
    base = str(base_model(out))
    flags = [
        "--config",
        "sample",
        "--config_name",
        base,
        "--tokenizer_name",
        base,
        "--per_device_train_batch_size",
        "1",
    ]
    flags += ["--max_steps", str(saves * every), "--save_steps", str(every)]
    flags += ["--logging_steps", "1", "--no_do_eval"]
    command = [sys.executable, "-m", "hvd_bert.train", *flags, "--output_dir", str(out / "run")]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    lines = (out / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    results = json.loads((out / "run" / "train_results.json").read_text(encoding="utf-8"))
    return [row for row in map(json.loads, lines) if "step_s" in row], results


def steps_by_kind(rows: list[dict[str, Any]], every: int) -> tuple[list[float], list[float]]:
    """Seconds of the steps during a write, and of the others after the first save. Those with a pause are left out."""
    during: list[float] = []
    without: list[float] = []
    for first in range(every, len(rows), every):  # the line of the step after a save
        left = next((row["checkpoint_write_s"] for row in rows[first:] if row.get("checkpoint_write_s")), None)
        if left is None:  # the write ended after the last logged step
            continue
        for row in rows[first + 1 : first + every]:
            left -= row["step_s"]
            (during if left > 0 else without).append(row["step_s"])
    return during, without


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description="Pause and write time of checkpoints of BERT-base.")
    parser.add_argument("--out", type=Path, required=True, help="New folder to work in.")
    parser.add_argument("--saves", type=int, default=7, help="Number of checkpoints. (default: %(default)s)")
    parser.add_argument("--save_steps", type=int, default=24, help="Steps between them. (default: %(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True)  # fails if it exists
    os.environ.setdefault("HVD_BERT_CACHE", str(args.out / "cache"))
    rows, results = train(args.out, args.saves, args.save_steps)
    pauses = [row["checkpoint_pause_s"] for row in rows if row.get("checkpoint_pause_s")]
    writes = [row["checkpoint_write_s"] for row in rows if row.get("checkpoint_write_s")]
    # No line has the last write if it ended after the last step.
    paired = pauses[:-1] if len(writes) == len(pauses) - 1 else pauses
    ratios = [pause / write for pause, write in zip(paired, writes, strict=True)]
    print(f"pauses in order: {', '.join(f'{pause:.2f}' for pause in pauses)} s; the end waits for the last write")
    print(
        f"pause: {spread(pauses, 2)} s; write: {spread(writes, 2)} s; ratio: {spread(ratios, 3)}, {len(ratios)} saves"
    )
    during, without = steps_by_kind(rows, args.save_steps)
    slower = statistics.median(during) / statistics.median(without)
    print(f"step during a write: {spread(during, 2)} s; without: {spread(without, 2)} s; ratio of medians {slower:.2f}")
    print(json.dumps({key: value for key, value in results.items() if key.startswith("checkpoint")}))
    print(machine())


if __name__ == "__main__":
    main()
