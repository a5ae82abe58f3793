"""Train on the test cluster with Horovod's timeline, and analyze it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import FOLDER, Cluster, Environment
from launch import REPOSITORY

ONE_HOST, FOUR_RANKS = "a100-01:2", "a100-01:2,a100-02:2"
# Six layers with new weights. Their gradients are 44 MB.
SIX_LAYERS = "--config sweep --dropout 0 --num_threads 1 --no_do_eval --save_steps 0 --logging_steps 1 --output_dir out"


def count_slots(hosts: str) -> int:
    """The number of ranks in a value of horovodrun's -H."""
    return sum(int(host.split(":")[1]) for host in hosts.split(","))


def horovodrun(hosts: str, controller: str, program: str) -> str:
    """The command that starts ranks on these hosts."""
    interface = " --network-interfaces eth0" if controller == "gloo" and "," in hosts else ""
    return f"horovodrun -np {count_slots(hosts)} -H {hosts} --{controller}{interface} python {program}"


def six_layers(hosts: str, steps: int, windows: int = 16, more: str = "") -> str:
    """Flags of the trainer on these hosts; `windows`: the global batch."""
    return f"{SIX_LAYERS} --max_steps {steps} --per_device_train_batch_size {windows // count_slots(hosts)}{more}"


def recorded(
    cluster: Cluster, folder: Path, hosts: str, controller: str, flags: str, slowed: Environment | None = None
) -> dict[str, Any]:
    """Train in `folder`. Returns the object that `hvd-bert timeline --json` prints.

    `slowed`: environment for altered.py; the trainer's own flags then record all steps except the first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    timeline = folder / "timeline.json"
    program = f"{FOLDER / ('altered.py' if slowed else 'ahead.py')} -m hvd_bert.train"
    if slowed:
        flags += f" --timeline_file {timeline} --timeline_steps 2:100000"
    env = slowed or {"HOROVOD_TIMELINE": str(timeline)}
    cluster.on("a100-01", f"{horovodrun(hosts, controller, program)} {flags}", folder, env).expect(0)
    command = [sys.executable, "-m", "hvd_bert.tools.timeline", str(timeline), "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True)
    record: dict[str, Any] = json.loads(done.stdout)
    return record
