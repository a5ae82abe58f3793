"""The Slurm job around this process, from Slurm's variables. Like `launch.py`, these functions only read them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hvd_bert.distributed.launch import number
from hvd_bert.errors import UserError

IN_SWEEP = "HVD_BERT_IN_SWEEP"


def is_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process."""
    return "SLURM_STEP_ID" in environ


def slurm_nodes(environ: Mapping[str, str]) -> str:
    """Slurm's list of the nodes of this step, such as gpu[1-4],login. Raises UserError if it is missing."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise UserError("The nodes of this job step are unknown (SLURM_STEP_NODELIST is not set). Start with srun.")
    return nodes


def slurm_port(environ: Mapping[str, str]) -> int:
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


@dataclass(frozen=True)
class Allocation:
    """A Slurm job's nodes, tasks per node and cores per task."""

    nodes: int
    tasks_per_node: int
    cpus_per_task: int | None


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The allocation of the Slurm job around this process, outside of its steps; None without a job."""
    if "SLURM_JOB_ID" not in environ:
        return None
    nodes, tasks = _requested(environ)
    # TASKS_PER_NODE may be "2(x3)" or "2,1": take the first node's number.
    first = {"SLURM_TASKS_PER_NODE": re.split(r"[(,]", environ.get("SLURM_TASKS_PER_NODE", "1"))[0]}
    tasks = tasks or number(first, "SLURM_TASKS_PER_NODE", 1) or 1
    return Allocation(nodes, tasks, number(environ, "SLURM_CPUS_PER_TASK", 1))


def _requested(environ: Mapping[str, str]) -> tuple[int, int | None]:
    """The job's nodes, and the tasks per node that it requested; None without such a request."""
    nodes = number(environ, "SLURM_JOB_NUM_NODES", 1) or number(environ, "SLURM_NNODES", 1) or 1
    return nodes, number(environ, "SLURM_NTASKS_PER_NODE", 1)


def requested_tasks(environ: Mapping[str, str]) -> int:
    """The tasks of the Slurm job around this process; of the step, where the job did not request a number per node.

    1 in a sweep, which also trains on fewer ranks than the job has tasks.
    """
    if IN_SWEEP in environ:
        return 1
    nodes, per_node = _requested(environ)
    return max(number(environ, "SLURM_NTASKS") or 1, nodes * (per_node or 0))
