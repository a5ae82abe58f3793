"""The prediction's settings, from its flags and from the model's training."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_bert.errors import UserError
from hvd_bert.evaluation.postprocess import SpanOptions
from hvd_bert.predict.__main__ import make_parser
from hvd_bert.predict.answering import _questions, _take_trained_settings, predict


def settings_after(folder: Path, record: str, *flags: str) -> tuple[int | None, bool]:
    (folder / "train_config.yaml").write_text(record)
    parsed = make_parser().parse_args([str(folder), *flags])
    _take_trained_settings(parsed)
    return parsed.max_seq_length, parsed.version_2_with_negative


def test_trained_settings_are_the_defaults(tmp_path):
    record = "max_seq_length: 128\nversion_2_with_negative: true\n"
    assert settings_after(tmp_path, record) == (128, True)
    assert settings_after(tmp_path, record, "--max_seq_length", "64") == (64, True)
    assert settings_after(tmp_path, "seed: 1") == (None, False)


@pytest.mark.parametrize("value", ["abc", "1e9", "2.5", "true"])
def test_trained_settings_of_a_wrong_type(tmp_path, value):
    with pytest.raises(UserError, match=f"train_config.yaml: .*max.seq.length: invalid int value: .{value}"):
        settings_after(tmp_path, f"max_seq_length: {value}")


def test_model_of_another_task_is_refused(tmp_path):
    with pytest.raises(UserError, match="was trained with --task text-classification: it answers no questions"):
        settings_after(tmp_path, "task: text-classification")


@pytest.mark.parametrize("length", [0, -5])
def test_too_short_windows(length):
    with pytest.raises(UserError, match=f"--max_seq_length {length}: must be at least 1"):
        predict("nowhere", [], SpanOptions(), length)


def test_questions_of_a_csv_file_without_answers(tmp_path):
    file = tmp_path / "asked.csv"
    file.write_text('passage,query\n"Ada, of London.",Who?\n"Bob\nof Rome.",Where?\n')
    columns = ["--context_column", "passage", "--question_column", "query"]
    flags = make_parser().parse_args(["MODEL", "--questions_file", str(file), "--num_questions", "2", *columns])
    assert [(q.context, q.question) for q in _questions(flags)] == [
        ("Ada, of London.", "Who?"),
        ("Bob\nof Rome.", "Where?"),
    ]
