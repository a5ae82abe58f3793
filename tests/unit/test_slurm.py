"""Whether a Slurm job is requeued, by what scontrol prints about it. tests/cluster does it on a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_bert.distributed import events, slurm
from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError
from hvd_bert.training import start

JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "mine"}
ARRAY = JOB | {"SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "3"}
SHOWN = """JobId=12 JobName=mine
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:01 TimeLimit=1-00:00:00 TimeMin=N/A
   Comment=TimeLimit=UNLIMITED Requeue=0
"""


def test_job_of_an_array_is_requeued(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(slurm, "_scontrol", lambda *words: calls.append(words) or SHOWN)
    assert slurm.requeue(ARRAY, "auto", "step 8", lambda text: calls.append((text,))) is None
    announced = "Slurm job 10_3 has a time limit: requeueing it after step 8."
    assert calls == [("show", "job", "10_3"), (announced,), ("requeue", "10_3")]


@pytest.mark.parametrize(
    ("environ", "mode", "progress", "shown", "reason"),
    [
        (JOB, "auto", "step 8", ("BatchFlag=1", "BatchFlag=0"), "it is interactive"),
        (JOB, "auto", "step 8", ("RUNNING", "CANCELLED"), "Slurm is ending it (CANCELLED)"),
        (JOB, "auto", "step 8", ("Requeue=1", "Requeue=0"), "it does not allow it (sbatch --requeue does)"),
        (JOB, "auto", "step 8", ("1-00:00:00", "UNLIMITED"), "it has no time limit"),
        (JOB, "no", "step 8", ("", ""), "--requeue no"),
        (JOB, "auto", "", ("", ""), "this attempt made no progress, so request more time"),
        (JOB | {slurm.IN_SWEEP: "1"}, "auto", "step 8", ("", ""), None),  # the sweep requeues
    ],
)
def test_job_is_not_requeued(monkeypatch, environ, mode, progress, shown, reason):
    monkeypatch.setattr(slurm, "_scontrol", lambda *words: {"show": SHOWN.replace(*shown)}[words[0]])
    why = f"Slurm job 12 is not requeued: {reason}." if reason else ""
    assert slurm.requeue(environ, mode, progress, print) == why


def test_scontrol_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"`scontrol requeue` failed: .*No such file"):
        slurm._scontrol("requeue", "12")
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'requeue is disabled\nfor job 12' >&2; exit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    why_not = slurm.requeue(JOB, "auto", "step 8", print)
    assert why_not == "Slurm job 12 is not requeued: `scontrol show` failed: requeue is disabled for job 12."


def test_runs_of_a_requeued_program_are_found_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "FOLDERS_BEGUN", begun := set[Path]())
    for name, value in (JOB | {"SLURM_RESTART_COUNT": "1"}).items():
        monkeypatch.setenv(name, value)
    for name, job in (("1", "11"), ("2", "12"), ("3", "12")):
        Path("runs", name).mkdir(parents=True)
        events.begin(Path("runs", name), True, {"job": {"id": job}})
        events.end()
    found = []
    for _ in range(3):
        found.append(start.earlier_attempt(None, World()))
        begun.add(Path(str(found[-1])))
    assert found == ["runs/2", "runs/3", None]
    assert start.earlier_attempt("runs/1", World()) is None
