"""A wire between the two nodes, with a delay, for kernels without tc's netem: delay_line.py MILLISECONDS

Both nodes get a device `wire`, by which they reach each other from then on: a packet that one sends is handed to the
other so much later. The rate is tc's to set, on that device. It ends when its standard input does, and the devices go
with it, routes and qdiscs and all. Runs on the login host, as root; says "ready".
"""

from __future__ import annotations

import contextlib
import fcntl
import os
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
LONGEST = 66_000  # bytes: TCP's segments come in bunches of up to 64 KiB, which go through as one
BUNCHES = 8  # taken in before it looks again at what is due
NODES = {"a100-01": "10.77.0.11", "a100-02": "10.77.0.12"}


def open_end(own: str, other: str) -> int:
    """Make the device of a node, whose name is `own`. Returns the file that its packets go through."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", b"wire", IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(end, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    node = (Path(os.environ["HVD_BERT_CLUSTER"]) / "nodes" / own / "pid").read_text().strip()
    inside = ["nsenter", "--target", node, "--net"]
    for command in (
        ["ip", "link", "set", "wire", "netns", node],
        [*inside, "ip", "link", "set", "wire", "up"],
        [*inside, "ip", "route", "add", NODES[other], "dev", "wire", "src", NODES[own]],
    ):
        subprocess.run(command, check=True)
    return end


def carry(ends: list[int], delay_s: float) -> None:
    """From each end to the other, until standard input ends."""
    first, second = ends
    held: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}  # by where they come out
    across = {first: second, second: first}
    while True:
        due = [packets[0][0] for packets in held.values() if packets]
        timeout = max(0.0, min(due) - time.monotonic()) if due else None
        for file in select.select([*ends, sys.stdin], [], [], timeout)[0]:
            if file is sys.stdin:
                return
            with contextlib.suppress(BlockingIOError):
                for _ in range(BUNCHES):
                    packet = os.read(file, LONGEST)
                    held[across[file]].append((time.monotonic() + delay_s, packet))
        now = time.monotonic()
        for end, packets in held.items():
            while packets and packets[0][0] <= now:
                os.write(end, packets.popleft()[1])


def main() -> None:
    delay_s = float(sys.argv[1]) * 1e-3
    first, second = NODES
    ends = [open_end(first, second), open_end(second, first)]
    # The ranks keep every core busy; a wire has no need to wait for them.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print("ready", flush=True)
    carry(ends, delay_s)


if __name__ == "__main__":
    main()
