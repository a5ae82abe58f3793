"""Where the time of a training with kills went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tables import check_refusal

from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_STOPPED
from hvd_bert.tools.bench.goodput import Goodput, Training, main
from hvd_bert.tools.bench.launching import Launching
from hvd_bert.tools.bench.noted import LOST, Account
from hvd_bert.tools.bench.one_run import Stopped


def notes(*rows: str) -> list[dict[str, Any]]:
    """From rows of time, word and, for a step, its number."""
    split = [row.split() for row in rows]
    return [{"time": float(time), "what": what, "step": int(*number), "windows": 5} for time, what, *number in split]


def test_time_is_sorted_into_parts() -> None:
    first = ("100 started", "110 begin", "112 step 1", "114 step 2", "115 kill")
    cases = {
        # A restart from step 1, which is killed again before it trains, and then repeats step 2.
        ("116 ended", "118 kill", "119 ended", "125 begin", "127 step 2", "129 step 3"): [(1, 2, 1), (1, 6, 2)],
        # From memory, after a step that a rank finished after the kill; then with a new rank.
        ("116 step 3", "117 noticed", "118 begin", "120 step 4", "121 noticed", "123 begin"): [(1, 4, 0)],
        # No rank notices, and the launcher starts others.
        ("118 started", "119 begin", "120 step 3"): [(3, 1, 1)],
    }
    for rows, expected in cases.items():
        account = Account(notes(*first, *rows), global_batch=2, duration_s=20)
        lost = [tuple(kill[part] for part in LOST) for kill in account.kills]
        assert lost == expected, rows
        assert sum(account.spent.values()) == pytest.approx(20)
    assert (account.step, account.windows) == (3, 5)  # of 2, 2 and 1 windows
    assert account.kills[0]["next_step_s"] == 5


def test_a_training_without_a_sign_of_life_ends(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo waiting; sleep 600"]
    log, notes = tmp_path / "log", tmp_path / "notes"
    training = Training(command, log, notes, kills=[], duration=600, timeout=0.5, check=lambda: None)
    assert training.run() == "waiting"


def test_a_measurement_that_was_stopped_in_its_first_training_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: Goodput, *_: object) -> None:
        (self.flags.out / "horovod-whole.log").write_text("")
        raise Stopped("SIGTERM")

    monkeypatch.setattr(Launching, "obstacle", lambda *_: "")
    monkeypatch.setattr(Goodput, "_measure", stop)
    for _ in range(2):
        assert main(["--strategies", "horovod", "--out", str(tmp_path / "out")]) == EXIT_STOPPED


@pytest.mark.parametrize(
    ("row", "named"),
    [
        pytest.param({"share": "high"}, "share", id="text"),
        pytest.param({"share": 0.9}, "windows_per_s", id="without kills"),
        pytest.param([], "strategies", id="list"),
        pytest.param(
            {"share": 1, "windows_per_s": 1, "without_kills": 1, "spent": {}, "kills": []}, "useful_s", id="parts"
        ),
    ],
)
def test_a_file_with_other_rows_is_refused(row: object, named: str, tmp_path: Path, capsys: Any) -> None:
    content = {"same": {}, "strategies": {"elastic": row}}
    (tmp_path / "goodput.json").write_text(json.dumps(content))
    assert main(["--out", str(tmp_path)]) == EXIT_BAD_INPUT
    check_refusal(capsys.readouterr().err.rstrip("\n"), "goodput.json", named)
    assert json.loads((tmp_path / "goodput.json").read_text()) == content


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("--max_steps 5", "give --duration"),
        ("--num_train_epochs 5", "give --duration"),
        ("--per_device_train_batch_size 5", "give --global_batch"),
        ("--ranks 3", "other --ranks"),
        ("--elastic", "name elastic with --strategies"),
    ],
)
def test_a_refusal_names_flags_of_the_command(words: str, remedy: str, tmp_path: Path, capsys: Any) -> None:
    assert main([*words.split(), "--out", str(tmp_path / "out")]) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert remedy in error and "weak" not in error and "--steps" not in error


def test_a_million_ranks_are_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(Goodput, "_measure", lambda *_: pytest.fail("started"))
    main(["--ranks", "1000000", "--global_batch", "1000000", "--out", str(tmp_path / "out")])
    assert capsys.readouterr().out.count("1000000 ranks, but") == 4
