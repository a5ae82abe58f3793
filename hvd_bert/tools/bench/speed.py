"""Measure the trainer's own loop on the ranks that the launcher starts: `hvd-bert bench`.

It trains one warm-up section, then --repeats sections of --steps steps each and, on a GPU, a step under the profiler.
Exit status: 0 measured, 1 failure, 2 bad input; a signal kills it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import BertConfig

from hvd_bert import hub
from hvd_bert.config.settings import Config
from hvd_bert.config.training import REDUCE_OVERHEAD
from hvd_bert.data.sources import squad
from hvd_bert.data.window_table import WindowTable
from hvd_bert.distributed.world import World
from hvd_bert.errors import EXIT_FAILURE, UserError, log
from hvd_bert.model.bert import new_model
from hvd_bert.model.families import check_precision, choose_padding, max_tokens
from hvd_bert.model.loading import load_config
from hvd_bert.model.precision import autocast, evaluating
from hvd_bert.monitoring import PHASES
from hvd_bert.monitoring.usage import memory_now, memory_peak
from hvd_bert.output import output_dir, run_folder
from hvd_bert.output.callback import Callback
from hvd_bert.storage.reading import GIB
from hvd_bert.storage.writing import check_output, write_output, writing_to
from hvd_bert.tasks.base import Task, weight_copies
from hvd_bert.tasks.question_answering import QuestionAnswering
from hvd_bert.tools.bench import host_time
from hvd_bert.tools.bench.host_time import HostTimer
from hvd_bert.tools.rendering.page import Grid
from hvd_bert.training.loop import train_only

# name -> label and format
FIGURES = {
    "windows_per_s": ("windows/s", "{:.2f}"),
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "step_s": ("seconds per step", "{:.4f}"),
    "useful_gflops": ("useful GFLOP/s, all ranks", "{:.1f}"),
    "mfu": ("MFU, share of the vendor's peak", "{:.3f}"),
}
SHARES = {f"{phase}_share": (f"share of the step: {name}", "{:.4f}") for phase, name in PHASES.items()}


class Recorder(Callback):
    """Collects a training's metrics in memory: the rows of metrics.jsonl."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, step: int, metrics: dict[str, float]) -> None:
        self.rows.append({"step": step, **metrics})


def run(flags: argparse.Namespace, config: Config, world: World) -> None:
    """Measure the throughput; rank 0 prints it and writes --json. Called by all ranks."""
    if flags.replaced:
        log.warning(
            "--%s: not used. The benchmark only trains, for --steps and --repeats.", ", --".join(flags.replaced)
        )
    with world.raise_on_all_ranks():
        if flags.json and world.rank == 0:
            output_dir.check_apart("--json", flags.json, config.as_flat())
            with writing_to("--json", flags.json):
                check_output(flags.json, flags.overwrite)
    record = {"generator": "hvd_bert.bench", "command": sys.argv[1:], **_measure(flags, config, world)}
    with world.raise_on_all_ranks(EXIT_FAILURE):
        if world.rank == 0:
            _print_table(record)
            if flags.json:
                write_output("--json", flags.json, json.dumps(record, indent=1) + "\n", flags.overwrite)


