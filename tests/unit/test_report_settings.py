"""Settings on the report's pages: what differs from the defaults, and between runs."""

from __future__ import annotations

from pathlib import Path

from made_runs import make_run

from hvd_bert.tools.report import parts
from hvd_bert.tools.report.__main__ import main
from hvd_bert.tools.runs import record


def made(folder: Path, text: str, **results: object) -> record.Record:
    make_run(folder, **results)  # type: ignore[arg-type]
    (folder / "train_config.yaml").write_text(text)
    return record.read(folder)


def test_what_differs_from_the_defaults_comes_first(tmp_path):
    found = made(tmp_path / "a", "learning_rate: 0.001\nseed: 42\noutput_dir: null\nbf16: true\n").settings
    assert parts.changed(found).rows == [["--learning_rate", "0.001", "5e-05"], ["--bf16", "yes", "no"]]
    assert parts.unchanged(found).rows == [["--seed", "42"], ["--output_dir", "-"]]


def test_few_differences_are_a_row_per_run(tmp_path):
    records = [made(tmp_path / str(seed), f"seed: {seed}\noutput_dir: {seed}\n", seed=seed) for seed in range(3)]
    grid = parts.differences(records)
    assert grid.head == ["run", "--seed"]
    assert grid.rows == [[str(tmp_path / str(seed)), str(seed)] for seed in range(3)]


def test_many_differences_are_a_column_per_run(tmp_path):
    first = made(tmp_path / "a", "seed: 1\nbf16: true\n", device_name="A100")
    second = made(tmp_path / "b", "seed: 2\n", versions={"torch": "2.6.0"}, work={"the model": "other"})
    grid = parts.differences([first, second])
    assert grid.head == ["what", str(tmp_path / "a"), str(tmp_path / "b")]
    rows = {row[0]: row[1:] for row in grid.rows}
    assert rows["--seed"] == ["1", "2"] and rows["--bf16"] == ["yes", "-"]
    assert rows["device name"] == ["A100", "AMD EPYC"] and rows["torch"] == ["2.13.0", "2.6.0"]
    assert "the model" in rows and "the training data" not in rows


def test_equal_runs_differ_in_nothing(tmp_path):
    for name in ("a", "b"):
        make_run(tmp_path / f"runs/{name}")
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "page")]) == 0
    assert "All recorded settings, inputs and versions are the same." in (tmp_path / "page/report.md").read_text()
