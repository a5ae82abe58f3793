"""The flags of `hvd-bert report`."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvd_bert.config.parser import Parser
from hvd_bert.config.values import Limits
from hvd_bert.errors import UserError
from hvd_bert.tools.report.projection import MAX_DEVICES, NS_PER_WEIGHT

POSITIVE, NOT_NEGATIVE = Limits(above=0, maximum=1e9), Limits(minimum=0, maximum=1e9)


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
        "--baseline", metavar="STRATEGY:RANKS",
        help="Runs that speed-ups are relative to."
        " (default: none:1, else the smallest world of horovod, else the smallest)",
    )  # fmt: skip
    _add_projection(parser)
    return parser


def _add_projection(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "projection", "Project to more devices (docs/evidence/scaling.md). Needs --gbps or --doctor."
    )
    add = group.add_argument
    add("--gbps", type=float, nargs="+", metavar="N", limits=POSITIVE,
        help="Network bandwidths, in gigabits/s. (default: none)")  # fmt: skip
    add("--latency_us", type=float, default=20.0, limits=NOT_NEGATIVE, metavar="N",
        help="Network latency per message, in microseconds. (default: %(default)g)")  # fmt: skip
    add("--doctor", type=Path, metavar="FILE",
        help="Output of `hvd-bert doctor --json`, instead of --gbps. (default: none)")  # fmt: skip
    add("--gpus_per_node", type=int, default=1, limits=Limits(minimum=1), metavar="N",
        help="GPUs that share a node's network. (default: %(default)s)")  # fmt: skip
    add("--inner_gbps", type=float, limits=POSITIVE, metavar="N",
        help="Bandwidth between a node's GPUs, in gigabits/s; --gpus_per_node needs it. (default: none)")  # fmt: skip
    add("--inner_latency_us", type=float, default=5.0, limits=NOT_NEGATIVE, metavar="N",
        help="Latency between a node's GPUs, in microseconds. (default: %(default)g)")  # fmt: skip
    add("--parameters", type=int, metavar="N", limits=Limits(minimum=1),
        help="Number of weights of the model. (default: as the run recorded)")  # fmt: skip
    add("--backward_share", type=float, limits=Limits(minimum=0, maximum=1), metavar="X",
        help="Share of the backward pass in the computation. (default: 2/3)")  # fmt: skip
    add("--ns_per_weight", type=float, default=NS_PER_WEIGHT, limits=NOT_NEGATIVE, metavar="N",
        help="Fixed cost of averaging gradients, in ns per step and weight. (default: %(default)g)")  # fmt: skip
    add("--fusion_mb", type=float, default=128.0, limits=POSITIVE, metavar="N",
        help="HOROVOD_FUSION_THRESHOLD, in MiB. (default: %(default)g)")  # fmt: skip
    add("--cycle_ms", type=float, default=1.0, limits=POSITIVE, metavar="N",
        help="HOROVOD_CYCLE_TIME, in ms. (default: %(default)g)")  # fmt: skip
    add("--most_devices", type=int, default=MAX_DEVICES, limits=Limits(minimum=1), metavar="N",
        help="Largest number of devices to project to. (default: %(default)s)")  # fmt: skip


def check(flags: argparse.Namespace) -> None:
    """Raise UserError for flags that need others."""
    if (flags.gpus_per_node > 1) != (flags.inner_gbps is not None):
        raise UserError(
            "--gpus_per_node and --inner_gbps need each other: GPUs per node, and the bandwidth between them."
        )
    for name in ("inner_gbps", "parameters", "backward_share"):
        if getattr(flags, name) is not None and not flags.gbps and not flags.doctor:
            raise UserError(f"--{name} is for the projection, which needs a bandwidth: add --gbps N or --doctor FILE.")
