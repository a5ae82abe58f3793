"""The files of a run, each replaced by every hostile one: skipped with a note, and left out of comparisons."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import hostile
import pytest
from made_runs import make_run, make_samples

from hvd_bert.output import output_dir
from hvd_bert.storage import locks
from hvd_bert.tools.report import run_page
from hvd_bert.tools.runs import reading, record

pytestmark = pytest.mark.timeout(300)  # a reader that blocks must fail its test soon

# --- a run's files: the rest of the run is shown, and the run is left out of comparisons --------------

OF_A_RUN = {
    "metrics.jsonl": True,  # whether a comparison needs it
    "train_results.json": True,
    "eval_results.json": False,
    "train_config.yaml": False,
    "events.jsonl": False,
    "eval_samples.json": False,
    "gpu_usage.jsonl": False,
    "checkpoint-20/state.json": False,
    ".lock": False,
}
UNNAMED = ("train_config.yaml", ".lock")  # nothing that is shown depends on them


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("runs") / "run", steps=5, scores=(1.0, 2.0))
    make_samples(folder)
    (folder / "events.jsonl").write_text('{"event": "start", "train_steps": 5, "ranks": [{"rank": 0}]}\n')
    (folder / "gpu_usage.jsonl").write_text('{"step": 1, "gpu": 0}\n')
    (folder / "checkpoint-20").mkdir()
    (folder / "checkpoint-20" / "state.json").write_text('{"best": {"metric": "f1", "value": 2.0, "step": 20}}')
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("what", hostile.ALL)
@pytest.mark.parametrize("name", OF_A_RUN)
def test_a_run_is_shown_and_left_out(run: Path, name: str, what: str) -> None:
    with hostile.in_place_of(run / name, what):
        shown = record.read(run)
        assert "\x1b" not in run_page.page_of(shown).as_markdown() + "\n".join(run_page.summary(shown))
        if what in hostile.NO_FILES and name not in UNNAMED:
            assert [problem for problem in shown.problems if Path(name).name in problem]
        if OF_A_RUN[name]:
            with pytest.raises(reading.Unusable, match=name) as raised:
                reading.read(run)
            hostile.check_message(str(raised.value).encode("ascii", "replace").decode())
        else:
            assert reading.read(run).steps == 5


# --- files that a run keeps for itself: it continues without them, or says what is in the way ---------

KEPT: dict[str, Callable[[Path], object]] = {
    "tracking.json": lambda folder: pytest.importorskip("hvd_bert.output.reporters.wandb").read_run_id(folder),
    ".lock": lambda folder: locks.names_another_host(folder / ".lock"),
}


@pytest.mark.parametrize("what", hostile.ALL)
@pytest.mark.parametrize("name", KEPT)
def test_own_files(tmp_path: Path, name: str, what: str) -> None:
    hostile.ALL[what](tmp_path / name)
    try:
        KEPT[name](tmp_path)
    except OSError as error:  # which callers report with the path
        assert what in hostile.NO_FILES
        hostile.check_message(error.strerror or str(error))


def test_records_are_read_whatever_their_lines_hold(tmp_path: Path) -> None:
    lines = [b'{"step": 1}', b'{"step": 2, "a": "\xff"}', b"9" * 5000, b'{"step": 1e999}', b'{"step": 9}']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines, b'{"step": 9}']))
    output_dir.forget_after(tmp_path, 5)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"\n".join(lines[:2]) + b"\n"
