"""Start ranks with the environment variables of launchers that are not installed here.

by_variables.py torch SIZE COMMAND...                  torch's four variables, as by Kubeflow or by hand
mpirun ... by_variables.py JSM|FLUX|PMIX COMMAND...    the variables of another launcher of MPI in place of mpirun's
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

# The variables of size and rank. PMIX: PRRTE sets only the rank, by a variable that Open MPI's mpirun sets as well.
MPI_VARIABLES = {
    "JSM": ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    "FLUX": ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    "PMIX": (),
}
MPIRUN_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def start_by_torch(size: int, command: list[str]) -> int:
    """Start the ranks on this host. Returns the largest status."""
    job = os.environ | {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [subprocess.Popen(command, env=job | {"RANK": str(rank)}) for rank in range(size)]
    return max(rank.wait() for rank in ranks)


def main(kind: str, *words: str) -> None:
    if kind == "torch":
        sys.exit(start_by_torch(int(words[0]), list(words[1:])))
    values = [os.environ.pop(name) for name in MPIRUN_VARIABLES]
    os.environ.update(zip(MPI_VARIABLES[kind], values, strict=False))
    os.execvp(words[0], words)


if __name__ == "__main__":
    main(*sys.argv[1:])
