"""benchmarks/run_mutants.py: which mutants it runs, and its summary."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import run_mutants
from launch import REPOSITORY, run


def test_mutants_without_a_result_run_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    function = "hvd_bert.data.window_table.x_prepare"
    results = {f"{function}__mutmut_1": None, f"{function}__mutmut_2": 1, f"{function}d__mutmut_1": None}
    (tmp_path / "hvd_bert" / "data").mkdir(parents=True)
    (tmp_path / "hvd_bert/data/window_table.py.meta").write_text(json.dumps({"exit_code_by_key": results}))
    (tmp_path / "mutmut-stats.json").write_text('{"duration_by_test": {}, "tests_by_mangled_function_name": {}}')
    mutants = run_mutants.Mutants([f"{function}_*"])
    ((path, name),) = mutants.left()
    assert (run_mutants.function_of(name), run_mutants.module_of(function)) == (function, "hvd_bert.data.window_table")
    mutants.run(path, name, [])
    assert mutants.left() == []
    run_mutants.summarize(["*"])
    counts = "3 mutants, 1 killed (0 ended), 1 survived, 1 left"
    assert capsys.readouterr().out == f"not called by any test {name}\nhvd_bert/data/window_table.py: {counts}\n"


# A short form of the campaign of interrupted runs


@pytest.mark.campaign
@pytest.mark.parametrize("campaign", [["resumes", "--resumes", "3"], ["kills", "--minutes", "3"]], ids=str)
def test_interrupted_runs_equal_uninterrupted_ones(tmp_path: Path, campaign: list[str]) -> None:
    program = REPOSITORY / "benchmarks" / "long_runs.py"
    run([sys.executable, program, *campaign, "--out", tmp_path / "out"], tmp_path, timeout=900, cold=True).expect(0)
