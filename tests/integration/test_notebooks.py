"""Run the notebooks with test parameters: one trains a small model, the other reads generated runs of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jupytext
import pytest
from commands import small_run
from launch import REPOSITORY, TRAIN, environment, programs
from made_runs import make_run
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

pytestmark = pytest.mark.integration


def execute(name: str, folder: Path, parameters: str) -> list[Any]:
    """Run a notebook in a new folder `folder`/notebooks. Returns the outputs of all cells.

    `parameters`: code that is inserted as a cell after the notebook's own parameters.
    """
    cwd = folder / "notebooks"
    cwd.mkdir()
    notebook = jupytext.read(REPOSITORY / "notebooks" / name)
    (parameters_at,) = (i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ()))
    notebook.cells.insert(parameters_at + 1, new_code_cell(parameters))
    client = NotebookClient(notebook, timeout=110, kernel_name="python3", resources={"metadata": {"path": str(cwd)}})
    environ = {name: value for name, value in environment().items() if name != "PYTEST_CURRENT_TEST"}
    client.execute(env=environ)  # with PYTEST_CURRENT_TEST, ipykernel would not capture the ranks' output
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def plots(outputs: list[Any]) -> int:
    return sum("image/png" in output.get("data", ()) for output in outputs)


def text_of(outputs: list[Any]) -> str:
    return "".join(output.text for output in outputs if output.output_type == "stream")


def test_train_and_ask(tmp_path: Path) -> None:
    flags = [str(word) for word in small_run(2, "unused")[len(TRAIN) : -2]]
    parameters = f"sys.executable = {str(programs() / 'python')!r}\nflags, more_steps = {flags}, 2"
    # With this sys.executable, the notebook finds the fork server's horovodrun next to `python`.
    outputs = execute("train_and_ask.py", tmp_path, parameters)
    assert plots(outputs) == 1
    text = text_of(outputs)
    assert "step 6/6" in text and text.count("expected [") == 3, text
    assert "step 2: loss" in text
    for folder in ("notebook", "in-notebook"):
        assert (tmp_path / "runs" / folder / "train_results.json").exists()


def test_read_a_sweep(tmp_path: Path) -> None:
    for strategy, ranks in (("none", 1), ("horovod", 2), ("horovod", 4), ("ddp", 2)):
        make_run(tmp_path / "runs" / "sweep" / f"{strategy}-{ranks}", strategy, ranks, windows_per_s=10.0 * ranks)
    make_run(tmp_path / "runs" / "sweep" / "ddp-4", "ddp", 4, windows_per_s=40.0, last_loss=4.0)  # its loss differs
    outputs = execute("read_a_sweep.py", tmp_path, "")
    assert plots(outputs) == 1
    assert "ddp on 4: " in text_of(outputs)
