"""The analysis of timelines with a slow link or a slow rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import SMALL, Cluster
from launch import SAMPLE
from recorded import FOUR_RANKS, ONE_HOST, recorded, six_layers
from shaping import shaped

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="the delay needs /dev/net/tun"),
]
GBPS, LATENCY_MS = 1.0, 1.0
SLOW_GBPS = 0.1  # slow enough to limit four ranks that share two cores, also with other tests
SLOWED_S = 1.0  # far longer than a rank waits for a core


@pytest.fixture
def narrow(tmp_path: Path) -> str:
    """Flags for a model whose gradients, 12 MB in one message, take 1 s: far longer than a rank waits for a core."""
    model = tmp_path / "narrow.json"
    config = json.loads((SAMPLE / "six_layers.json").read_text())
    model.write_text(json.dumps(config | {"hidden_size": 192, "intermediate_size": 768}))
    return f" --config_name {model} --deterministic"


def test_a_slow_link_is_found(cluster: Cluster, tmp_path: Path, narrow: str) -> None:
    flags = six_layers(ONE_HOST, 6, windows=4, more=narrow)
    loopback = recorded(cluster, tmp_path / "loopback", ONE_HOST, "mpi", flags)
    with shaped(cluster.state, SLOW_GBPS, LATENCY_MS):
        flags = six_layers(FOUR_RANKS, 7, windows=4, more=narrow)
        slow = recorded(cluster, tmp_path / "slow", FOUR_RANKS, "mpi", flags)
    assert (loopback["ranks"], slow["ranks"]) == (2, 4)
    # MPI sums inside the hosts first. Other tests on these cores make messages slower, never faster than the link.
    assert 0.4 < slow["fast_bytes_per_s"] * 8e-9 / SLOW_GBPS < 1.15
    # The lower bound also falls when a busy core makes a tensor ready while the others are already sent.
    assert slow["step"]["exposed_most_share"] > 2 * loopback["step"]["exposed_most_share"]
    assert any("messages: bandwidth." in line for line in slow["advice"]), slow["advice"]


def test_a_straggler_is_named(cluster: Cluster, tmp_path: Path) -> None:
    rank = 0
    env = {"SLOWED_RANK": str(rank), "SLOWED_S": str(SLOWED_S)}
    flags = f"{SMALL} 14 --per_device_train_batch_size 4 --no_do_eval --output_dir out"
    with shaped(cluster.state, GBPS, LATENCY_MS):
        seen = recorded(cluster, tmp_path, FOUR_RANKS, "gloo", flags, env)
    row = seen["rank_rows"][rank]
    assert row["of_steps"] >= 10 and row["steps"] >= 0.9 * row["of_steps"]
    assert row["median_s"] == pytest.approx(SLOWED_S, rel=0.4)  # the ranks share two cores
    assert any(line.startswith(f"Rank {rank} is a straggler") for line in seen["advice"]), seen["advice"]
