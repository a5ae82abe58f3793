"""Numbers that no flag can take, and names of runs that are markup or commands."""

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
from hvd_bert.predict import __main__ as predict
from hvd_bert.tools.bench import __main__ as bench
from hvd_bert.tools.bench import sweep
from hvd_bert.tools.doctor import __main__ as doctor
from hvd_bert.tools.evaluate import __main__ as evaluate
from hvd_bert.tools.report.__main__ import main as report
from hvd_bert.tools.tune import __main__ as tune

pytestmark = pytest.mark.timeout(300)

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
