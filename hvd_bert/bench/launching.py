"""Which launcher starts a training of so many ranks here, by which command, and what stands in its way."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_bert import __version__
from hvd_bert.bench.points import ONE_PROCESS, Point
from hvd_bert.distributed.launch import Allocation, find_allocation
from hvd_bert.errors import UserError
from hvd_bert.machine import PACKAGES, cpu_name, version_of

LAUNCHERS = ("auto", "horovodrun", "mpirun", "srun", "torchrun", "none")
TRAIN = (sys.executable, "-m", "hvd_bert.train")
# What a strategy needs beside torch: package -> the line that installs it.
NEEDED = {
    "horovod": ("horovod", "bash env/setup.sh"),
    "deepspeed": ("deepspeed", "bash env/setup.sh --deepspeed"),
}
# Launchers that are programs of their own -> what to do where one is missing.
PROGRAMS = {
    "horovodrun": "`bash env/setup.sh`",
    "mpirun": "`module load openmpi` or `apt-get install openmpi-bin libopenmpi-dev`, then `bash env/setup.sh`",
    "srun": "add the folder of Slurm's commands to PATH",
}


@dataclass(frozen=True)
class Machine:
    """Where the ranks can be: cores and GPUs of this host, the Slurm job around it."""

    cores: int
    gpus: int
    allocation: Allocation | None

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> Machine:
        """What this process may use."""
        return cls(len(os.sched_getaffinity(0)), _count_gpus(), find_allocation(environ))

    def record(self) -> dict[str, object]:
        """This host, for a record of runs."""
        return {"host": socket.gethostname(), "processor": cpu_name(), "cores": self.cores, "gpus": self.gpus}


def _count_gpus() -> int:
    """As the ranks will: torch's count, from a process of its own, since this one does without torch."""
    program = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1:]
    if done.returncode or not last or not last[0].isdigit():
        raise UserError(f"torch cannot be loaded: `bash env/setup.sh`. It said:\n{done.stderr.strip()}")
    return int(last[0])


@dataclass(frozen=True)
class Hosts:
    """horovodrun's and mpirun's -H: HOST:SLOTS,..."""

    text: str

    @property
    def slots(self) -> int:
        """Of all hosts. Raises UserError for what is no list of hosts."""
        total = 0
        for entry in self.text.split(","):
            host, _, count = entry.partition(":")
            if not host or (count and not count.isdigit()) or count == "0":
                raise UserError(f"-H {self.text}: '{entry}' is not HOST:SLOTS.")
            total += int(count or 1)
        return total