def _measure(flags: argparse.Namespace, config: Config, world: World) -> dict[str, Any]:
    """Train, and return all figures and the settings. A collective."""
    args, device, recorder = config.train, world.device, Recorder()
    last = args.max_steps + 1  # a step for the profiler, after the measured steps
    timer = HostTimer(flags.steps, last) if host_time.measurable(config, world) else None
    trained = replace(config, train=replace(args, max_steps=last)) if timer else config
    before = memory_now(device)
    callbacks = [recorder, timer] if timer else [recorder]
    task = train_only(trained, world, callbacks, RandomWindows if flags.random else None)
    used = memory_peak(device) - before
    reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    evaluation = None
    if world.size * world.devices == 1 and not args.torch_compile:  # evaluation would compile again
        steps = range(args.max_steps - flags.steps, args.max_steps)
        evaluation = evaluation_rate(task, steps, device, args.precision)
    ranks = world.allgather({"memory": used, "reserved": reserved})
    rows = [row for row in recorder.rows if flags.steps < row["step"] <= args.max_steps]
    sections = [section_figures(row) for row in rows]
    assert task.plan is not None
    config = replace(config, data=replace(config.data, padding=task.padding or config.data.padding))
    return {
        "settings": config.as_flat(),
        "unit": task.unit,
        "figures": spread(sections),
        "sections": sections,
        "evaluation_windows_per_s": evaluation,
        "loss": rows[-1]["loss"],
        "padding_share": padding_share(rows),
        "imbalance": fmean(row["imbalance"] for row in rows),
        "memory_bytes": [rank["memory"] for rank in ranks],
        "memory_reserved_bytes": [rank["reserved"] for rank in ranks] if reserved else None,
        **(timer.figures() if timer else dict.fromkeys([*host_time.FIGURES, "kernels", "host_waits"])),
        "windows": task.plan.num_windows,
        "global_batch": task.plan.global_batch,
        **run_folder.environment_facts(config, world),
    }


def section_figures(row: dict[str, float]) -> dict[str, float]:
    """Select the figures of a section, with TFLOP/s in GFLOP/s. `row`: the metrics logged at the section's end."""
    useful = {"useful_gflops": 1000 * row["tflops_per_s"]} if "tflops_per_s" in row else {}
    return useful | {name: row[name] for name in FIGURES | SHARES if name in row}


