"""Names that no file can have, and files that would exhaust Python's stack or the memory: one message each."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import refused

from hvd_bert import train
from hvd_bert.config import command_line
from hvd_bert.data.sources import files, squad
from hvd_bert.errors import EXIT_BAD_INPUT, UserError
from hvd_bert.hub import json_file
from hvd_bert.predict.__main__ import main as predict
from hvd_bert.storage.reading import read_json
from hvd_bert.storage.writing import check_output, partial_path, write_json
from hvd_bert.tools.bench import sweep
from hvd_bert.tools.bench.record import opened
from hvd_bert.tools.doctor.__main__ import main as doctor
from hvd_bert.tools.report.__main__ import main as report
from hvd_bert.tools.timeline.__main__ import main as timeline

LONG = "n" * 300
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000


@pytest.mark.parametrize(
    ("command", "words"),
    [
        pytest.param(report, [LONG], id="report"),
        pytest.param(report, ["run", "--out", LONG], id="report --out"),
        pytest.param(timeline, [LONG], id="timeline"),
        pytest.param(timeline, ["timeline.json", "--html", LONG], id="timeline --html"),
        pytest.param(predict, [LONG, "--context", "a", "--question", "b"], id="predict"),
        pytest.param(predict, [".", "--input", LONG], id="predict --input"),
        pytest.param(sweep.main, ["--ranks", "1", "--out", LONG], id="sweep --out"),
        pytest.param(doctor, ["--log", LONG], id="doctor --log"),
        pytest.param(doctor, ["--hostfile", LONG], id="doctor --hostfile"),
    ],
)
def test_name_that_is_too_long(
    command: Callable[[list[str]], int], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(words) == EXIT_BAD_INPUT
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert LONG in printed.err or "predict" in command.__module__


@pytest.mark.parametrize("flag", ["model_name_or_path", "config_name", "tokenizer_name", "train_file", "output_dir"])
@pytest.mark.parametrize("name", [LONG, "a\0b"], ids=["long", "NUL"])
def test_name_that_a_program_gives_to_train(flag: str, name: str, tmp_path: Path) -> None:
    given = {"config": "sample", "max_steps": 1, "output_dir": tmp_path / "run", flag: name}
    with pytest.raises(UserError) as raised:
        train(**given)
    assert (name if name == LONG else "NUL") in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_nul_in_a_file_of_flags(tmp_path: Path) -> None:
    (tmp_path / "flags.yaml").write_text('train_file: "a\\0b"\n')
    with refused("flags.yaml", "train_file", "NUL"):
        command_line.parse(["--config", str(tmp_path / "flags.yaml")])


@pytest.mark.parametrize("read", [read_json, lambda path: json_file(str(path.parent), path.name, None, "main")])
def test_json_that_is_nested_too_deep(read: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(DEEP)
    with pytest.raises(ValueError, match="nested too deep"):
        read(tmp_path / "config.json")


def test_gzip_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "GIB", 2**20)
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(bytes(2**24)))
    with refused("bomb.json.gz", "gzip"):
        squad.open_file(str(tmp_path / "bomb.json.gz"), version_2_with_negative=False).questions()


@pytest.mark.parametrize("name", ["a" * 240, "a" * 250 + ".json", "\u20ac" * 80], ids=["240", "255", "UTF-8"])
def test_output_with_a_long_name_is_written(name: str, tmp_path: Path) -> None:
    path = check_output(tmp_path / name, overwrite=False)
    partial_path(path).write_text("the leftover of a killed writer")
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("mine"), lambda path: path.symlink_to("no")])
def test_tools_do_not_write_through_links(make: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    (tmp_path / "mine").write_text("mine")
    make(tmp_path / "study.log")
    with refused(tmp_path, "study.log"), opened(tmp_path, "sweep.json", lambda: pytest.fail("begun")):
        pass
    assert (tmp_path / "mine").read_text() == "mine"
