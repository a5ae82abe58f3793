"""Start ranks with the environment variables of launchers that are not installed here.

by_variables.py torch SIZE COMMAND...                  torch's four variables, as Kubeflow or a user sets them
mpirun ... by_variables.py JSM|FLUX|PMIX COMMAND...    another MPI launcher's variables in place of mpirun's
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

# Environment variables of world size and rank. PRRTE (PMIX) sets only a rank variable, which Open MPI's mpirun also
# sets.
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
    """Start `size` ranks on this host. Returns the largest exit status."""
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
