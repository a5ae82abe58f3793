"""The first failure is found in logs of srun, mpirun, horovodrun and torchrun."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from refusals import check_refusal

from hvd_bert.tools.doctor import __main__ as doctor
from hvd_bert.tools.runs.failure import OTHER_TMPDIR, first_failure

HOSTS = ["a100-01", "a100-01", "a100-02", "a100-02"]
RAISED = "rank 1 on a100-02 failed:\nTraceback (most recent call last):\n  File x\nRuntimeError: broken: twice\n"
BROKEN = "rank 1 on a100-02: RuntimeError: broken: twice"
MARKED = "".join(f"[1,1]<stderr>:{line}" for line in RAISED.splitlines(keepends=True))
CHAINED = RAISED.replace("RuntimeError", "KeyError") + "\nDuring handling of the above exception, ...\nOSError: last\n"
MISSING = "ModuleNotFoundError: No module named 'x'"
IMPORT = f"Traceback (most recent call last):\n{MISSING}\n"
PIECES = "[1,1]<stderr>:ModuleNotFoundError[1,1]<stderr>:: No module named 'x'[1,1]<stderr>:\n"
GLOO = "RuntimeError: Horovod detected that one or more processes exited ... was:\nProcess name: {}\nExit code: {}\n"
EXITS = "Process 0 exit with status code 1.\nProcess 1 exit with status code 143.\n"
BY_SSH = "of ssh: killed by a signal, or the connection broke"
MPIRUN = "The first process to do so was:\n\n  Process name: [[207,1],2]\n  Exit code:    1\n-----\n"
SIGNAL = "mpirun noticed that process rank 3 with PID 933 on node a100-02 exited on signal 9 (Killed).\n"
SRUN = "srun: error: a100-02: task 2: Killed\nsrun: error: a100-01: tasks 0-1: Terminated\n"
LOST = "[0]<stderr>:rank 0 on a100-01 lost another rank: Horovod has been shut down.\n"
WAITED = "rank 0 on a100-01 has waited 600 s for rank 1 on a100-02 to reach a.b, c.d"
KILLED = "hvd_bert: the launcher was killed: stopping this rank\n"
STALLED = f"[1,0]<stderr>:{WAITED}. Check the file systems\n"
MESSAGE = "hvd_bert: rank 0 on a100-01: --output_dir /x\n"
TORCHRUN = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\nFailures:\n{}-----\n"
TORCHRUN += "Root Cause (first observed failure):\n{}=====\n"
AGENTS = "[0]:\n  time : now\n  host : a100-0{1}\n  rank : {0} (local_rank: 0)\n  exitcode : {2} (pid: 7)\n"
FULL = "[a100-01:00742] PMIX ERROR: OUT-OF-RESOURCE in file ../src/mca/common/dstore/dstore_segment.c at line 208\n"
FULL += (
    "[1,0]<stderr>:[a100-01:00758] PMIX ERROR: ERROR in file ../src/mca/gds/ds12/gds_ds12_lock_pthread.c at line 169\n"
)
FULL += "[1,0]<stderr>:*** An error occurred in MPI_Init_thread\n[1,0]<stderr>:*** on a NULL communicator\n"
NO_FOLDER = "A call to mkdir was unable to create the desired directory:\n\n  Directory: /tmp/ompi.a100-01.0\n"
NO_FOLDER += "  Error:     No space left on device\n\nPlease check to ensure you have adequate permissions to perform\n"
START = "[1,0]<stdout>:2026-11-26 20:22:57 INFO 4 rank(s) on a100-01, a100-02, cpu, controller mpi\n"
REQUEUED = "slurmstepd: error: *** JOB 7 ON a100-01 CANCELLED AT 2026-11-26T20:35:43 DUE TO JOB REQUEUE ***\n"
STOPPED = "hvd_bert: Stopped by SIGUSR1 after step 3, saved in out/checkpoint-3.\n"
STOPPED += "srun: error: a100-01: task 0: Exited with exit code 75\n"
STOPPED += "srun: error: a100-01: task 1: Terminated\n"


@pytest.mark.parametrize(
    ("log", "first"),
    [
        (MESSAGE + "srun: error: a100-02: task 1: Killed\n", "rank 0 on a100-01: --output_dir /x"),
        (CHAINED, "rank 1 on a100-02: OSError: last"),
        (MARKED + RAISED.replace("rank 1", "rank 0") + SIGNAL, BROKEN),
        (LOST + MARKED.replace("[1,1]<stderr>:  ", "[1,0]<stderr>:OSError: x\n[1,1]<stderr>:  "), BROKEN),
        (SRUN, "rank 2 on a100-02: Killed"),
        ("srun: error: a100-02: tasks 2-3: Exited with exit code 7\n", "ranks 2-3 on a100-02: Exited with exit code 7"),
        (IMPORT + SRUN, f"rank 2 on a100-02: {MISSING}"),
        (PIECES + MPIRUN, f"rank 2 on a100-02: {MISSING}"),
        (LOST + GLOO.format(1, 255), f"rank 1 on a100-01: exit code 255 {BY_SSH}"),
        (LOST + EXITS + GLOO.format(0, 1), "rank 1 on a100-01: exit code 143"),
        (GLOO.format(4, 137), "rank 4: exit code 137"),
        # torchrun blames the rank whose end it noticed first, but here that rank had lost another one.
        (
            LOST.partition(":")[2] + TORCHRUN.format(AGENTS.format(1, 2, -9), AGENTS.format(0, 1, 1)),
            "rank 1 on a100-02: signal 9",
        ),
        (TORCHRUN.format(AGENTS.format(0, 1, -15), AGENTS.format(1, 2, 7)), "rank 1 on a100-02: exit code 7"),
        (TORCHRUN.format(AGENTS.format(0, 1, -6), AGENTS.format(1, 2, -9)), "rank 1 on a100-02: signal 9"),
        ("[rank1]: " + "[rank1]: ".join(IMPORT.splitlines(True)), MISSING),
        (LOST, "rank 0 on a100-01 lost another rank: Horovod has been shut down."),
        (LOST + IMPORT, MISSING),
        (STALLED + MPIRUN, WAITED),
        (KILLED + WAITED + "\n", WAITED),
        (KILLED + SIGNAL, "rank 3 on a100-02: signal 9 (Killed)"),
        (KILLED + LOST, "the launcher was killed: stopping this rank"),
        (FULL + MPIRUN, f"a100-01: PMIX ERROR: OUT-OF-RESOURCE. {OTHER_TMPDIR}"),
        (
            FULL.replace("OUT-OF-R", "PMIX_ERR_OUT_OF_R"),
            f"a100-01: PMIX ERROR: PMIX_ERR_OUT_OF_RESOURCE. {OTHER_TMPDIR}",
        ),
        (NO_FOLDER, f"Directory: /tmp/ompi.a100-01.0: No space left on device. {OTHER_TMPDIR}"),
        (FULL + MARKED, BROKEN),
        ("step 1/4\n", ""),
        # Several attempts in one log: only the final attempt counts.
        (MESSAGE + REQUEUED + STOPPED + START, ""),
        (SRUN + REQUEUED.replace("JOB REQUEUE", "NODE FAILURE") + STOPPED, ""),
        (MESSAGE + START + SIGNAL, "rank 3 on a100-02: signal 9 (Killed)"),
        (MESSAGE + REQUEUED + STOPPED + SRUN, "rank 2 on a100-02: Killed"),
    ],
)
def test_first_failure(log: str, first: str) -> None:
    assert first_failure(log.splitlines(), HOSTS) == first


def test_doctor_prints_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\r 50%|\xff \x1b[A" * 50_000 + GLOO.format(2, 137).replace("\n", "\r\n").encode())
    first = "rank 2 on a100-02: exit code 137"
    assert doctor.main(["--log", str(log), "-H", "a100-01:2,a100-02"]) == 0
    assert doctor.main(["--log", str(log), "--hosts", "a100-01:2,a100-02:2", "--json"]) == 0
    log.write_text("KeyError: '\x1b[A'")
    assert doctor.main(["--log", str(log)]) == 0
    log.write_text("")
    assert doctor.main(["--log", str(log)]) == 0
    shown = [f"First failure: {first}", json.dumps({"first_failure": first}), r"First failure: KeyError: '\x1b[A'"]
    assert capsys.readouterr().out.splitlines() == [*shown, f"No failure found in {log}."]
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert (doctor.main(["--log", str(log)]), *capsys.readouterr()) == (0, "", "")


@pytest.mark.parametrize("make", [lambda path: None, os.mkfifo, os.mkdir], ids=["missing", "pipe", "folder"])
def test_log_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], make) -> None:
    make(tmp_path / "log")
    assert doctor.main(["--log", str(tmp_path / "log")]) == 2
    check_refusal(capsys.readouterr().err.strip(), "--log", tmp_path / "log")
