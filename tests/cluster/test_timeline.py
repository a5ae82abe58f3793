"""`hvd-bert timeline` finds a slow link and a slow rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import FOLDER, SMALL, Cluster, Environment
from launch import REPOSITORY, SAMPLE
from shaping import shaped

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="the delay needs /dev/net/tun"),
]
ONE_HOST, FOUR_RANKS = "a100-01:2", "a100-01:2,a100-02:2"
NARROW = "--config sweep --dropout 0 --num_threads 1 --no_do_eval --save_steps 0 --logging_steps 1 --output_dir out"
GBPS, LATENCY_MS = 1.0, 1.0
SLOW_GBPS = 0.1  # slow enough to limit four ranks that share two cores with other tests
SLOWED_S = 1.0  # far longer than a rank waits for a core


def horovodrun(hosts: str, controller: str, program: str) -> str:
    """Return the command that starts two ranks per host."""
    interface = " --network-interfaces eth0" if controller == "gloo" else ""
    return f"horovodrun -np {2 * len(hosts.split(','))} -H {hosts} --{controller}{interface} python {program}"


def recorded(
    cluster: Cluster, folder: Path, hosts: str, controller: str, flags: str, slowed: Environment | None = None
) -> dict[str, Any]:
    """Train in `folder`. Returns the object that `hvd-bert timeline --json` prints.

    `slowed`: environment variables for altered.py; with them, the trainer records all steps except the first.
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


@pytest.fixture
def narrow(tmp_path: Path) -> str:
    """Flags for a model of six narrow layers.

    At SLOW_GBPS, its 12 MB of gradients take 1 s, longer than a rank waits for a core.
    """
    model = tmp_path / "narrow.json"
    config = json.loads((SAMPLE / "six_layers.json").read_text())
    model.write_text(json.dumps(config | {"hidden_size": 192, "intermediate_size": 768}))
    return f"{NARROW} --config_name {model} --deterministic --global_batch 4"


def test_a_slow_link_is_found(cluster: Cluster, tmp_path: Path, narrow: str) -> None:
    loopback = recorded(cluster, tmp_path / "loopback", ONE_HOST, "mpi", f"{narrow} --max_steps 6")
    with shaped(cluster.state, SLOW_GBPS, LATENCY_MS):
        slow = recorded(cluster, tmp_path / "slow", FOUR_RANKS, "mpi", f"{narrow} --max_steps 7")
    assert (loopback["ranks"], slow["ranks"]) == (2, 4)
    # Each byte crosses the link once, because MPI reduces inside each host first. The lower bound is loose, because
    # other tests slow messages down.
    assert 0.4 < slow["fast_bytes_per_s"] * 8e-9 / SLOW_GBPS < 1.15
    # Compare upper bounds of the exposed share. The lower bound also shrinks if a busy core computes a tensor after the
    # others are sent.
    assert slow["step"]["exposed_most_share"] > 2 * loopback["step"]["exposed_most_share"]
    assert any("messages: bandwidth." in line for line in slow["advice"]), slow["advice"]


def test_a_straggler_is_named(cluster: Cluster, tmp_path: Path) -> None:
    env = {"SLOWED_RANK": "0", "SLOWED_S": str(SLOWED_S)}
    flags = f"{SMALL} 14 --per_device_train_batch_size 4 --no_do_eval --output_dir out"
    with shaped(cluster.state, GBPS, LATENCY_MS):
        seen = recorded(cluster, tmp_path, FOUR_RANKS, "gloo", flags, env)
    row = seen["rank_rows"][0]
    assert row["of_steps"] >= 10 and row["steps"] >= 0.9 * row["of_steps"]
    assert row["median_s"] == pytest.approx(SLOWED_S, rel=0.4)  # not exactly, because the ranks share two cores
    assert any(line.startswith("Rank 0 is a straggler") for line in seen["advice"]), seen["advice"]
