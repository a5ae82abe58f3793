"""Measure the trainer's own loop on the ranks that the launcher starts: `hvd-bert bench`.

Takes all of the trainer's flags; with --train_file or --dataset_name it uses that data and the trainer's weights. It
trains one warm-up section, then --repeats sections of --steps steps each and, on a GPU, a step under the profiler.
Exit status: 0 measured, 1 failure, 2 bad input; a signal kills it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import BertConfig

from hvd_bert import hub
from hvd_bert.config.data import ModelArguments
from hvd_bert.config.run_plan import RunPlan
from hvd_bert.config.settings import Config
from hvd_bert.config.training import REDUCE_OVERHEAD
from hvd_bert.data.sources import squad
from hvd_bert.data.window_table import WindowTable
from hvd_bert.distributed.world import World
from hvd_bert.errors import EXIT_FAILURE, UserError, log
from hvd_bert.model.bert import new_model
from hvd_bert.model.families import check_precision, choose_padding, max_tokens
from hvd_bert.model.layers import place
from hvd_bert.model.loading import load_config
from hvd_bert.monitoring import PHASES
from hvd_bert.monitoring.usage import memory_now, memory_peak
from hvd_bert.output import output_dir, run_folder
from hvd_bert.storage.reading import GIB
from hvd_bert.storage.writing import check_output, write_named, writing_to
from hvd_bert.tasks.base import Task, load_task, weight_copies
from hvd_bert.tasks.question_answering import QuestionAnswering
from hvd_bert.tools.bench import host_time, measure
from hvd_bert.tools.rendering.page import Grid
from hvd_bert.training.loop import Training
from hvd_bert.training.start import Start, prepare, set_up

# name -> label and format
FIGURES = {
    "windows_per_s": ("windows/s", "{:.2f}"),
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "step_s": ("seconds per step", "{:.4f}"),
    "useful_gflops": ("useful GFLOP/s, all ranks", "{:.1f}"),
    "matmul_utilization": ("share of the measured matmul peak", "{:.3f}"),
    "mfu": ("MFU, share of the vendor's peak", "{:.3f}"),
    **{
        f"{phase}_share": (f"share of the step: {name}", "{:.4f}")
        for phase, name in PHASES.items()
        if phase != "checkpoint"
    },
}


def run(flags: argparse.Namespace, config: Config, world: World) -> None:
    """Measure, and print on rank 0. Called by all ranks."""
    set_up(config, world)
    log.info("%s", "\n".join(world.describe()))
    if flags.replaced:
        log.warning(
            "--%s: not used. The benchmark only trains, for --steps and --repeats.", ", --".join(flags.replaced)
        )
    before = memory_now(world.device)
    with world.raise_on_all_ranks():
        if flags.json and world.rank == 0:
            output_dir.check_apart("--json", flags.json, config.as_flat())
            with writing_to("--json", flags.json):
                check_output(flags.json, flags.overwrite)
        task: Task
        if flags.random:
            count = config.train.windows_per_step(world.size * world.devices) * config.train.max_steps
            task = random_task(flags.model, count, config, world)
        else:
            task = load_task(config, world)
    assert task.plan is not None
    config = RunPlan(padding=task.padding).applied_to(config)
    inputs = {"the model": str(getattr(task.model, "config", task.model)), "tokens": int(task.plan.lengths.sum())}
    world.check_same({f"--{name}": value for name, value in config.as_flat().items()} | inputs)
    place(task.model, world.device, config.train.torch_compile)
    figures = _measure(task, flags, config, world, before)
    with world.raise_on_all_ranks(EXIT_FAILURE):
        if world.rank == 0:
            record = {
                "generator": "hvd_bert.bench",
                "command": sys.argv[1:],
                "settings": config.as_flat(),
                "unit": task.unit,
                **figures,
                **run_folder.environment_facts(config, world),
            }
            _print_table(record)
            if flags.json:
                with writing_to("--json", flags.json):
                    path = check_output(flags.json, flags.overwrite)
                    write_named(path, json.dumps(record, indent=1) + "\n")


def _measure(task: Task, flags: argparse.Namespace, config: Config, world: World, before: int) -> dict[str, Any]:
    """Measure all figures. A collective. `before`: bytes in use before the model was created."""
    assert task.plan is not None
    plan, args, device, recorder = task.plan, config.train, world.device, measure.Recorder()
    flops = partial(task.flops, passes=plan.total_passes)
    tokens = int(plan.rank_tokens(0)[world.rank] / plan.accumulation)
    world.allgather(None)  # all ranks measure at the same time, as they train
    peak = _matmul_peak(task, tokens, device, args.precision)
    last = args.max_steps + 1  # a step for the profiler, after those that count
    timers = [host_time.HostTimer(flags.steps, last)] if host_time.measurable(config, world) else []
    start = Start(replace(config, train=replace(args, max_steps=last)) if timers else config, task)
    with tempfile.TemporaryDirectory() as folder:  # GPU usage is recorded there
        Training(start.in_folder(Path(folder)), prepare(start, world), None, recorder.logger(*timers), world).run()
    used = memory_peak(device) - before
    reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    timed = range(flags.steps, args.max_steps)
    needed = measure.memory_needed(task, world, timed, args.precision)
    evaluation = None
    if world.size * world.devices == 1 and not args.torch_compile:  # it would compile again
        evaluation = measure.evaluation_rate(task, timed[-flags.steps :], device, args.precision)
    world.allgather(None)
    peak = max(peak, _matmul_peak(task, tokens, device, args.precision))
    ranks = world.allgather({"peak": peak, "memory": used, "reserved": reserved, "needed": needed})
    rows = [row for row in recorder.rows if flags.steps < row["step"] <= args.max_steps]
    whole_peak = sum(rank["peak"] for rank in ranks)
    sections = []
    for row in rows:
        steps = range(int(row["step"]) - flags.steps, int(row["step"]))
        lengths = (plan.lengths[plan.step_windows(step)] for step in steps)
        sections.append(measure.section_figures(row, lengths, flops, whole_peak))
    return {
        "figures": measure.spread(sections),
        "sections": sections,
        "evaluation_windows_per_s": evaluation,
        "loss": rows[-1]["loss"],
        "matmul_peak_gflops": whole_peak / 1e9,
        "padding_share": measure.padding_share(rows),
        "imbalance": fmean(plan.imbalance(step) for step in timed),
        "memory_bytes": [rank["memory"] for rank in ranks],
        "memory_reserved_bytes": [rank["reserved"] for rank in ranks] if reserved else None,
        "memory_over_needed": max(rank["memory"] / rank["needed"] for rank in ranks),
        **(timers[0].figures() if timers else dict.fromkeys([*host_time.FIGURES, "kernels", "host_waits"])),
        "windows": plan.num_windows,
        "global_batch": plan.global_batch,
    }


def _matmul_peak(task: Task, tokens: int, device: torch.device, precision: str) -> float:
    """0 if the task's useful FLOP are unknown, so that no share of the peak can be given."""
    if task.flops(np.array([tokens], np.int32), 1) is None:
        return 0.0
    return measure.matmul_peak(task.model, tokens, device, precision)


