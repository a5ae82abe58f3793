"""Files of questions that are no JSON files, or JSON that a parser cannot hold."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zipfile
from pathlib import Path

import pytest
from tables import check_refusal, each

from hvd_bert.data.sources import squad
from hvd_bert.errors import UserError

pytestmark = pytest.mark.timeout(300)  # a file that blocks must fail its test soon


def refusal(path: str | Path) -> str:
    with pytest.raises(UserError) as refused:
        squad.open_file(path, False).questions()
    return str(refused.value)


def zipped(content: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("train.json", content)
    return out.getvalue()


def gzipped_twice(content: bytes) -> bytes:
    return gzip.compress(gzip.compress(content))


@each(("name", "compress"), [("gzip", gzipped_twice), ("bzip2", bz2.compress), ("xz", lzma.compress), ("zip", zipped)])
def test_compressed(tmp_path, name, compress):
    path = tmp_path / "train.json"
    path.write_bytes(compress(b'{"data": []}'))
    check_refusal(refusal(path), path, name)


@each("content", [gzip.compress(b'{"data": []}' * 100)[:-20], b"\x1f\x8b" + b"no gzip" * 10])
def test_damaged_gzip(tmp_path, content):
    path = tmp_path / "train.json.gz"
    path.write_bytes(content)
    check_refusal(refusal(path), path, "gzip")


def test_damaged_parquet(tmp_path):
    path = tmp_path / "train.parquet"
    path.write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    check_refusal(refusal(path), path, "Parquet")


@each(
    ("content", "named"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 30288272\n", "git lfs pull"),
        (b"\n <!DOCTYPE html><html><head>Sign in</head></html>", "HTML"),
        (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "XML"),
        (b"[{'id': 'a'}, {'id': 'b'}]", "not JSON"),
        (b"{'id': 'a'}\n{'id': 'b'}\n", "not JSON"),
        ('{"data": []}'.encode("utf-16"), "byte 0"),
        ('{"data": []}'.encode("utf-16-le"), ""),
        (b"7z\xbc\xaf\x27\x1c" + bytes(9), "7z"),
        (bytes(100), ""),
        ('{"data": "é"}'.encode("latin-1"), "byte 10"),
        (b"Entry not found", '"Entry not found"'),
        (b"id,text,label\n1,a,b\n", "--question_column"),
    ],
)
def test_files_that_are_not_data(tmp_path, content, named):
    for packed in (content, gzip.compress(content)):
        (tmp_path / "train.json").write_bytes(packed)
        message = refusal(tmp_path / "train.json")
        check_refusal(message, named)
        assert message.startswith(f"{tmp_path / 'train.json'}: ") and len(message) < 500


def test_pipes_and_devices_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        assert refusal(path).startswith(f"{path}: cannot be read: it is a pipe or a device")


@each(
    ("content", "words"),
    [
        ("[" * 20_000, ""),
        ('{"data":' * 20_000, ""),
        ('{"id": "a"}\n' + "[" * 20_000, "line 2"),
        ('{"data": [' + "9" * 5000 + "]}", ""),
        ('{"id": "a"}\n' + "9" * 5000, "line 2"),
        ('{"' + "x" * 10**6 + '": 1}', "'xxx"),
    ],
    ids=["lists", "objects", "rows", "digits", "digits in a row", "long key"],
)
def test_content_that_no_question_has(tmp_path, content, words):
    (tmp_path / "train.json").write_text(content)
    message = refusal(tmp_path / "train.json")
    assert words in message and len(message) < 500
