"""Run commands and jobs on the hosts of the test cluster (up.sh), each with a time limit."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fork_server import start as fork_server
from launch import REPOSITORY, Outcome, environment, programs, run
from processes import TOKEN

FOLDER = Path(__file__).resolve().parent
JOB_SCRIPT = REPOSITORY / "scripts" / "hvd.slurm"
# Far more than the 15 to 25 s that a test needs on two idle cores.
TIMEOUT_S = float(os.environ.get("HVD_BERT_TEST_TIMEOUT_S", "190")) * 2
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
HOSTS = ["a100-01", "a100-02"]
CANNOT_RUN_HERE = 3
# (rank, host, local rank, device) of four ranks on both hosts
RANK_INFOS = [(0, "a100-01", 0, "cpu"), (1, "a100-01", 1, "cpu"), (2, "a100-02", 0, "cpu"), (3, "a100-02", 1, "cpu")]
SMALL = "--config sample --max_train_samples 64 --max_eval_samples 8 --dropout 0 --logging_steps 1 --max_steps"

Environment = Mapping[str, "str | None"]


@dataclass(frozen=True)
class Ended:
    """A finished job, with its state, exit status and logs."""

    id: str
    state: str
    status: int
    out: str
    err: str
    seconds: float

    def __str__(self) -> str:
        return f"job {self.id}: {self.state}, status {self.status}, {self.seconds:.0f} s\n{self.out}\n--\n{self.err}"

    def expect(self, status: int) -> Ended:
        """Fail the test with both logs unless the job exited with `status`."""
        if self.status != status or self.state not in ("COMPLETED", "FAILED"):
            pytest.fail(f"expected status {status}\n{self}", pytrace=False)
        return self


def new_environment(folder: Path, python: str) -> Path:
    """Make an environment in which `python` runs these shell commands. Returns its folder of programs."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    (programs / "python").write_text(f"#!/usr/bin/env bash\n{python}\n")
    (programs / "python").chmod(0o755)
    (programs / "activate").write_text(f"PATH={programs}:$PATH\n")
    return programs


def script(name: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script of this folder. `env`: additional environment variables."""
    command = ["bash", str(FOLDER / name), *arguments]
    environ = os.environ | env
    return subprocess.run(command, env=environ, text=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=180)


@contextmanager
def started_cluster(**options: str) -> Iterator[Cluster]:
    """Context manager: start a cluster in a new folder with a short path for sockets. `options`: up.sh's variables.

    Skips the test if the cluster cannot run here. The cluster also stops if this process is killed.
    """
    state = Path(f"/tmp/hvd_{uuid.uuid4().hex[:8]}")
    try:
        started = script("up.sh", "--owner", str(os.getpid()), HVD_BERT_CLUSTER=str(state), **options)
        if started.returncode == CANNOT_RUN_HERE:
            pytest.skip(started.stderr.strip())
        assert started.returncode == 0, started.stderr
        yield Cluster(state)
    finally:
        script("down.sh", HVD_BERT_CLUSTER=str(state)).check_returncode()
    assert not state.exists()


class Cluster:
    """The running cluster. `state`: the cluster's folder. `local`: a path at which each node has a separate disk."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.local = state / "local"

    def serve_commands(self) -> subprocess.Popen[str]:
        """Start and return a process that forks the Python commands of all hosts (tests/fork_server)."""
        outer = int((self.state / "unshare.pid").read_text())
        first = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0]
        environ = environment() | {"HVD_BERT_CLUSTER": str(self.state)}
        return fork_server.start(programs(), environ, ["login", *HOSTS], int(first))

    def on(
        self, host: str, command: str | list[str], cwd: Path, env: Environment | None = None, timeout: float = TIMEOUT_S
    ) -> Outcome:
        """Run a command on a host in the folder `cwd`. The fork server runs its `python` and `horovodrun`."""
        words = shlex.split(command) if isinstance(command, str) else command
        environ = {"HVD_BERT_VENV": str(programs().parent), "HVD_BERT_CLUSTER": str(self.state)}
        environ |= {"PATH": f"{programs()}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
        environ |= env or {}
        return run(["bash", FOLDER / "on.sh", host, *words], cwd, env=environ, timeout=timeout)

    def submit(self, arguments: str | list[str], cwd: Path, env: Environment | None = None) -> str:
        """Run `sbatch ARGUMENTS` on the login host. Returns the job's id."""
        words = shlex.split(arguments) if isinstance(arguments, str) else arguments
        # Not the mark of sbatch's descendants in the job's environment: `run` would kill a job that starts at once.
        sbatch = ["env", f"--unset={TOKEN}", "sbatch", "--parsable"]
        outcome = self.on("login", [*sbatch, *words], cwd, env, timeout=60).expect(0)
        return outcome.output.strip().splitlines()[-1].split(";")[0]

    def show(self, job: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        text = self.on("login", ["scontrol", "--oneliner", "show", "job", job], self.state, timeout=60).expect(0).output
        return dict(re.findall(r"(\w+)=(\S*)", text.splitlines()[0]))

    def wait(self, job: str, *states: str, restarts: int = 0, timeout: float = TIMEOUT_S) -> dict[str, str]:
        """Wait until the job is in one of `states` (default: any final state). Returns the job's fields.

        Fails the test, and cancels the job, if this takes longer than `timeout` s or the job ends in another state.
        `restarts`: minimum number of requeues.
        """
        deadline = time.monotonic() + timeout
        while True:
            facts = self.show(job)
            if facts["JobState"] in (states or FINAL) and int(facts["Restarts"]) >= restarts:
                return facts
            if time.monotonic() > deadline or facts["JobState"] in FINAL:
                self.on("login", ["scancel", "--full", job], self.state, timeout=60)
                logs = [Path(facts[name]) for name in ("StdOut", "StdErr")]
                texts = "\n".join(path.read_text() for path in logs if path.exists())
                pytest.fail(f"job {job} is {facts['JobState']}, not {states or FINAL}\n{texts}", pytrace=False)
            time.sleep(0.2)  # polls until the deadline

    def ended(self, job: str, timeout: float = TIMEOUT_S) -> Ended:
        """Wait for the end of a job, and return its result."""
        start = time.monotonic()
        facts = self.wait(job, timeout=timeout)
        out, err = (Path(facts[name]).read_text() for name in ("StdOut", "StdErr"))
        status = int(facts["ExitCode"].split(":")[0])
        return Ended(job, facts["JobState"], status, out, err, time.monotonic() - start)


def results(folder: Path) -> dict[str, Any]:
    """Read train_results.json of a run. Fails if the run was not evaluated."""
    assert (folder / "eval_results.json").exists()
    found: dict[str, Any] = json.loads((folder / "train_results.json").read_text())
    return found


def listening(folder: Path, rank: int) -> set[tuple[str, str]]:
    """Return pairs of listening program and interface on a rank's host, without the cluster's daemons."""
    found = set()
    for program, address in json.loads((folder / str(rank)).read_text()):
        interface = "loopback" if address.startswith("127.") else "eth0" if address.startswith("10.77.0.") else "all"
        found.add((program, interface))
    return {(program, interface) for program, interface in found if program not in ("sshd", "slurmd")}