def _print_table(record: dict[str, Any]) -> None:
    """Print a table."""
    spreads = record["figures"]
    has_tokens = spreads.get("tokens_per_s") != spreads.get("windows_per_s")  # otherwise an example counts as 1
    rows = []
    for name, (label, form) in FIGURES.items():
        # Left out: the MFU without a known peak, communication that a strategy does not separate, tokens of images.
        if name in spreads and (name != "tokens_per_s" or has_tokens):
            values = [form.format(spreads[name][kind]) for kind in ("median", "least", "most")]
            rows.append([label.replace("windows", record["unit"]), *values])
    reserved, waits = record["memory_reserved_bytes"] or [0], record["host_waits"] or []
    whole = [
        ("matmul peak, GFLOP/s, all ranks", f"{record['matmul_peak_gflops']:.1f}", record["matmul_peak_gflops"]),
        ("padding, share of positions", f"{record['padding_share']:.4f}", has_tokens),
        ("tokens per rank, maximum over mean", f"{record['imbalance']:.4f}", has_tokens),
        ("memory per rank (maximum), GiB", f"{max(record['memory_bytes']) / GIB:.2f}", True),
        ("memory with torch's reserve, GiB", f"{max(reserved) / GIB:.2f}", any(reserved)),
        ("measured over computed memory", f"{record['memory_over_needed']:.2f}", True),
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
FIRST_TOKEN = 1000  # tokens below are special or unused in bert-base-uncased's vocabulary


def lengths_like_squad(count: int, longest: int, seed: int) -> NDArray[np.int32]:
    """Lengths of `count` windows, drawn between SQuAD's deciles and clipped to `longest` tokens."""
    places = np.random.Generator(np.random.PCG64(seed)).random(count) * (len(SQUAD_DECILES) - 1)
    drawn = np.interp(places, np.arange(len(SQUAD_DECILES)), SQUAD_DECILES)
    return np.minimum(drawn.astype(np.int32), longest)


def random_windows(lengths: NDArray[np.int32], vocabulary: int, seed: int) -> WindowTable:
    """A window table (`hvd_bert.data.window_table`) without text, with the columns that training reads."""
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


def random_task(model: str | None, num_windows: int, config: Config, world: World) -> QuestionAnswering:
    """Question answering on random windows with new weights. Raises UserError.

    `model`: an encoder's folder or configuration file; None: BERT-base.
    """
    args, data = config.train, config.data
    copies = weight_copies(args.do_train, config.parallel.strategy, world)
    if model is not None and not Path(model).exists():
        raise UserError(f"--model {model}: no such folder or file. Name an encoder's folder or its config.json.")
    shape = load_config(model, ModelArguments(model_name_or_path=model), copies) if model else BertConfig()
    check_precision(shape, args.precision)
    data = replace(data, padding=choose_padding(shape, data.padding))
    config = replace(config, data=data)
    lengths = lengths_like_squad(num_windows, min(data.max_seq_length, max_tokens(shape)), args.seed)
    table = random_windows(lengths, shape.vocab_size, args.seed)
    source = squad.from_questions("random windows", [])
    with hub.reported(model or "BERT-base"):
        padded, flags = data.pad_to is not None, config.model
        network = new_model(shape, flags.dropout, args.seed, padded, attention_dropout=flags.attention_dropout)

    class RandomWindows(QuestionAnswering):
        def load(self, config: Config) -> None:
            self.use_model(network)
            self.train = self.question_set(source, table)

    task = RandomWindows(config, world)
    task.padding = data.padding
    task.add_adapters(config)
    return task