@dataclass(frozen=True)
class Launching:
    """The user's choice of launcher, with further words for it, and what it can start on."""

    choice: str
    words: tuple[str, ...]
    hosts: Hosts | None
    machine: Machine

    def check(self) -> None:
        """Raise UserError for a choice that is none here."""
        if self.hosts:
            _ = self.hosts.slots
            if self.choice not in ("auto", "horovodrun", "mpirun"):
                raise UserError(f"-H: --launcher {self.choice} takes no hosts; horovodrun and mpirun do.")
        if self.words and self.choice in ("auto", "none"):
            raise UserError("--launcher_flag: name the launcher that it is for (--launcher).")
        if self.choice == "srun" and self.machine.allocation is None:
            raise UserError("--launcher srun: not in a Slurm job: sbatch scripts/scaling.slurm, or salloc first.")
        missing = _missing(self.choice)
        if missing:
            raise UserError(f"--launcher {self.choice}: {missing}.")

    def record(self) -> dict[str, object]:
        """What runs that are compared must share of how they are started, and by which versions."""
        where = "a Slurm job" if self.machine.allocation else "hosts" if self.hosts else "one host"
        versions = {"python": platform.python_version(), "hvd_bert": __version__}
        return {
            "--launcher": f"auto, {where}" if self.choice == "auto" else self.choice,
            "--launcher_flag": list(self.words),
            "versions": versions | {package: version_of(package) for package in PACKAGES},
        }

    def launcher(self, point: Point) -> str:
        """The launcher of a point."""
        several = "horovodrun" if point.strategy == "horovod" else "torchrun"
        choice = self.choice
        if choice == "auto" and (self.hosts or self.machine.allocation):
            choice = several = "horovodrun" if self.hosts else "srun"
        elsewhere = self.hosts is not None or choice == "srun"  # where a lone process must be, too
        if point.strategy in ONE_PROCESS and not elsewhere:
            return "none"
        return several if choice == "auto" else choice

    def command(self, point: Point, flags: Sequence[str], exported: Sequence[str] = ()) -> list[str]:
        """The words that start a point's training; `exported`: variables that ranks on other hosts must have, too."""
        number, by = point.processes, self.launcher(point)
        hosts = ["-H", self.hosts.text] if self.hosts else []
        train = [*TRAIN, *flags]
        if by == "none":
            return train
        if by == "torchrun":  # standalone: on a port of its own, or two sweeps of one host would meet
            own = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
            return [*own, *self.words, *train[1:]]
        program = _program(by) or by
        if by == "srun":
            export = ["--export=ALL"] if exported else []  # whatever sbatch was told
            return [program, *self._srun_words(number), *export, *self.words, *train]
        if by == "horovodrun":  # exports all there are
            return [program, "-np", str(number), *hosts, *self.words, *train]
        # As many slots as ranks, or Open MPI refuses more than there are cores; without cores of its own for each.
        place = hosts or ([] if self.machine.allocation else ["-H", f"localhost:{number}"])
        export = [word for name in exported for word in ("-x", name)]
        return [program, "-np", str(number), *place, "--bind-to", "none", *export, *self.words, *train]

    def _srun_words(self, number: int) -> list[str]:
        allocation = self.machine.allocation
        assert allocation is not None
        per_node = min(number, allocation.tasks_per_node)
        nodes = -(-number // per_node)
        words = ["--mpi=pmix", "--kill-on-bad-exit=1", f"--nodes={nodes}", f"--ntasks={number}"]
        words.append(f"--ntasks-per-node={per_node}")
        # Since Slurm 22.05 srun does not take the job's by itself.
        return words + ([f"--cpus-per-task={allocation.cpus_per_task}"] if allocation.cpus_per_task else [])

    def environment(self, point: Point, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment of a point's training: dp sees as many GPUs as the point says."""
        if point.strategy != "dp":
            return dict(environ)
        visible = environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(self.machine.gpus))))
        return {**environ, "CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[: point.ranks])}

    def threads(self, environ: Mapping[str, str]) -> int | None:
        """Of a rank on CPUs; None with GPUs, where the trainer chooses.

        One, so that one rank has no cores that the ranks of a larger world have to share; or what the user says.
        """
        said = environ.get("OMP_NUM_THREADS", "").split(",")[0]
        return None if self.machine.gpus else int(said) if said.isdecimal() and int(said) > 0 else 1

    def obstacle(self, point: Point) -> str:
        """Why a point cannot run here, with what to do about it; "" where nothing is known against it."""
        package, line = NEEDED.get(point.strategy, ("", ""))
        if package and importlib.util.find_spec(package) is None:
            return f"{package} is not installed: `{line}`"
        by, gpus, allocation = self.launcher(point), self.machine.gpus, self.machine.allocation
        missing = _missing(by)
        if missing:
            return missing
        if point.strategy == "dp":
            few = gpus < point.ranks
            return f"dp drives {point.ranks} GPUs from one process, and {gpus} are visible here" if few else ""
        if by == "none" and point.ranks > 1:
            return "--launcher none starts one process: name a launcher"
        if by == "srun" and allocation is not None:
            return self._obstacle_in_job(point.ranks, allocation)
        if self.hosts:
            few = self.hosts.slots < point.ranks
            return f"{point.ranks} ranks, but -H {self.hosts.text} has {self.hosts.slots} slots" if few else ""
        if gpus and point.ranks > gpus:
            return f"{point.ranks} ranks, but {gpus} GPU{'s' * (gpus > 1)}: each rank needs its own"
        return ""

    def _obstacle_in_job(self, ranks: int, allocation: Allocation) -> str:
        tasks = allocation.nodes * allocation.tasks_per_node
        if ranks > tasks:
            return f"{ranks} ranks, but the Slurm job asked for {tasks} tasks: sbatch --nodes, --ntasks-per-node"
        per_node, gpus = min(ranks, allocation.tasks_per_node), self.machine.gpus
        if gpus and per_node > gpus:
            return f"{per_node} ranks per node, but {gpus} GPUs there: sbatch --gres, --ntasks-per-node"
        return ""

    def warning(self, points: Sequence[Point], threads: int) -> str:
        """What will make the figures say less than they seem to; "" for nothing."""
        machine = self.machine
        if machine.gpus or machine.allocation or self.hosts:
            return ""
        maximum = max(point.processes for point in points)
        if maximum * threads <= machine.cores:
            return ""
        of_one = f" of {threads} threads" if threads > 1 else ""
        return f"{maximum} ranks{of_one} share {machine.cores} cores: no speed-up can be expected beyond the cores."


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that choose a launcher."""
    parser.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        default="auto",
        help="Program that starts the ranks; auto: horovodrun with -H, srun in a Slurm job, else horovodrun for horovod"
        " and torchrun for the others. (default: %(default)s)",
    )
    parser.add_argument(
        "-H", metavar="HOST:SLOTS,...", help="Hosts for horovodrun or mpirun. (default: this host, or the Slurm job's)"
    )
    parser.add_argument(
        "--launcher_flag",
        metavar="WORD",
        action="append",
        default=[],
        help="One more word for the launcher; may be repeated: --launcher_flag=--network-interfaces"
        " --launcher_flag=ib0. (default: none)",
    )


def chosen(flags: argparse.Namespace, machine: Machine) -> Launching:
    """What those flags say. Raises UserError."""
    launching = Launching(flags.launcher, tuple(flags.launcher_flag), Hosts(flags.H) if flags.H else None, machine)
    launching.check()
    return launching


def _missing(launcher: str) -> str:
    """That a launcher's program is not here, with what to do about it; "" where it is, or where there is none."""
    absent = launcher in PROGRAMS and _program(launcher) is None
    return f"there is no {launcher} on PATH: {PROGRAMS[launcher]}" if absent else ""


def _program(name: str) -> str | None:
    """A launcher's path: this environment's own, else the one on PATH."""
    own = Path(sys.executable).with_name(name)
    return str(own) if own.is_file() else shutil.which(name)
