"""The link between the two nodes, as slow as one wants it: tc's token bucket, and a wire with a delay."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from harness import FOLDER, HOSTS, Cluster

QUEUE_MS = 20  # of packets that wait for the bucket; what is beyond is lost, as in a switch
MIN_BURST = 128 * 1024  # bytes: two bunches of TCP's segments
TIMER_S = 250e-6  # within which the kernel looks at the bucket again, with room


@contextmanager
def shaped(cluster: Cluster, gbps: float, latency_ms: float = 0.0) -> Iterator[None]:
    """What a node sends to the other: at most `gbps` gigabits per second, each packet `latency_ms` later.

    On every way out the link is again as it was. Connections that are open stay so.
    """
    if latency_ms:
        with _wire(cluster, latency_ms), _rate(cluster, "wire", gbps):
            yield
    else:
        with _rate(cluster, "eth0", gbps):
            yield


@contextmanager
def _rate(cluster: Cluster, device: str, gbps: float) -> Iterator[None]:
    burst = max(MIN_BURST, round(gbps * 1e9 / 8 * TIMER_S))
    bucket = f"rate {gbps:g}gbit burst {burst} latency {QUEUE_MS}ms"
    try:
        for host in HOSTS:
            cluster.on(host, f"tc qdisc replace dev {device} root tbf {bucket}", FOLDER, timeout=30).expect(0)
        yield
    finally:
        for host in HOSTS:
            cluster.on(host, f"tc qdisc delete dev {device} root", FOLDER, timeout=30)


@contextmanager
def _wire(cluster: Cluster, latency_ms: float) -> Iterator[None]:
    line = [sys.executable, str(FOLDER / "delay_line.py"), f"{latency_ms:g}"]
    process = subprocess.Popen(
        ["bash", str(FOLDER / "on.sh"), "login", *line],
        env=os.environ | {"HVD_BERT_CLUSTER": str(cluster.state)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"delay_line.py ended with status {process.wait(30)}")
        yield
    finally:
        process.stdin.close()  # by which it ends
        process.wait(30)
        process.stdout.close()
