"""If a launcher is killed or stopped, the ranks on all hosts save and end, even if the launcher's host has no ranks."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import signalled
from harness import SMALL, Cluster
from launch import Outcome

pytestmark = pytest.mark.cluster

HOSTS = "-H a100-01:1,a100-02:1"
TRAINER = f"{SMALL} 1000000 --no_do_eval --save_steps 0 --output_dir out"
COLD = "HVD_BERT_TEST_COLD"  # the signal goes to horovodrun, so the fork server must not run it
HOROVODRUN = f"env {COLD}=1 horovodrun -np 2 %s --mpi env -u {COLD} python -m hvd_bert.train {TRAINER}"
ONE_HOST = ("a100-01", HOROVODRUN % "-H a100-01:2")
TWO_HOSTS = ("login", HOROVODRUN % HOSTS)  # from a host without ranks


def stop(cluster: Cluster, folder: Path, number: str, launcher: tuple[str, str]) -> Outcome:
    host, launch = launcher
    folder.mkdir(exist_ok=True)
    return cluster.on(host, f"python {signalled.__file__} {number} {launch}", folder)


def test_ranks_save_when_their_launcher_is_stopped(cluster: Cluster, tmp_path: Path) -> None:
    before = {"one": 0, "two": 0}  # number of hosts -> last step; each run resumes the previous one
    with ThreadPoolExecutor() as pool:
        for number, reason in (("SIGKILL", "SIGUSR1"), ("SIGINT", "Ctrl-C")):
            launchers = {"one": ONE_HOST, "two": TWO_HOSTS}
            stops = {hosts: pool.submit(stop, cluster, tmp_path / hosts, number, launchers[hosts]) for hosts in before}
            for hosts, stopped in stops.items():
                outcome = stopped.result()
                assert not outcome.hung, outcome
                assert float(re.findall(r"all ended ([\d.]+) s", outcome.output)[0]) < 10, outcome
                step = int(re.findall(rf"Stopped by {reason} after step (\d+)", outcome.output)[0])
                assert step > before[hosts] and ("Resuming" in outcome.output) == bool(before[hosts]), outcome
                before[hosts] = step
