"""The two hosts of tests/cluster, by its scripts: commands on them, a shaped link, trainings of six layers."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shared import REPOSITORY

SCRIPTS = REPOSITORY / "tests" / "cluster"
ONE_HOST, TWO_HOSTS, FOUR_RANKS = "a100-01:2", "a100-01:1,a100-02:1", "a100-01:2,a100-02:2"
# Six layers with new weights. Their gradients are 44 MB.
SIX_LAYERS = "--config sweep --dropout 0 --num_threads 1 --no_do_eval --save_steps 0 --logging_steps 1 --output_dir out"
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Shape:
    """The link's rate and delay; `gbps` None: unshaped."""

    gbps: float | None = None
    latency_ms: float = 0.0

    def __str__(self) -> str:
        return "unshaped" if self.gbps is None else f"{self.gbps:g} Gb/s, {self.latency_ms:g} ms"


@dataclass(frozen=True)
class Cluster:
    """The cluster that is up, with its folder."""

    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """Of all commands: this Python environment, on CPUs, one thread per rank."""
        environ = os.environ | {"HVD_BERT_CLUSTER": str(self.folder), "PYTHONPATH": str(REPOSITORY)}
        environ |= {"PATH": f"{Path(sys.executable).parent}:{environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
        environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return environ | {"OMP_NUM_THREADS": "1"}

    def run(self, command: str, folder: Path, more: Mapping[str, str] | None = None) -> str:
        """Run a command on the first host, in `folder`, and return its standard output. Fails with all its output."""
        words = ["bash", str(SCRIPTS / "on.sh"), "a100-01", *shlex.split(command)]
        done = subprocess.run(
            words, cwd=folder, env=self.environ | dict(more or {}), timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{done.stdout}\n{done.stderr}\n{command}: status {done.returncode}")
        return done.stdout

    @contextmanager
    def shaped(self, shape: Shape) -> Iterator[None]:
        """Inside, the link between the hosts has this shape."""
        if shape.gbps is None:
            yield
            return
        command = [sys.executable, str(SCRIPTS / "shaping.py"), f"{shape.gbps:g}", f"{shape.latency_ms:g}"]
        with subprocess.Popen(
            command, env=self.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as shaping:
            assert shaping.stdin and shaping.stdout
            if shaping.stdout.readline() != "ready\n":
                raise SystemExit(f"{shlex.join(command)} failed: the link was not shaped.")
            try:
                yield
            finally:
                shaping.stdin.close()  # the program restores the link and ends


@contextmanager
def cluster_up() -> Iterator[Cluster]:
    """A cluster of our own, which goes down in any case."""
    folder = Path(f"/tmp/hvd_bench_{os.getpid()}")
    environ = os.environ | {"HVD_BERT_CLUSTER": str(folder)}
    up = ["bash", str(SCRIPTS / "up.sh"), "--owner", str(os.getpid())]
    if subprocess.run(up, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit("The cluster did not start; the reason is above.")
    try:
        yield Cluster(folder)
    finally:
        subprocess.run(["bash", str(SCRIPTS / "down.sh"), "--quiet"], env=environ, check=True)


def ranks_of(hosts: str) -> int:
    """The number of ranks in a value of horovodrun's -H."""
    return sum(int(host.split(":")[1]) for host in hosts.split(","))


def horovodrun(hosts: str, controller: str, program: str) -> str:
    """The command that starts ranks on these hosts."""
    interface = " --network-interfaces eth0" if controller == "gloo" and "," in hosts else ""
    return f"horovodrun -np {ranks_of(hosts)} -H {hosts} --{controller}{interface} python {program}"


def six_layers(hosts: str, steps: int, windows: int = 16, more: str = "") -> str:
    """Flags of the trainer on these hosts; `windows`: the global batch."""
    return f"{SIX_LAYERS} --max_steps {steps} --per_device_train_batch_size {windows // ranks_of(hosts)}{more}"
