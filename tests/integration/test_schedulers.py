"""Run the job scripts of PBS, LSF and Grid Engine with the schedulers' variables and signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from launch import REPOSITORY, built, environment, programs
from processes import started

pytestmark = pytest.mark.integration

SCRIPTS = ("hvd.pbs", "hvd.lsf", "hvd.sge")
FLAGS = "--config sample --max_train_samples 64 --logging_steps 1 --max_steps 1000000 --save_steps 0"
OUT = "runs/hvd_bert-7"
PROGRAMS = {
    "activate": 'PATH="$PWD/.venv/bin:$PATH"\n',
    "qsub": '#!/bin/sh\nprintf "%s\\n" "$@" "$OUT" "$FLAGS" >resubmitted\n',
}


def make_job(script: str, clone: Path, slots: dict[str, int], **horovodrun: str) -> dict[str, str]:
    """Make a folder like a clone, with the job scripts and an environment. Returns the job's variables.

    `slots`: host -> number of ranks. `horovodrun`: content of a stub.
    """
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / "scripts").symlink_to(REPOSITORY / "scripts")
    for name, text in (PROGRAMS | horovodrun).items():
        (clone / ".venv" / "bin" / name).write_text(text)
        (clone / ".venv" / "bin" / name).chmod(0o755)
    hosts, ranks = clone / "hosts", str(sum(slots.values()))
    if script == "hvd.pbs":
        hosts.write_text("".join(f"{host}\n" * count for host, count in slots.items()))
        variables = {"PBS_NODEFILE": str(hosts), "PBS_O_WORKDIR": str(clone), "FLAGS": FLAGS}
        variables |= {"PBS_JOBNAME": "hvd_bert", "PBS_JOBID": "7.server"}
    elif script == "hvd.lsf":
        variables = {"LSB_MCPU_HOSTS": " ".join(f"{host} {count}" for host, count in slots.items()), "FLAGS": FLAGS}
        variables |= {"LSB_DJOB_NUMPROC": ranks, "LS_SUBCWD": str(clone), "LSB_JOBNAME": "hvd_bert", "LSB_JOBID": "7"}
    else:
        hosts.write_text("".join(f"{host} {count} gpu.q@{host} UNDEFINED\n" for host, count in slots.items()))
        variables = {"PE_HOSTFILE": str(hosts), "NSLOTS": ranks, "JOB_NAME": "hvd_bert", "JOB_ID": "7"}
    return environment() | variables


def run_job(script: str, clone: Path, environ: dict[str, str], signalled: str = "") -> tuple[int, str]:
    """Run a job. Returns its status and output.

    `signalled`: "timeout" (the script's timer), "group" (all processes) or "script" receives a signal once a step is
    logged; "": none does.
    """
    sge = script == "hvd.sge"  # SGE starts the script in the submission folder, with arguments
    words = ["bash", str(clone / "scripts" / script), *(FLAGS.split() if sge else [])]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    output = ""
    with started(
        words, cwd=clone if sge else "/", env=environ, text=True, start_new_session=True, **streams
    ) as process:
        for line in process.stdout:
            if signalled and re.search(r"step \d+/", line):
                send_signal(process.pid, signalled)
                signalled = ""
            output += line
    return process.returncode, output


def send_signal(job: int, to: str) -> None:
    if to == "timeout":
        (timer,) = psutil.Process(job).children()
        timer.send_signal(signal.SIGALRM)  # as at its time limit
    elif to == "group":
        os.killpg(job, signal.SIGUSR1)
    else:
        os.kill(job, signal.SIGUSR1)


@pytest.mark.parametrize(
    ("script", "signalled", "status"),
    [("hvd.pbs", ["timeout"] * 2, 75), ("hvd.lsf", ["group", "script"], 75), ("hvd.sge", ["timeout"], 99)],
    ids=["pbs", "lsf", "sge"],
)
def test_a_signalled_job_is_requeued_and_resumes(
    tmp_path: Path, script: str, signalled: list[str], status: int
) -> None:
    if "mpi" not in built():
        pytest.skip("this Horovod was built without MPI")
    environ = make_job(script, tmp_path, {"localhost": 2})
    for name, folder in (("horovodrun", Path(sys.executable).parent), ("python", programs())):
        (tmp_path / ".venv" / "bin" / name).symlink_to(folder / name)
    for attempt, target in enumerate(signalled):
        ended, output = run_job(script, tmp_path, environ, target)
        assert ended == status, output
        assert ("Resuming from step" in output) == bool(attempt), output
        assert f"saved in {OUT}/{(tmp_path / OUT / 'latest').read_text().strip()}" in output, output
        if script == "hvd.pbs":
            resubmitted = (tmp_path / "resubmitted").read_text().splitlines()
            assert resubmitted == ["-v", "OUT,FLAGS", f"scripts/{script}", OUT, FLAGS]
            (tmp_path / "resubmitted").unlink()
            environ |= {"OUT": OUT, "PBS_JOBID": "8.server"}


@pytest.mark.parametrize(
    ("script", "launcher_status", "status"),
    [("hvd.pbs", 75, 75), ("hvd.lsf", 75, 1), ("hvd.sge", 75, 75), *[(script, 2, 2) for script in SCRIPTS]],
)
def test_other_ends_are_not_requeued(tmp_path: Path, script: str, launcher_status: int, status: int) -> None:
    """A failure, or a stop without a new checkpoint, does not requeue. The scheduler's variables set the ranks."""
    stub = f'#!/bin/sh\nprintf "%s\\n" "$@" >"{tmp_path}/arguments"\nexit {launcher_status}\n'
    environ = make_job(script, tmp_path, {"a100-01": 2, "a100-02": 2}, horovodrun=stub)
    (tmp_path / OUT).mkdir(parents=True)
    (tmp_path / OUT / "latest").write_text("checkpoint-3\n")
    assert run_job(script, tmp_path, environ) == (status, "")
    assert not (tmp_path / "resubmitted").exists()
    np, ranks, option, hosts, *command = (tmp_path / "arguments").read_text().splitlines()
    assert (np, ranks, option, sorted(hosts.split(","))) == ("-np", "4", "-H", ["a100-01:2", "a100-02:2"])
    assert command == ["python", "-m", "hvd_bert.train", "--output_dir", OUT, *FLAGS.split()]