def spread(sections: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Compute median, minimum and maximum of each figure over the sections."""
    columns = {name: [section[name] for section in sections] for name in sections[0]}
    return {name: {"median": median(c), "least": min(c), "most": max(c)} for name, c in columns.items()}


def padding_share(rows: list[dict[str, float]]) -> float:
    """Compute the share of padding in all positions, over ranks and sections. `rows`: metrics logged per section."""
    tokens = [row["tokens_per_s"] * row["step_s"] for row in rows]
    positions = [count / (1 - row["padding_share"]) for count, row in zip(tokens, rows, strict=True)]
    return 1 - sum(tokens) / sum(positions)


def evaluation_rate(task: Task, steps: range, device: torch.device, precision: str) -> float:
    """Measure forward passes without gradients on the batches of `steps`, in a world of 1. Returns windows/s."""
    assert task.plan is not None
    batches = [task.batch(ids) for step in steps for ids in task.plan.rank_windows(step, 0)]
    with evaluating(task.model), autocast(device, precision):
        for timed in (batches[:1], batches):  # the first batch is warm-up
            _wait(device)
            start = time.perf_counter()
            for batch in timed:
                task.losses(task.model, batch)
            _wait(device)
    return sum(batch.num_windows for batch in batches) / (time.perf_counter() - start)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _print_table(record: dict[str, Any]) -> None:
    spreads = record["figures"]
    has_tokens = spreads.get("tokens_per_s") != spreads.get("windows_per_s")  # equal if the task counts no tokens
    rows = []
    hidden = {"checkpoint_share"} if has_tokens else {"checkpoint_share", "tokens_per_s"}
    for name, (label, form) in (FIGURES | SHARES).items():
        if name in spreads and name not in hidden:  # the MFU and communication may be unknown
            values = [form.format(spreads[name][kind]) for kind in ("median", "least", "most")]
            rows.append([label.replace("windows", record["unit"]), *values])
    reserved, waits = record["memory_reserved_bytes"] or [0], record["host_waits"] or []
    whole = [
        ("padding, share of positions", f"{record['padding_share']:.4f}", has_tokens),
        ("tokens per rank, maximum over mean", f"{record['imbalance']:.4f}", has_tokens),
        ("memory per rank (maximum), GiB", f"{max(record['memory_bytes']) / GIB:.2f}", True),
        ("memory with torch's reserve, GiB", f"{max(reserved) / GIB:.2f}", any(reserved)),
        ("waits of the host for the GPU, in half a section", str(len(waits)), waits),
    ]
    for name, (label, form) in host_time.FIGURES.items():
        whole.append((label, form.format(record[name] or 0), record[name]))
    rows += [[label, value, "", ""] for label, value, known in whole if known]
    print(Grid(["figure", "median", "min", "max"], rows).for_terminal(), flush=True)
    advice = host_time.advice(record, record["settings"]["torch_compile_mode"] == REDUCE_OVERHEAD)
    if advice:
        print(advice, flush=True)


# Tokens per window: minimum, deciles and maximum over the 3,889 windows of the first 11 articles of SQuAD v1.1's
# training set, with bert-base-uncased's vocabulary, at most 384 tokens and stride 128.
SQUAD_DECILES = (41, 95, 114, 133, 150, 167, 185, 207, 239, 279, 384)
FIRST_TOKEN = 1000  # lower ids are special or unused in bert-base-uncased's vocabulary


def lengths_like_squad(count: int, longest: int, seed: int) -> NDArray[np.int32]:
    """Draw the lengths of `count` windows, in tokens, from SQuAD's distribution, clipped to `longest`."""
    quantiles = np.random.Generator(np.random.PCG64(seed)).random(count) * (len(SQUAD_DECILES) - 1)
    drawn = np.interp(quantiles, np.arange(len(SQUAD_DECILES)), SQUAD_DECILES)
    return np.minimum(drawn.astype(np.int32), longest)


def random_windows(lengths: NDArray[np.int32], vocabulary: int, seed: int) -> WindowTable:
    """Make a window table (`hvd_bert.data.window_table`) of random tokens, with the columns that training reads."""
    rng = np.random.Generator(np.random.PCG64(seed))
    first = min(FIRST_TOKEN, vocabulary - 1)
    starts = rng.integers(1, lengths - 1)
    return WindowTable.from_columns(
        {
            "input_ids": [rng.integers(first, vocabulary, length, dtype=np.int32) for length in lengths],
            "context_start": np.minimum(12, lengths // 2),
            "start_position": starts,
            "end_position": np.minimum(starts + 2, lengths - 1),
        }
    )


class RandomWindows(QuestionAnswering):
    """A task for benchmarks: random windows with SQuAD's lengths, and a model with new weights."""

    def load(self, config: Config) -> None:
        args, data, model = config.train, config.data, config.model
        if model.config_name and not Path(model.config_name).exists():
            raise UserError(
                f"--model {model.config_name}: no such folder or file. Name an encoder's folder or its config.json."
            )
        copies = weight_copies(args.do_train, config.parallel.strategy, self.world)
        shape = load_config(model.config_name, model, copies) if model.config_name else BertConfig()
        check_precision(shape, args.precision)
        self.padding = choose_padding(shape, data.padding)
        data = replace(data, padding=self.padding)
        self.config = replace(config, data=data)
        with hub.reported(model.config_name or "BERT-base"):
            padded, dropouts = data.pad_to is not None, (model.dropout, model.attention_dropout)
            self.use_model(new_model(shape, dropouts[0], args.seed, padded, attention_dropout=dropouts[1]))
        count = args.windows_per_step(self.world.size * self.world.devices) * args.max_steps
        lengths = lengths_like_squad(count, min(data.max_seq_length, max_tokens(shape)), args.seed)
        windows = random_windows(lengths, shape.vocab_size, args.seed)
        self.train = self.question_set(squad.from_questions("random windows", []), windows)

    def fingerprint(self) -> dict[str, object]:
        assert self.train is not None
        return {"the model": str(self.model.config), "tokens": int(self.train.lengths.sum())}

    def identity(self) -> dict[str, object]:
        return {}
