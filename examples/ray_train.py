"""Fine-tune BERT on the workers of Ray Train, which are the ranks of Ray's process group.

    python examples/ray_train.py 2 config=sample output_dir=runs/ray        NAME=VALUE for the trainer's --NAME VALUE

By default there are 2 workers, and the output folder is runs/ray. On several hosts, the output folder and the data must
have the same paths on all hosts.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

from hvd_bert import train


def train_on_worker(settings: dict[str, Any]) -> None:
    run = train(**settings)
    ray.train.report(run.scores)


def main(workers: str = "2", *words: str) -> None:
    settings = {"strategy": "ddp", "output_dir": "runs/ray", **dict(word.split("=", 1) for word in words)}
    settings["output_dir"] = os.path.abspath(settings["output_dir"])
    ray.init(include_dashboard=False)
    has_gpus = ray.cluster_resources().get("GPU", 0) >= int(workers)
    scaling = ScalingConfig(num_workers=int(workers), use_gpu=has_gpus)
    TorchTrainer(train_on_worker, train_loop_config=settings, scaling_config=scaling).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
