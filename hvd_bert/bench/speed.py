"""How fast training is on the ranks that the launcher starts, by the trainer's own loop: `python -m hvd_bert.bench`.

All of the trainer's flags count too; with --train_file or --dataset_name its own data and weights are taken. Trains
--repeats sections of --steps steps each, after one that is not counted. Exit status: 0 measured, 1 failure, 2 bad
input; a signal ends it as it does any process.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from hvd_bert import command_line, output
from hvd_bert.bench import measure
from hvd_bert.bench.peak import matmul_peak
from hvd_bert.bench.workload import random_inputs
from hvd_bert.config import Config
from hvd_bert.data.batches import Collator
from hvd_bert.errors import EXIT_FAILURE, EXIT_OK, UserError
from hvd_bert.inputs import Inputs, load_inputs
from hvd_bert.process_usage import memory_now, memory_peak, seconds_since_start
from hvd_bert.running import run_as_rank
from hvd_bert.train import Training, set_up
from hvd_bert.world import World, log

# Flags of the trainer that name data, so that its own windows and weights are taken; and those that name weights only.
DATA_FLAGS = {"train_file", "dataset_name", "config"}
MODEL_FLAGS = {"model_name_or_path", "config_name", "tokenizer_name"}

# name -> what it is, and how it is printed
FIGURES = {
    "windows_per_s": ("windows/s", "{:.2f}"),
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "step_s": ("seconds per step", "{:.4f}"),
    "useful_gflops": ("useful GFLOP/s, all ranks", "{:.1f}"),
    "mfu": ("the same over the matmul peak (MFU)", "{:.3f}"),
    "data_share": ("waiting for batches, share of the step", "{:.4f}"),
    "compute_share": ("forward and backward", "{:.4f}"),
    "exposed_comm_share": ("exposed communication", "{:.4f}"),
    "optimizer_share": ("clipping and optimizer", "{:.4f}"),
    "other_share": ("all else", "{:.4f}"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # argparse would print on every rank
        raise UserError(f"{message}. `python -m hvd_bert.bench --help` lists the flags.")


def parse(argv: list[str], show_help: bool) -> tuple[argparse.Namespace, Config]:
    """The benchmark's flags, and the trainer's. Raises UserError."""
    parser = _Parser(prog="python -m hvd_bert.bench", add_help=False, allow_abbrev=False)
    parser.description = (
        "How fast training is here. All flags of python -m hvd_bert.train are taken as well. Strategies and numbers of"
        " ranks beside each other: python -m hvd_bert.bench sweep --help."
    )
    parser.add_argument("--model", help="a BERT's folder or config.json; the weights are new (default: BERT-base)")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of a section (default 10)")
    parser.add_argument("--repeats", type=int, default=3, help="sections that are timed (default 3)")
    parser.add_argument("--windows", type=int, help="random windows to choose from (default: as many as are trained)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON as well")
    if {"-h", "--help"} & set(argv):
        if show_help:
            parser.print_help()
        sys.exit(EXIT_OK)
    flags, rest = parser.parse_known_args(argv)
    for name, least in (("steps", 2), ("repeats", 1), ("windows", 1)):
        value = getattr(flags, name)
        if value is not None and value < least:
            raise UserError(f"--{name} {value}: must be at least {least}.")
    given = command_line.names_of(rest)
    flags.random = not given & DATA_FLAGS
    if not flags.random and (flags.model or flags.windows):
        raise UserError("--model and --windows are for random windows: leave them out where data is named.")
    if flags.random and given & MODEL_FLAGS:
        raise UserError(
            f"--{min(given & MODEL_FLAGS)} needs --train_file or --dataset_name; for random windows: --model."
        )
    if "no_do_train" in given or "do_train" in given:
        raise UserError("--do_train: the benchmark trains, and does nothing else.")
    total = flags.steps * (flags.repeats + 1)
    ours = ["--no_do_eval", "--eval_strategy=no", "--save_steps=0", f"--max_steps={total}"]
    return flags, command_line.parse([*rest, *ours, f"--logging_steps={flags.steps}"])


def main(world: World) -> None:
    """Measure, print on rank 0."""
    with world.together():
        flags, config = parse(sys.argv[1:], show_help=world.rank == 0)
    set_up(config, world)
    log.info("%s", "\n".join(world.describe()))
    before = memory_now(world.device)
    with world.together():
        inputs = _inputs(flags, config, world)
    world.check_same({f"--{name}": value for name, value in config.as_flat().items()} | _fingerprint(inputs))
    inputs.model.to(device=world.device)  # type: ignore[call-arg]  # transformers hides the signature
    figures = _measure(inputs, flags, config, world, before)
    with world.together(EXIT_FAILURE):
        if world.rank == 0:
            record = {"command": sys.argv[1:], "settings": config.as_flat(), **figures, **output.facts(config, world)}
            _tell(record, flags.json)


def _inputs(flags: argparse.Namespace, config: Config, world: World) -> Inputs:
    if not flags.random:
        return load_inputs(config, world)
    args = config.train
    step = args.per_device_train_batch_size * args.gradient_accumulation_steps * world.size * world.devices
    return random_inputs(flags.model, flags.windows or step * args.max_steps, config, world)


def _fingerprint(inputs: Inputs) -> dict[str, object]:
    assert inputs.train is not None
    return {"the model": str(inputs.model.config), "tokens of all windows": int(inputs.train.plan.lengths.sum())}


def _measure(inputs: Inputs, flags: argparse.Namespace, config: Config, world: World, before: int) -> dict[str, Any]:
    """All figures. A collective. `before`: bytes held before the model was made."""
    assert inputs.train is not None
    model, plan, args = inputs.model, inputs.train.plan, config.train
    shape, device, recorder = model.config, world.device, measure.Recorder()
    collate = Collator(inputs.train.windows, device, config.data.pad_to)
    tokens = int(plan.rank_tokens(0)[world.rank] / plan.accumulation)
    world.allgather(None)  # the ranks measure together, as they compute
    start = seconds_since_start()
    peak = matmul_peak(shape, tokens, device, args.precision)
    measuring_s = seconds_since_start() - start
    with tempfile.TemporaryDirectory() as folder:
        args.output_dir = folder  # with GPUs their usage is recorded there
        Training(inputs, None, None, recorder, config, world).run(stoppable=False)
    args.output_dir = None
    held = memory_peak(device) - before
    timed = range(flags.steps, args.max_steps)
    needed = measure.memory_needed(model, plan, collate, world.rank, timed, args.precision)
    world.allgather(None)
    peak = max(peak, matmul_peak(shape, tokens, device, args.precision))
    first_step_s = recorder.first_step_s - measuring_s
    ranks = world.allgather({"peak": peak, "memory": held, "needed": needed, "first_step_s": first_step_s})
    rows = [row for row in recorder.rows if row["step"] > flags.steps]
    whole_peak = sum(rank["peak"] for rank in ranks)
    sections = [
        measure.section_figures(row, _lengths(plan, int(row["step"]), flags.steps), shape, whole_peak) for row in rows
    ]
    return {
        "figures": measure.spread(sections),
        "sections": sections,
        "loss": rows[-1]["loss"],
        "matmul_peak_gflops": whole_peak / 1e9,
        "padding_share": measure.padding_share(plan, config.data.pad_to, timed),
        "imbalance": measure.imbalance(plan, timed),
        "memory_bytes": [rank["memory"] for rank in ranks],
        "memory_over_needed": max(rank["memory"] / rank["needed"] for rank in ranks),
        "first_step_s": max(rank["first_step_s"] for rank in ranks),
        "windows": plan.num_windows,
        "global_batch": plan.global_batch,
    }


def _lengths(plan: Any, last: int, steps: int) -> list[Any]:
    return [plan.lengths[plan.step_windows(step)] for step in range(last - steps, last)]


def _tell(record: dict[str, Any], path: Path | None) -> None:
    """Print a table; write `path`. Raises UserError where it cannot be written."""
    spreads = record["figures"]
    lines = [f"{'':<40} {'median':>12} {'least':>12} {'most':>12}"]
    for name, (label, form) in FIGURES.items():
        if name not in spreads:  # exposed communication, where it cannot be told
            continue
        values = [form.format(spreads[name][kind]) for kind in ("median", "least", "most")]
        lines.append(f"{label:<40} " + " ".join(f"{value:>12}" for value in values))
    lines += [
        f"{'matmul peak, GFLOP/s, all ranks':<40} {record['matmul_peak_gflops']:>12.1f}",
        f"{'padding, share of positions':<40} {record['padding_share']:>12.4f}",
        f"{'most tokens of a rank over the mean':<40} {record['imbalance']:>12.4f}",
        f"{'memory of a rank, GiB':<40} {max(record['memory_bytes']) / 2**30:>12.2f}",
        f"{'the same over what is computed':<40} {record['memory_over_needed']:>12.2f}",
        f"{'seconds from the start to step 1':<40} {record['first_step_s']:>12.1f}",
    ]
    print("\n".join(lines), flush=True)
    if path:
        try:
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--json {path}: cannot be written: {error}.") from None


def start() -> NoReturn:
    """The command, on every rank."""
    run_as_rank(main, **command_line.before_joining(sys.argv[1:], lambda argv: parse(argv, show_help=False)[1]))
