"""The Slurm job around a process, from Slurm's variables."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping

from hvd_bert.distributed.launch import Launcher, LaunchError, number
from hvd_bert.errors import UserError

IN_SWEEP = "HVD_BERT_IN_SWEEP"


def step_nodes(environ: Mapping[str, str]) -> str:
    """Slurm's list of the nodes of this step, such as gpu[1-4],login. Raises UserError if it is missing."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise UserError("The nodes of this job step are unknown (SLURM_STEP_NODELIST is not set). Start with srun.")
    return nodes


def expand_hosts(listed: str) -> list[str]:
    """The hosts of a list of Slurm's, such as rack[0-3]_blade[0-1],login."""
    if "[" not in listed:
        return listed.split(",")
    try:
        told = subprocess.run(["scontrol", "show", "hostnames", listed], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise UserError(
            f"The hosts {listed} are unknown: `scontrol show hostnames` does not work on {socket.gethostname()}. Make"
            " Slurm's commands available there, or start with torchrun."
        ) from None
    return told.stdout.split()


def step_port(environ: Mapping[str, str]) -> int:
    """A port for the tasks of this Slurm step. Other steps and jobs get other ports."""
    job, step = (number(environ, name) or 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return 10_000 + (job * 1009 + step) % 20_000


def find_job(environ: Mapping[str, str]) -> dict[str, str] | None:
    """The Slurm job around this process: its `id`, `name`, `partition`, `nodes` (Slurm's list), `array`; or None."""
    variables = {"id": "JOB_ID", "name": "JOB_NAME", "partition": "JOB_PARTITION", "nodes": "JOB_NODELIST"}
    job = {key: environ[f"SLURM_{name}"] for key, name in variables.items() if f"SLURM_{name}" in environ}
    if "SLURM_ARRAY_JOB_ID" in environ:
        job["array"] = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ.get('SLURM_ARRAY_TASK_ID', '')}"
    return job if "id" in job else None


def requested(environ: Mapping[str, str]) -> tuple[int, int | None]:
    """The job's nodes, and the tasks per node that it requested; None without such a request."""
    nodes = number(environ, "SLURM_JOB_NUM_NODES", 1) or number(environ, "SLURM_NNODES", 1) or 1
    return nodes, number(environ, "SLURM_NTASKS_PER_NODE", 1)


def requested_tasks(environ: Mapping[str, str]) -> int:
    """The tasks of the Slurm job around this process; of the step, where the job did not request a number per node.

    Slurm's default is one task per node. 1 in a sweep, which also trains on fewer ranks than the job has tasks.
    """
    if IN_SWEEP in environ:
        return 1
    nodes, per_node = requested(environ)
    return max(number(environ, "SLURM_NTASKS") or nodes, nodes * (per_node or 0))


def check_tasks(launcher: Launcher, environ: Mapping[str, str]) -> None:
    """Raise LaunchError if a process without a launcher would be a world of one in a job of several tasks."""
    tasks = requested_tasks(environ)
    if launcher.name == "none" and tasks > 1:
        raise LaunchError(
            f"The Slurm job requested {tasks} tasks, but no launcher started this process, so it would train alone."
            " Start all tasks (`srun --mpi=pmix python ...`), or choose --strategy none."
        )
