"""scripts/first_failure.awk: the first failure, from logs in the formats of srun, mpirun and horovodrun."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tables import each

PROGRAM = Path(__file__).resolve().parents[2] / "scripts" / "first_failure.awk"
RAISED = "rank 1 on a100-02 failed:\nTraceback (most recent call last):\n  File x\nRuntimeError: broken: twice\n"
MARKED = "".join(f"[1,1]<stderr>:{line}" for line in RAISED.splitlines(keepends=True))
CHAINED = RAISED.replace("RuntimeError", "KeyError") + "\nDuring handling of the above exception, ...\nOSError: last\n"
IMPORT = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'x'\n"
PIECES = "[1,1]<stderr>:ModuleNotFoundError[1,1]<stderr>:: No module named 'x'[1,1]<stderr>:\n"
GLOO = "RuntimeError: Horovod detected that one or more processes exited ... was:\nProcess name: {}\nExit code: {}\n"
MPIRUN = "The first process to do so was:\n\n  Process name: [[207,1],2]\n  Exit code:    1\n-----\n"
SIGNAL = "mpirun noticed that process rank 3 with PID 933 on node a100-02 exited on signal 9 (Killed).\n"
SRUN = "srun: error: a100-02: task 2: Killed\nsrun: error: a100-01: tasks 0-1: Terminated\n"
LOST = "[0]<stderr>:rank 0 on a100-01 lost another rank: Horovod has been shut down.\n"
WAITED = "rank 0 on a100-01 has waited 600 s for rank 1 on a100-02 to reach a.b, c.d"
KILLED = "hvd_bert: the launcher was killed: stopping this rank\n"
STALLED = f"[1,0]<stderr>:{WAITED}. Check the file systems\n"


@each(
    ("log", "first"),
    [
        (
            "hvd_bert: rank 0 on a100-01: --output_dir /x\nsrun: error: a100-02: task 1: Killed\n",
            "rank 0 on a100-01: --o",
        ),
        (RAISED + SRUN, "rank 1 on a100-02: RuntimeError: broken: twice"),
        (CHAINED, "rank 1 on a100-02: OSError: last"),
        (MARKED + RAISED.replace("rank 1", "rank 0") + SIGNAL, "rank 1 on a100-02: RuntimeError: broken: twice"),
        (LOST + MARKED, "rank 1 on a100-02: RuntimeError: broken: twice"),
        (SRUN, "rank 2 on a100-02: Killed"),
        ("srun: error: a100-02: tasks 2-3: Exited with exit code 7\n", "ranks 2-3 on a100-02: Exited with exit code 7"),
        (IMPORT + SRUN, "rank 2 on a100-02: ModuleNotFoundError: No module named 'x'"),
        (IMPORT + MPIRUN, "rank 2 on a100-02: ModuleNotFoundError: No module named 'x'"),
        (PIECES + MPIRUN, "rank 2 on a100-02: ModuleNotFoundError: No module named 'x'"),
        (SIGNAL, "rank 3 on a100-02: signal 9 (Killed)"),
        (LOST + GLOO.format(1, 255), "rank 1 on a100-01: exit code 255 of ssh: killed by a signal"),
        (
            LOST + "Process 0 exit with status code 1.\nProcess 1 exit with status code 143.\n" + GLOO.format(0, 1),
            "rank 1 on a100-01: exit code 143",
        ),
        (GLOO.format(0, 137), "rank 0 on a100-01: exit code 137"),
        (LOST, "rank 0 on a100-01 lost another rank"),
        (STALLED + MPIRUN, f"{WAITED}\n"),
        (KILLED + WAITED + "\n", f"{WAITED}\n"),
        (KILLED + SIGNAL, "rank 3 on a100-02: signal 9 (Killed)"),
        (KILLED + LOST, "the launcher was killed: stopping this rank"),
        ("step 1/4\n", ""),
    ],
)
def test_first_failure(log: str, first: str) -> None:
    hosts = "hosts=a100-01 a100-01 a100-02 a100-02"
    command = ["awk", "-v", hosts, "-f", str(PROGRAM)]
    done = subprocess.run(command, input=log, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.startswith(first) and len(done.stdout.splitlines()) == bool(first), done.stdout
