"""Files of a run, numbers and names that are hostile: skipped with a note, refused, or shown as they are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import hostile
import pytest
from made_runs import make_run, make_samples

from hvd_bert.distributed.launch import Launcher
from hvd_bert.errors import EXIT_OK, UserError
from hvd_bert.output import output_dir
from hvd_bert.predict import __main__ as predict
from hvd_bert.storage import locks
from hvd_bert.tools.bench import __main__ as bench
from hvd_bert.tools.bench import sweep
from hvd_bert.tools.doctor import __main__ as doctor
from hvd_bert.tools.evaluate import __main__ as evaluate
from hvd_bert.tools.report import run_page
from hvd_bert.tools.report.__main__ import main as report
from hvd_bert.tools.runs import reading, record
from hvd_bert.tools.tune import __main__ as tune

pytestmark = pytest.mark.timeout(300)  # a reader that blocks must fail its test soon

# --- a run's files: the rest of the run is shown, and the run is left out of comparisons --------------

RUN_FILES = {
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
@pytest.mark.parametrize("name", RUN_FILES)
def test_a_run_is_shown_and_left_out(run: Path, name: str, what: str) -> None:
    with hostile.in_place_of(run / name, what):
        shown = record.read(run)
        assert "\x1b" not in run_page.make_page(shown).as_markdown() + "\n".join(run_page.summary(shown))
        if what in hostile.NO_FILES and name not in UNNAMED:
            assert [problem for problem in shown.problems if Path(name).name in problem]
        if RUN_FILES[name]:
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


NONE = Launcher("none", None, None)
NOT_A_NUMBER = ("nan", "-nan")
HUGE = ("inf", "1e300", "9" * 400)
NEGATIVE = ("-inf", "-1e300", "-1")
NO_TIME = (*NOT_A_NUMBER, *HUGE, *NEGATIVE, "")
NO_COUNT = ("99999999999", "-1", "0", "nan", "1e300", "9" * 5000, "1.5", "\u00b2", "")


COMMANDS: dict[str, Callable[[list[str]], object]] = {
    "doctor": lambda flags: doctor.make_parser().parse_args(flags),
    "sweep": lambda flags: sweep.make_parser().parse_known_args(flags),
    "tune": lambda flags: tune.make_parser().parse_known_args(flags),
    "bench": bench.parse,
    "predict": lambda flags: predict.parse_flags(["model", "--input", "file", *flags], NONE),
    "evaluate": lambda flags: evaluate.parse(["model", *flags]),
}
NUMBERS = [
    *(("doctor", "timeout", value) for value in (*NO_TIME, "0")),
    *(("doctor", "size", value) for value in (*NO_TIME, "0")),
    *((command, "timeout", value) for command in ("sweep", "tune") for value in (*NO_TIME, "0")),
    *(("sweep", name, value) for name in ("repeats", "steps", "global_batch") for value in NO_COUNT),
    *(("sweep", "ranks", value) for value in (*NO_COUNT, "1,", "1,99999999999", "1;2")),
    *(("sweep", "epochs", value) for value in ("nan", "inf", "-1", "0", "")),
    ("sweep", "seeds", "1,-2"),
    *(("tune", name, value) for name in ("ranks", "steps", "pairs", "trials") for value in NO_COUNT),
    *(("tune", "minutes", value) for value in (*NO_TIME,)),
    *(("bench", name, value) for name in ("steps", "repeats") for value in NO_COUNT),
    *(("evaluate", "mistakes", value) for value in NO_COUNT if value != "0"),
]


@pytest.mark.parametrize(("command", "name", "value"), NUMBERS)
def test_numbers_are_refused(command: str, name: str, value: str) -> None:
    with pytest.raises(UserError) as raised:
        COMMANDS[command]([f"--{name}={value}"])
    hostile.check_message(str(raised.value), f"--{name}")


NAMES = ["$\\frac{1}$", "$^$", "\x1b]0;title\x07", "a\ud800b", "<script>alert(1)</script>", "a\n# b", "|x|y|"]


def test_names_of_runs_are_only_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As folder, strategy, device, question and warning: in pictures, page, table and terminal.

    One bad run among them does not end the report.
    """
    make_run(tmp_path / "runs" / "none", device_name=NAMES[0])
    for number, name in enumerate(NAMES):
        folder = f"{number}{name}".encode(errors="replace").replace(b"/", b"_")
        run = make_run(tmp_path / "runs" / os.fsdecode(folder + b"\xff"), name, 2, 16, 19.0, device_name=NAMES[0])
        make_samples(run, f"What is {name}?")
        (run / "events.jsonl").write_text(json.dumps({"event": "warning", "message": name}) + "\n")
    make_run(tmp_path / "runs" / "bad", steps=3)
    (tmp_path / "runs" / "bad" / "metrics.jsonl").write_text('{"step": 1, "loss": Infinity}\n' * 2)
    assert report([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == EXIT_OK
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    shown = capsys.readouterr().out + (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert not {"\x1b", "\x07", "\ud800"} & set(shown + page[page.index("<body") :]) and "<script>alert" not in page
    assert "bad: " in shown and "Strong scaling" in shown and "alert(1)" in shown
    assert len(list((tmp_path / "out").glob("*.png"))) == 1
