"""Delay packets between the two nodes, for kernels without tc's netem: delay_line.py MILLISECONDS [LOSS]

LOSS: the share of packets that are lost at random (default: 0). Both nodes get a device `wire`, by which they reach
each other. Packets arrive after the delay. tc can limit the rate of the device. The program ends when standard input
ends, and removes the devices with their routes and qdiscs. Runs on the login host as root; prints "ready".
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

# linux/if_tun.h
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
LONGEST = 66_000  # bytes: TCP segments arrive in bunches of up to 64 KiB
BUNCHES = 8  # maximum number of packets that are read before due packets are sent
NODES = {"a100-01": "10.77.0.11", "a100-02": "10.77.0.12"}


def open_end(node: str, other: str, loss: float) -> int:
    """Create a node's device. Returns the file descriptor that reads and writes its packets."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", b"wire", IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    if not loss:  # with offloading, a lost packet would be a whole bunch of segments
        fcntl.ioctl(end, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    pid = (Path(os.environ["HVD_BERT_CLUSTER"]) / "nodes" / node / "pid").read_text().strip()
    inside = ["nsenter", "--target", pid, "--net"]
    for command in (
        ["ip", "link", "set", "wire", "netns", pid],
        [*inside, "ip", "link", "set", "wire", "up"],
        [*inside, "ip", "route", "add", NODES[other], "dev", "wire", "src", NODES[node]],
    ):
        subprocess.run(command, check=True)
    return end


def carry(ends: list[int], delay_s: float, loss: float) -> None:
    """Carry packets from each end to the other end until standard input ends."""
    first, second = ends
    queues: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}  # destination -> packets
    across = {first: second, second: first}
    while True:
        due = [packets[0][0] for packets in queues.values() if packets]
        timeout = max(0.0, min(due) - time.monotonic()) if due else None
        for file in select.select([*ends, sys.stdin], [], [], timeout)[0]:
            if file is sys.stdin:
                return
            with contextlib.suppress(BlockingIOError):
                for _ in range(BUNCHES):
                    packet = os.read(file, LONGEST)
                    if loss and random.random() < loss:
                        continue
                    queues[across[file]].append((time.monotonic() + delay_s, packet))
        now = time.monotonic()
        for end, packets in queues.items():
            while packets and packets[0][0] <= now:
                os.write(end, packets.popleft()[1])


def main() -> None:
    delay_s = float(sys.argv[1]) * 1e-3
    loss = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    first, second = NODES
    ends = [open_end(first, second, loss), open_end(second, first, loss)]
    # Use real-time priority: the ranks use all cores, and the device must not wait for a core.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print("ready", flush=True)
    carry(ends, delay_s, loss)


if __name__ == "__main__":
    main()
