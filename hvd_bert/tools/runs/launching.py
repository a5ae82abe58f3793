"""Choose the launcher of a training and build its command, or give the reason why it cannot run here."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_bert.config.parser import MAX_SECONDS, Limits, Parser, add_number
from hvd_bert.config.strategies import ALONE, HOROVOD, STRATEGIES, StrategyRow
from hvd_bert.distributed.interfaces import SETTING
from hvd_bert.distributed.launch import host_name, number
from hvd_bert.distributed.launchers import LAUNCHERS, Allocation, LaunchOptions, launcher_row
from hvd_bert.distributed.slurm import requested
from hvd_bert.errors import UserError
from hvd_bert.machine import cpu_name, versions
from hvd_bert.tools.rendering import counted

STRONG, WEAK = "strong", "weak"  # kinds of scaling
CHOICES = ("auto", *sorted(name for name, row in LAUNCHERS.items() if row.command), "none")
TAKE_HOSTS = [name for name, row in LAUNCHERS.items() if row.takes_hosts]
RANKS_PER_CORE = 16  # more ranks would only wait for each other and fill the memory
TRAIN = (sys.executable, "-m", "hvd_bert.train")
EXPORTED = ("OMP_NUM_THREADS", SETTING)  # environment variables passed to other hosts: threads, network interface
_HOST = re.compile(r"(\w[\w.-]*)(?::([1-9][0-9]{0,3}))?", re.ASCII)  # a leading "-" would make it an option of ssh


@dataclass(eq=False)
class Point:
    """A training to start. `ranks`: number of processes; with `several_gpus`, number of GPUs of the single process."""

    strategy: str
    ranks: int

    @property
    def row(self) -> StrategyRow:
        """The strategy's row of STRATEGIES."""
        return STRATEGIES[self.strategy]

    @property
    def processes(self) -> int:
        """Number of processes that train."""
        return 1 if self.row.world == ALONE else self.ranks

    def __str__(self) -> str:
        return f"{self.strategy}, {counted(self.ranks, 'GPU' if self.row.several_gpus else 'rank')}"


