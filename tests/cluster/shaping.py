"""Limit the rate of the link between the two nodes and add a delay, for tests, benchmarks and experiments.

    python tests/cluster/shaping.py 1 0.5        1 Gb/s and a delay of 0.5 ms per packet, until standard input ends
    python tests/cluster/shaping.py 1 0.5 0.3    in addition, three of ten packets are lost

Prints "ready" once the link is shaped. The cluster in the folder HVD_BERT_CLUSTER must be up (up.sh).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NODES = ("a100-01", "a100-02")
QUEUE_MS = 20  # packets that would wait longer are dropped, as by a switch
MIN_BURST = 128 * 1024  # bytes: two bunches of TCP segments
TIMER_S = 250e-6  # upper bound of the interval at which the kernel refills the bucket
COMMAND_TIMEOUT_S = 30.0


@contextmanager
def shaped(cluster: Path, gbps: float, latency_ms: float = 0.0, loss: float = 0.0) -> Iterator[None]:
    """Context manager: limit each node to `gbps` Gb/s, and delay packets by `latency_ms`.

    `loss`: probability that a packet is dropped. `cluster`: folder of a running cluster. Connections remain open. On
    exit, also after an error, restores the link.
    """
    environ = os.environ | {"HVD_BERT_CLUSTER": str(cluster)}
    if latency_ms or loss:
        with _wire(environ, latency_ms, loss), _rate(environ, "wire", gbps):
            yield
    else:
        with _rate(environ, "eth0", gbps):
            yield


def _command(host: str, *words: str) -> list[str]:
    return ["bash", str(FOLDER / "on.sh"), host, *words]


@contextmanager
def _rate(environ: dict[str, str], device: str, gbps: float) -> Iterator[None]:
    burst = max(MIN_BURST, round(gbps * 1e9 / 8 * TIMER_S))
    bucket = f"rate {gbps:g}gbit burst {burst} latency {QUEUE_MS}ms".split()
    qdisc = ("tc", "qdisc")
    try:
        for host in NODES:
            replace = _command(host, *qdisc, "replace", "dev", device, "root", "tbf", *bucket)
            subprocess.run(replace, env=environ, check=True, timeout=COMMAND_TIMEOUT_S)
        yield
    finally:
        for host in NODES:
            delete = _command(host, *qdisc, "delete", "dev", device, "root")
            subprocess.run(delete, env=environ, check=False, timeout=COMMAND_TIMEOUT_S)


@contextmanager
def _wire(environ: dict[str, str], latency_ms: float, loss: float) -> Iterator[None]:
    command = _command("login", sys.executable, str(FOLDER / "delay_line.py"), f"{latency_ms:g}", f"{loss:g}")
    process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"delay_line.py ended with status {process.wait(COMMAND_TIMEOUT_S)}")
        yield
    finally:
        process.stdin.close()  # ends the process
        try:
            process.wait(COMMAND_TIMEOUT_S)
        finally:
            process.kill()
            process.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Shape the link between the two nodes until standard input ends.")
    parser.add_argument("gbps", type=float, help="rate of each node, in gigabits per second")
    parser.add_argument("latency_ms", type=float, nargs="?", default=0.0, help="delay of each packet (default: none)")
    parser.add_argument("loss", type=float, nargs="?", default=0.0, help="share of the packets lost (default: none)")
    flags = parser.parse_args()
    cluster = Path(os.environ.get("HVD_BERT_CLUSTER", "/tmp/hvd_bert_cluster"))
    with shaped(cluster, flags.gbps, flags.latency_ms, flags.loss):
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
