"""Files of questions that are no JSON files, or JSON that a parser cannot hold."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zipfile
from pathlib import Path

import pytest

from hvd_bert.data import squad
from hvd_bert.errors import UserError

pytestmark = pytest.mark.timeout(60)  # a file that blocks must fail its test soon


def refusal(path: str | Path) -> str:
    with pytest.raises(UserError) as refused:
        squad.open_file(path, False).questions()
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "compress"), [("gzip", gzip.compress), ("bzip2", bz2.compress), ("xz", lzma.compress)]
)
def test_compressed(tmp_path, name, compress):
    path = tmp_path / "train.json"
    path.write_bytes(compress(b'{"data": []}'))
    assert refusal(path) == f"{path}: compressed with {name}. Decompress the file first."


def test_zip(tmp_path):
    with zipfile.ZipFile(tmp_path / "train.json", "w") as file:
        file.writestr("train.json", "{}")
    assert "compressed with zip" in refusal(tmp_path / "train.json")


def test_pipes_and_devices_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        assert refusal(path).startswith(f"{path}: cannot be read: it is a pipe or a device")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[" * 20_000, "not in SQuAD's format: maximum recursion depth exceeded"),
        ('{"data":' * 20_000, "not in SQuAD's format: maximum recursion depth exceeded"),
        ('{"id": "a"}\n' + "[" * 20_000, "at line 2"),
        ('{"data": [' + "9" * 5000 + "]}", "not in SQuAD's format: Exceeds the limit"),
        ('{"id": "a"}\n' + "9" * 5000, "at line 2"),
        ('{"' + "x" * 10**6 + '": 1}', "found an object with 'xxx"),
    ],
    ids=["lists", "objects", "rows", "digits", "digits in a row", "long key"],
)
def test_content_that_no_question_has(tmp_path, content, words):
    (tmp_path / "train.json").write_text(content)
    message = refusal(tmp_path / "train.json")
    assert words in message and len(message) < 500
