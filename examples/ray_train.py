"""Fine-tune BERT on the workers of Ray Train, which are the ranks of Ray's process group.

    python examples/ray_train.py 2 config=sample output_dir=runs/ray        NAME=VALUE for the trainer's --NAME VALUE

By default there are 2 workers, and the output folder is runs/ray. On several hosts, the output folder and the data must
have the same paths on all hosts.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

from hvd_bert import train
from hvd_bert.config.parser import name_or_path


def train_on_worker(settings: dict[str, Any]) -> None:
    run = train(**settings)
    ray.train.report(run.scores)


def setting(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r}: write each setting as NAME=VALUE")
    return name, os.path.abspath(name_or_path(value)) if name == "output_dir" else value


def main(*words: str) -> None:
    parser = argparse.ArgumentParser(description="Fine-tune BERT on the workers of Ray Train.")
    parser.add_argument("workers", type=int, nargs="?", default=2, help="number of workers (default: %(default)s)")
    parser.add_argument("settings", metavar="NAME=VALUE", type=setting, nargs="*", help="the trainer's --NAME VALUE")
    flags = parser.parse_args(words)
    settings = {"strategy": "ddp", "output_dir": os.path.abspath("runs/ray"), **dict(flags.settings)}
    ray.init(include_dashboard=False)
    has_gpus = ray.cluster_resources().get("GPU", 0) >= flags.workers
    scaling = ScalingConfig(num_workers=flags.workers, use_gpu=has_gpus)
    TorchTrainer(train_on_worker, train_loop_config=settings, scaling_config=scaling).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
