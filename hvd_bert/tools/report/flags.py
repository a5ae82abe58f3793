"""The flags of `hvd-bert report`."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvd_bert.config.parser import Parser
from hvd_bert.config.values import LARGEST, check_range
from hvd_bert.errors import UserError
from hvd_bert.tools.report.projection import MAX_DEVICES, NS_PER_WEIGHT


def make_parser() -> argparse.ArgumentParser:
    """The parser of the report's flags."""
    parser = Parser(prog="hvd-bert report")
    parser.description = (
        "Show one run, also one that is still going, or compare several: curves, scores, settings and speed-ups, as an"
        " HTML page and tables."
    )
    parser.add_argument(
        "runs", metavar="RUNS", nargs="+", type=Path, help="Output folders of trainings, or folders above them."
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("report"),
        help="Folder to write the report to. (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--baseline",
        metavar="STRATEGY:RANKS",
        help="Runs that speed-ups are relative to."
        " (default: none:1, else the smallest world of horovod, else the smallest)",
    )
    parser.add_argument(
        "--loss_tolerance", metavar="X", type=float, default=1e-3,
        help="Maximum relative difference of the first losses, without dropout. (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--final_loss_tolerance", metavar="X", type=float, default=0.1,
        help="Maximum relative difference of the mean loss of the last quarter. (default: %(default)s)",
    )  # fmt: skip
    _add_projection(parser)
    return parser


def _add_projection(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "projection", "Project to more devices (docs/evidence/scaling.md). Needs --gbps or --doctor."
    )
    add = group.add_argument
    add("--gbps", type=float, nargs="+", metavar="N", help="Network bandwidths, in gigabits/s. (default: none)")
    add("--latency_us", type=float, default=20.0, metavar="N",
        help="Network latency per message, in microseconds. (default: %(default)g)")  # fmt: skip
    add("--doctor", type=Path, metavar="FILE",
        help="Output of `hvd-bert doctor --json`, instead of --gbps. (default: none)")  # fmt: skip
    add("--gpus_per_node", type=int, default=1, metavar="N",
        help="GPUs that share a node's network. (default: %(default)s)")  # fmt: skip
    add("--inner_gbps", type=float, metavar="N",
        help="Bandwidth between a node's GPUs, in gigabits/s; --gpus_per_node needs it. (default: none)")  # fmt: skip
    add("--inner_latency_us", type=float, default=5.0, metavar="N",
        help="Latency between a node's GPUs, in microseconds. (default: %(default)g)")  # fmt: skip
    add("--parameters", type=int, metavar="N", help="Number of weights of the model. (default: as the run recorded)")
    add("--backward_share", type=float, metavar="X",
        help="Share of the backward pass in the computation. (default: 2/3)")  # fmt: skip
    add("--ns_per_weight", type=float, default=NS_PER_WEIGHT, metavar="N",
        help="Fixed cost of averaging gradients, in ns per step and weight. (default: %(default)g)")  # fmt: skip
    add("--fusion_mb", type=float, default=128.0, metavar="N",
        help="HOROVOD_FUSION_THRESHOLD, in MiB. (default: %(default)g)")  # fmt: skip
    add("--cycle_ms", type=float, default=1.0, metavar="N",
        help="HOROVOD_CYCLE_TIME, in ms. (default: %(default)g)")  # fmt: skip
    add("--most_devices", type=int, default=MAX_DEVICES, metavar="N",
        help="Largest number of devices to project to. (default: %(default)s)")  # fmt: skip


def check(flags: argparse.Namespace) -> None:
    """Raise UserError for values out of range, and for flags that need others."""
    positive = ["inner_gbps", "parameters", "fusion_mb", "cycle_ms", "most_devices", "gpus_per_node"]
    for name in [*positive, "loss_tolerance", "final_loss_tolerance"]:
        value = getattr(flags, name)
        _check_positive(name, value)
    for value in flags.gbps or []:
        _check_positive("gbps", value)
    for name in ("latency_us", "inner_latency_us", "ns_per_weight"):
        if not 0 <= getattr(flags, name) < float("inf"):
            raise UserError(f"--{name} {getattr(flags, name):g}: must not be negative or infinite.")
        check_range(name, getattr(flags, name), 0, LARGEST)
    if flags.backward_share is not None and not 0 <= flags.backward_share <= 1:
        raise UserError(f"--backward_share {flags.backward_share:g}: must be from 0 to 1.")
    if (flags.gpus_per_node > 1) != (flags.inner_gbps is not None):
        raise UserError(
            "--gpus_per_node and --inner_gbps need each other: GPUs per node, and the bandwidth between them."
        )
    for name in ("inner_gbps", "parameters", "backward_share"):
        if getattr(flags, name) is not None and not flags.gbps and not flags.doctor:
            raise UserError(f"--{name} is for the projection, which needs a bandwidth: add --gbps N or --doctor FILE.")


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise UserError(f"--{name} {value:g}: must be above 0 and finite.")
    check_range(name, value, 0, LARGEST)
