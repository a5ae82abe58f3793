"""Programs whose figures are in docs/evidence: how they judge what they measured."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import checkpoint_cost
import pytest
import run_mutants

NFS = Path(__file__).resolve().parents[2] / "benchmarks/nfs/nfs.sh"
GOOD = {
    "c1": "c1: training ended with status 0\nc1: holds the lock\n",
    "c2": "c2: training ended with status 0\nc2: took the lock 13.1 s after its holder's host was gone\n",
}


@pytest.mark.parametrize(
    ("host", "log", "status"),
    [
        ("c1", GOOD["c1"], 0),
        ("c1", GOOD["c1"] + "c1: WRONG: took a lock\n", 1),
        ("c1", "c1: training ended with status 1\n", 1),
        ("c2", "c2: training ended with status 0\n", 1),
        ("c2", None, 1),
    ],
)
def test_the_checks_on_nfs_fail_if_a_host_did(tmp_path, host, log, status):
    (tmp_path / "run").mkdir()
    for name, text in (GOOD | {host: log}).items():
        if text is not None:
            (tmp_path / "run" / f"{name}.log").write_text(text)
    done = subprocess.run(["bash", str(NFS), str(tmp_path), "judge"], capture_output=True, text=True, check=False)
    assert (done.returncode, bool(done.stderr)) == (status, bool(status))


def test_steps_after_a_save_whose_write_was_not_logged_are_left_out():
    rows = [{"step_s": 1.0} for _ in range(8)]
    rows[4]["checkpoint_write_s"] = 1.5
    assert checkpoint_cost.steps_by_kind(rows, 3) == ([1.0], [1.0])


def test_mutants_without_a_result_run_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    function = "hvd_bert.data.windows.x_prepare"
    results = {f"{function}__mutmut_1": None, f"{function}__mutmut_2": 1, f"{function}d__mutmut_1": None}
    (tmp_path / "hvd_bert" / "data").mkdir(parents=True)
    (tmp_path / "hvd_bert/data/windows.py.meta").write_text(json.dumps({"exit_code_by_key": results}))
    (tmp_path / "mutmut-stats.json").write_text('{"duration_by_test": {}, "tests_by_mangled_function_name": {}}')
    mutants = run_mutants.Mutants([f"{function}_*"])
    ((path, name),) = mutants.left()
    assert (run_mutants.function_of(name), run_mutants.module_of(function)) == (function, "hvd_bert.data.windows")
    mutants.run(path, name, [])
    assert mutants.left() == []
    run_mutants.summarize(["*"])
    assert capsys.readouterr().out == (
        f"not called by any test {name}\nhvd_bert/data/windows.py: 3 mutants, 1 killed (0 ended), 1 survived, 1 left\n"
    )
