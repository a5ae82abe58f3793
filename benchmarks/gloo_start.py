"""Measures how the ranks of Horovod find each other over Gloo: `hvd.init` on many ranks of one machine.

    python benchmarks/gloo_start.py --ranks 2 4 8 16 32 64
    python benchmarks/gloo_start.py --ranks 32 --apart 40 --timeout 30

Imports Horovod once and forks the ranks, so that only their rendezvous is measured: each rank stores its addresses with
the launcher's key-value server and asks it for those of all others. `--apart`: seconds between the first rank's start
and the last one's. Prints a table of CPU times, requests to the server, and ranks that failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Sequence

import horovod.torch as hvd
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
from shared import markdown_table

HEAD = ["ranks", "s", "CPU per rank, s", "CPU of the server, s", "requests", "requests per rank", "failed ranks"]


class CountingHandler(RendezvousHandler):  # type: ignore[misc]  # Horovod has no types
    """Horovod's, which counts the requests."""

    requests = 0

    def do_GET(self) -> None:
        """A rank asks for a key, again and again until it is there."""
        CountingHandler.requests += 1
        super().do_GET()

    def do_PUT(self) -> None:
        """A rank stores its addresses."""
        CountingHandler.requests += 1
        super().do_PUT()


def rank_main(rank: int, ranks: int, port: int, delay_s: float) -> None:
    """Join the world as horovodrun's ranks do, in a forked process. Does not return."""
    names = {"RANK": rank, "SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_SIZE": ranks, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in names.items()})
    os.environ.update(
        HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo", HOROVOD_GLOO_IFACE="lo", HOROVOD_HOSTNAME="localhost",
        HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.1", HOROVOD_GLOO_RENDEZVOUS_PORT=str(port),
    )  # fmt: skip
    status = 1
    try:
        time.sleep(delay_s)
        hvd.init()
        status = 0 if hvd.size() == ranks else 1
        hvd.shutdown()
    finally:
        os._exit(status)


def start(ranks: int, apart_s: float) -> list[str]:
    """A row of the table."""
    server = RendezvousHTTPServer(("127.0.0.1", 0), CountingHandler, verbose=0)
    server.init([])
    CountingHandler.requests = 0
    begin, own = time.perf_counter(), time.process_time()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            rank_main(rank, ranks, server.server_port, apart_s * rank / max(1, ranks - 1))
        children.append(child)
    threading.Thread(target=server.serve_forever, daemon=True).start()  # not before the forks
    used, failed = 0.0, 0
    for child in children:
        _, status, usage = os.wait4(child, 0)
        used += usage.ru_utime + usage.ru_stime
        failed += status != 0
    seconds, cpu = time.perf_counter() - begin, time.process_time() - own
    server.shutdown()
    server.server_close()
    cells = [f"{seconds:.1f}", f"{used / ranks:.2f}", f"{cpu:.2f}", str(CountingHandler.requests)]
    return [str(ranks), *cells, f"{CountingHandler.requests / ranks:.0f}", str(failed)]


def main(argv: Sequence[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Measure Horovod's start over Gloo on many ranks.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], help="(default: %(default)s)")
    parser.add_argument("--apart", type=float, default=0.0, help="Seconds over which the ranks start. (default: 0)")
    parser.add_argument("--timeout", type=int, default=30, help="HOROVOD_GLOO_TIMEOUT_SECONDS (default: %(default)s)")
    args = parser.parse_args(argv)
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(args.timeout)
    print(markdown_table(HEAD, [start(ranks, args.apart) for ranks in args.ranks]))


if __name__ == "__main__":
    main(sys.argv[1:])
