"""scripts/discover_hosts.sh: the hosts that it prints for horovodrun."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "discover_hosts.sh"


def discover(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.run([SCRIPT], cwd=folder, env=clean | env, capture_output=True, text=True, check=False)


def test_file_in_either_form(tmp_path):
    (tmp_path / "mine").write_text("# ours\na100-01:2\na100-02 slots=4 max_slots=4\n\na100-03  # one\n")
    done = discover(tmp_path, HVD_BERT_HOSTFILE="mine")
    assert (done.returncode, done.stdout) == (0, "a100-01:2\na100-02:4\na100-03:1\n")


def test_slurms_nodes(tmp_path):
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"\n')
    (tmp_path / "scontrol").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = discover(tmp_path, PATH=path, SLURM_JOB_NODELIST="n[1-2]", SLURM_NTASKS_PER_NODE="2")
    assert (done.returncode, done.stdout) == (0, "n1:2\nn2:2\n")


def test_neither(tmp_path):
    done = discover(tmp_path)
    assert done.returncode == 2
    assert "no file 'hosts' and not in a Slurm job" in done.stderr
