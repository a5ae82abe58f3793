"""Facts about the surrounding Slurm job, from Slurm's variables and commands, and requeueing of the job."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Callable, Mapping

from hvd_bert.distributed.launch import Launcher, LaunchError, number
from hvd_bert.errors import UserError, short_reason

IN_SWEEP = "HVD_BERT_IN_SWEEP"
_COMMAND_S = 60  # seconds; a busy controller is slow to answer
# Property of a job -> Slurm's variable for it, without the prefix SLURM_. Memory is in MiB.
_JOB = {
    "id": "JOB_ID",
    "name": "JOB_NAME",
    "partition": "JOB_PARTITION",
    "nodes": "JOB_NODELIST",
    "tasks_per_node": "NTASKS_PER_NODE",
    "cpus_per_task": "CPUS_PER_TASK",
    "gpus_per_node": "GPUS_PER_NODE",
    "memory_per_node": "MEM_PER_NODE",
    "restarts": "RESTART_COUNT",  # not set in the first attempt
}


def step_nodes(environ: Mapping[str, str]) -> str:
    """Return the nodes of this step in Slurm's notation, such as gpu[1-4],login. Raises UserError if unknown."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise UserError("The nodes of this job step are unknown (SLURM_STEP_NODELIST is not set). Start with srun.")
    return nodes


def expand_hosts(listed: str) -> list[str]:
    """Expand hosts in Slurm's notation, such as rack[0-3]_blade[0-1],login. Raises UserError if `scontrol` fails."""
    if "[" not in listed:
        return listed.split(",")
    reason = "`scontrol show hostnames` printed nothing"
    try:
        if hosts := _scontrol("show", "hostnames", listed).split():
            return hosts
    except UserError as error:
        reason = str(error)
    raise UserError(
        f"The hosts {listed} are unknown on {socket.gethostname()}: {reason}. Make Slurm's commands available there, or"
        " start with torchrun."
    )


def step_port(environ: Mapping[str, str]) -> int:
    """Return a port for the tasks of this Slurm step. Steps and jobs on the same host usually get different ports."""
    job, step = (number(environ, name) or 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return 10_000 + (job * 1009 + step) % 20_000


def find_job(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return the properties in the Slurm job's variables, under keys of _JOB and "array"; None outside a job."""
    job = {key: environ[f"SLURM_{name}"] for key, name in _JOB.items() if f"SLURM_{name}" in environ}
    if "SLURM_ARRAY_JOB_ID" in environ:
        job["array"] = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ.get('SLURM_ARRAY_TASK_ID', '')}"
    return job if "id" in job else None


def requested(environ: Mapping[str, str]) -> tuple[int, int | None]:
    """Return the job's number of nodes and requested tasks per node; the latter is None if not requested."""
    return number(environ, "SLURM_JOB_NUM_NODES", 1) or 1, number(environ, "SLURM_NTASKS_PER_NODE", 1)


def requested_tasks(environ: Mapping[str, str]) -> int:
    """Return the number of tasks that the surrounding Slurm job requested; 1 outside a job.

    This is SLURM_NTASKS, which inside srun counts the step's tasks, or Slurm's default of one task per node. It is at
    least the requested tasks per node times the nodes. Returns 1 in a sweep, which may use fewer ranks than tasks.
    """
    if IN_SWEEP in environ:
        return 1
    nodes, per_node = requested(environ)
    return max(number(environ, "SLURM_NTASKS") or nodes, nodes * (per_node or 0))


def check_tasks(launcher: Launcher, environ: Mapping[str, str]) -> None:
    """Raise LaunchError if no launcher started this process, but the job has several tasks."""
    tasks = requested_tasks(environ)
    if launcher.name == "none" and tasks > 1:
        raise LaunchError(
            f"The Slurm job requested {tasks} tasks, but no launcher started this process, so it would train alone."
            " Start all tasks (`srun --mpi=pmix python ...`), or choose --strategy none."
        )


def requeue(environ: Mapping[str, str], mode: str, progress: str, announce: Callable[[str], None]) -> str | None:
    """Requeue the surrounding Slurm job, if `mode` (--requeue) and the job allow it.

    Returns None if the job is requeued, or a sentence that states why it is not; "" outside a job and in a sweep.
    `progress`: this attempt's steps as text. If it is "", the job is not requeued, since the next attempt would not
    make progress either. `announce`: function that prints a line, called before Slurm ends the job.
    """
    job = find_job(environ)
    if job is None or IN_SWEEP in environ:
        return ""
    name = job.get("array", job["id"])  # the last task's job ID is that of the whole array
    try:
        reason = "--requeue no" if mode == "no" else _obstacle(_scontrol("show", "job", name))
        reason = reason or ("" if progress else "this attempt made no progress, so request more time")
        if not reason:
            announce(f"Slurm job {name} has a time limit: requeueing it after {progress}.")
            _scontrol("requeue", name)
            return None
    except UserError as error:
        reason = str(error)
    return f"Slurm job {name} is not requeued: {reason}."


def _obstacle(shown: str) -> str:
    """Return why a job must not be requeued, or "". `shown`: the output of `scontrol show job`."""
    _, _, shown = shown.partition("\n")  # the first line ends with the job's name, which may look like another field
    fields = dict(reversed(re.findall(r"(\w+)=(\S*)", shown)))  # the first of equal names wins: comments come last
    if "JobState" not in fields:
        return "`scontrol show job` did not print its state"
    if fields.get("BatchFlag") == "0":
        return "it is interactive"
    if fields["JobState"] != "RUNNING":
        return f"Slurm is ending it ({fields['JobState']})"
    if fields.get("Requeue") != "1":
        return "it does not allow it (sbatch --requeue does)"
    return "it has no time limit" if fields.get("TimeLimit") == "UNLIMITED" else ""


def _scontrol(*words: str) -> str:
    """Run scontrol, and return its output. Raises UserError if it fails."""
    try:
        done = subprocess.run(
            ["scontrol", *words], capture_output=True, text=True, errors="replace", timeout=_COMMAND_S
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"`scontrol {words[0]}` did not answer in {_COMMAND_S} s") from None
    except OSError as error:
        raise UserError(f"`scontrol {words[0]}` failed: {short_reason(error)}") from None
    if done.returncode > 0:
        reason = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise UserError(f"`scontrol {words[0]}` failed: {reason}")
    # With a negative status, a signal ended scontrol because Slurm is ending the job: its output may be incomplete.
    return done.stdout if done.returncode == 0 else ""