def host_slots(hosts: str, source: str = "-H") -> dict[str, int]:
    """Parse HOST[:SLOTS],... into the slots per host, by default 1. `source`: the text's origin, for the UserError."""
    slots: dict[str, int] = {}
    for entry in hosts.split(","):
        match = _HOST.fullmatch(entry)
        if match is None:
            raise UserError(f"{source}: {entry[:80]!r} must be HOST:SLOTS, such as a100-01:2.")
        host = host_name(match[1], source)
        slots[host] = slots.get(host, 0) + int(match[2] or 1)
    return slots


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Read nodes, tasks per node and cores per task of the Slurm job that this process runs in; None outside a job."""
    if "SLURM_JOB_ID" not in environ:
        return None
    nodes, tasks = requested(environ)
    # TASKS_PER_NODE may be "2(x3)" or "2,1": take the first node's number.
    first = {"SLURM_TASKS_PER_NODE": re.split(r"[(,]", environ.get("SLURM_TASKS_PER_NODE", "1"))[0]}
    tasks = tasks or number(first, "SLURM_TASKS_PER_NODE", 1) or 1
    return Allocation(nodes, tasks, number(environ, "SLURM_CPUS_PER_TASK", 1))


@dataclass(frozen=True)
class Machine:
    """Cores and GPUs of this host, and the current Slurm job."""

    cores: int
    gpus: int
    allocation: Allocation | None

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> Machine:
        """Find the cores and GPUs that this process may use, and its Slurm job. Raises UserError if torch fails."""
        # Count GPUs as torch does in the ranks. A subprocess imports torch, so that this process need not.
        program = "import torch; print(torch.cuda.device_count())"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, errors="replace")
        last = done.stdout.strip().splitlines()[-1:]
        if done.returncode or not last or not last[0].isdecimal():
            raise UserError(f"torch cannot be imported: run `bash env/setup.sh`. The error was:\n{done.stderr.strip()}")
        return cls(len(os.sched_getaffinity(0)), int(last[0]), find_allocation(environ))

    def record(self) -> dict[str, object]:
        """Return facts about this host for sweep.json."""
        return {"host": socket.gethostname(), "processor": cpu_name(), "cores": self.cores, "gpus": self.gpus}


@dataclass(frozen=True)
class Launching:
    """The selected launcher, with additional arguments and hosts (-H), and this machine."""

    choice: str
    extra_args: tuple[str, ...]
    hosts: str | None
    machine: Machine

    def check(self) -> None:
        """Raise UserError if the selected launcher cannot be used here."""
        if self.hosts:
            host_slots(self.hosts)
            if self.choice not in ("auto", *TAKE_HOSTS):
                raise UserError(f"-H: --launcher {self.choice} takes no hosts. Use {' or '.join(TAKE_HOSTS)}.")
        if self.extra_args and self.choice in ("auto", "none"):
            raise UserError("--launcher_flag: select its launcher with --launcher.")
        if self.choice == "srun" and self.machine.allocation is None:
            raise UserError(
                "--launcher srun: this is not a Slurm job. Use `sbatch scripts/scaling.slurm`, or `salloc` first."
            )
        if missing := _missing(self.choice):
            raise UserError(f"--launcher {self.choice}: {missing}.")

    def record(self) -> dict[str, object]:
        """Return the launcher, its additional arguments and versions, which must be equal in all compared runs."""
        where = "a Slurm job" if self.machine.allocation else "hosts" if self.hosts else "one host"
        return {
            "--launcher": f"auto, {where}" if self.choice == "auto" else self.choice,
            "--launcher_flag": list(self.extra_args),
            "versions": versions(),
        }

    @property
    def slots(self) -> int:
        """The number of ranks that fit: slots of -H, tasks of the Slurm job, or this host's GPUs; without GPUs, 2."""
        allocation = self.machine.allocation
        if self.hosts:
            return sum(host_slots(self.hosts).values())
        if allocation and self.spans_job:
            return allocation.nodes * allocation.tasks_per_node
        return self.machine.gpus or 2

    @property
    def spans_job(self) -> bool:
        """Whether the ranks are started on all nodes of a Slurm job."""
        inside = self.machine.allocation is not None and not self.hosts
        return inside and (self.choice == "auto" or launcher_row(self.choice).spans_job)

    def launcher(self, point: Point) -> str:
        """Choose the launcher for a point."""
        choice = self.choice
        if choice == "auto":
            local = "horovodrun" if point.row.world == HOROVOD else "torchrun"
            choice = "horovodrun" if self.hosts else "srun" if self.machine.allocation else local
        elsewhere = self.hosts is not None or choice == "srun"  # then even a single process needs a launcher
        return "none" if point.row.world == ALONE and not elsewhere else choice

    def command(self, point: Point, flags: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """Build the command that trains a point. `flags`: the trainer's flags. `environ`: result of `environment`."""
        command, train = launcher_row(self.launcher(point)).command, [*TRAIN, *flags]
        if command is None:
            return train
        allocation, exported = self.machine.allocation, [name for name in EXPORTED if name in environ]
        options = LaunchOptions(train, point.processes, self.hosts, allocation, self.extra_args, exported)
        program, *words = command(options)
        return [program_path(program) or program, *words]

    def environment(self, point: Point, environ: Mapping[str, str]) -> dict[str, str]:
        """Build the environment of a point's training. For `several_gpus`, only `point.ranks` GPUs are visible."""
        threads = self.threads(environ)
        made = dict(environ) if threads is None else {**environ, "OMP_NUM_THREADS": str(threads)}
        if point.row.several_gpus:
            visible = environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(self.machine.gpus))))
            made["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[: point.ranks])
        return made

    def threads(self, environ: Mapping[str, str]) -> int | None:
        """Choose the threads per rank on CPUs: OMP_NUM_THREADS, else 1. None with GPUs, where the trainer chooses.

        With a larger default, a single rank would use more cores than a rank of a larger world, which hides speed-up.
        """
        value = environ.get("OMP_NUM_THREADS", "").split(",")[0]
        return None if self.machine.gpus else int(value) if value.isdecimal() and int(value) > 0 else 1

    def obstacle(self, point: Point) -> str:
        """Return the reason why a point cannot run here, with a remedy; "" if no reason is known."""
        launcher_name, gpus, allocation = self.launcher(point), self.machine.gpus, self.machine.allocation
        if missing := point.row.missing or _missing(launcher_name):
            return missing
        if point.row.several_gpus:
            needs = f"{point.strategy} needs {point.ranks} GPUs in its one process, but {gpus} are visible"
            return needs if gpus < point.ranks else ""
        if launcher_name == "none" and point.ranks > 1:
            return "--launcher none starts one process only: choose another launcher"
        if allocation is not None and self.spans_job:
            return self._obstacle_in_job(point.ranks, allocation)
        if self.hosts:
            too_many = f"{point.ranks} ranks, but -H {self.hosts} has {self.slots} slots"
            return too_many if point.ranks > self.slots else ""
        if gpus and point.ranks > gpus:
            return f"{point.ranks} ranks, but {counted(gpus, 'GPU')}: each rank needs its own"
        if point.ranks > RANKS_PER_CORE * self.machine.cores:
            return f"{point.ranks} ranks, but {self.machine.cores} cores: use at most {RANKS_PER_CORE} per core"
        return ""

    def _obstacle_in_job(self, ranks: int, allocation: Allocation) -> str:
        if ranks > self.slots:
            too_many = f"{ranks} ranks, but the Slurm job has {self.slots} tasks"
            return f"{too_many}: raise --nodes or --ntasks-per-node of sbatch"
        per_node, gpus = min(ranks, allocation.tasks_per_node), self.machine.gpus
        if gpus and per_node > gpus:
            return f"{per_node} ranks per node, but {gpus} GPUs: raise --gres or lower --ntasks-per-node of sbatch"
        return ""

    def warn_of_shared_cores(self, points: Sequence[Point], threads: int) -> None:
        """Print a warning if ranks on this host share cores, which limits the speed-up. `threads`: number per rank."""
        machine, maximum = self.machine, max((point.processes for point in points), default=0)
        if machine.gpus or machine.allocation or self.hosts or maximum * threads <= machine.cores:
            return
        ranks = f"{maximum} ranks of {threads} threads" if threads > 1 else f"{maximum} ranks"
        effect = f"{ranks} share {machine.cores} cores: expect no speed-up beyond the number of cores."
        print(f"warning: {effect}", file=sys.stderr)


def add_flags(parser: Parser, out: str) -> None:
    """Add the flags for the folder of all runs, the launcher, and the maximum time per run."""
    folder = "Folder for all runs; the same folder resumes. (default: %(default)s)"
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path(out), help=folder)
    launcher = (
        "Program that starts the ranks; auto: horovodrun with -H, srun in a Slurm job, else horovodrun for horovod and"
        " torchrun for other strategies. (default: %(default)s)"
    )
    parser.add_argument("--launcher", choices=CHOICES, default="auto", help=launcher)
    hosts = "Hosts for horovodrun or mpirun. (default: this host, or the Slurm job's)"
    parser.add_argument("-H", metavar="HOST:SLOTS,...", help=hosts)
    word = (
        "Additional argument for the launcher; may be repeated: --launcher_flag=--network-interfaces"
        " --launcher_flag=ib0. (default: none)"
    )
    parser.add_argument("--launcher_flag", metavar="WORD", action="append", default=[], help=word)
    limit = "Maximum seconds per run; a longer run is terminated. (default: %(default)g)"
    add_number(parser, "--timeout", 3600.0, limit, Limits(minimum=1, maximum=MAX_SECONDS), metavar="S")


def choose(flags: argparse.Namespace) -> Launching:
    """Return the launcher that the flags of `add_flags` select on this host. Raises UserError."""
    chosen = Launching(flags.launcher, tuple(flags.launcher_flag), flags.H, Machine.here(os.environ))
    chosen.check()
    return chosen


def _missing(launcher: str) -> str:
    """Return the error if a launcher's program is missing; "" if it is installed or the launcher has no program."""
    remedy = launcher_row(launcher).remedy
    return f"{launcher} is not on PATH: {remedy}" if remedy and program_path(launcher) is None else ""


def program_path(name: str) -> str | None:
    """Find a launcher's program in this Python environment, else on PATH; None if it is missing."""
    own = Path(sys.executable).parent / name
    return str(own) if own.is_file() else shutil.which(name)
