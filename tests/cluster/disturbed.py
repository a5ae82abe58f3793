"""Train on two hosts, with one rank per host, and wait before a step until the test has caused a fault."""

from __future__ import annotations

import json
import os
import select
import shlex
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import FOLDER, SMALL, Cluster
from launch import Outcome

STEPS, SAVE_STEPS, GATE = 12, 4, 7  # the fault is before step 7, three steps after a checkpoint
STALL_S = 20  # the default is 600 s
START_S = 400.0  # maximum time until rank 0 reaches the gate, on a loaded machine
LEFT_S = 60.0  # maximum time from the launcher's end to the ranks' end
TRAIN = f"{FOLDER / 'altered.py'} -m hvd_bert.train {SMALL} {STEPS} --save_steps {SAVE_STEPS} --no_do_eval"
ON_BOTH = "--nodes=2 --ntasks-per-node=1"
AGENTS = f"srun {ON_BOTH} --mpi=none --kill-on-bad-exit=1 --wait=60"
LAUNCHERS = {  # launcher -> host and command
    "mpi": ("login", "horovodrun -np 2 -H a100-01:1,a100-02:1 --mpi python"),
    "gloo": ("a100-01", "horovodrun -np 2 -H a100-01:1,a100-02:1 --gloo --network-interfaces eth0 python"),
    "srun": ("login", f"srun {ON_BOTH} --mpi=pmix --kill-on-bad-exit=1 --wait=60 python"),
    "ddp": (
        "login",
        f"{AGENTS} bash -c 'exec torchrun --nnodes=2 --node-rank=$SLURM_NODEID --nproc-per-node=1"
        """ --master-addr=a100-01 "$@"' bash""",
    ),
    "c10d": (
        "login",
        f"{AGENTS} torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint a100-01:29400",
    ),
}


class Disturbed:
    """A training on two hosts.

    Attributes:
        folder: The folder in which the launcher runs.
        out: The output folder, as the ranks see it.
        host, launch: The launcher's host, and its command up to the Python program.
        env: Additional environment variables of the ranks.
    """

    def __init__(self, cluster: Cluster, folder: Path, launcher: str) -> None:
        self.cluster, self.folder, self.launcher = cluster, folder, launcher
        self.host, self.launch = LAUNCHERS[launcher]
        self.out = folder / "out"
        self.gates = folder / "gates"
        self.gates.mkdir()
        for name in ("reached", "go"):  # named pipes
            os.mkfifo(self.gates / name)
        if "torchrun" in self.launch:
            self._note_agents()
        self.env: dict[str, str | None] = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(STALL_S)}
        self.hosts_environ = os.environ | {"HVD_BERT_CLUSTER": str(cluster.state)}  # for on.sh

    def _note_agents(self) -> None:
        """Record the process id of each host's torchrun in `gates`, so that until_all_end.py waits for it, too."""
        start = self.folder / "noted"
        start.write_text(f'#!/bin/sh\necho $$ >"{self.gates}/torchrun on $(hostname).pid"\nexec "$@"\n')
        start.chmod(0o755)
        self.launch = self.launch.replace(" torchrun ", f" {start} torchrun ")

    def train(self, gate: int = 0, patience_s: float = START_S) -> Outcome:
        """Train to the end, or resume. `gate`: step before which rank 0 waits; 0: never. `patience_s`: time limit."""
        for old in self.gates.glob("*.pid"):
            old.unlink()
        flags = f"--output_dir {self.out}" + (" --strategy ddp" if "torchrun" in self.launch else "")
        words = ["python", str(FOLDER / "until_all_end.py"), str(self.gates), str(LEFT_S), *shlex.split(self.launch)]
        words += [*TRAIN.split(), *flags.split()]
        env = {"GATED_FOLDER": str(self.gates), "GATED_STEP": str(gate), **self.env}
        return self.cluster.on(self.host, words, self.folder, env, timeout=patience_s)

    @contextmanager
    def waiting_at_gate(self, patience_s: float) -> Iterator[Future[Outcome]]:
        """Context manager: start a training, and wait until it reaches the gate. Yields a future of its result."""
        reached = os.open(self.gates / "reached", os.O_RDONLY | os.O_NONBLOCK)
        with ThreadPoolExecutor(1) as pool:
            training = pool.submit(self.train, GATE, START_S + patience_s + LEFT_S)
            deadline = time.monotonic() + START_S
            while not select.select([reached], [], [], 0.5)[0]:
                if training.done() or time.monotonic() > deadline:
                    self.go()
                    pytest.fail(f"did not reach the gate\n{training.result()}", pytrace=False)
            os.close(reached)
            yield training

    def go(self) -> None:
        """Let rank 0 continue with the step at which it waits."""
        go = os.open(self.gates / "go", os.O_RDWR)  # also for reading, so that opening does not wait for a reader
        os.write(go, b"g")

    def pid(self, rank: int) -> int:
        """Return the process id of a rank, as the hosts see it."""
        return int((self.gates / f"{rank}.pid").read_text())

    def on(self, host: str, *words: str | Path) -> str:
        """Run a command on a host. Returns the output."""
        return self.cluster.on(host, [str(word) for word in words], self.folder, timeout=60).expect(0).output


def ends(folder: Path) -> dict[str, float | None]:
    """Read when the launcher and each rank ended, from until_all_end.py's file; None for a process that still runs."""
    path = folder / "ends.json"
    found: dict[str, float | None] = json.loads(path.read_text()) if path.exists() else {"launcher": None}
    return found
