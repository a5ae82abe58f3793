"""The prediction's settings, from its flags and from the model's training."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_world import make_world
from transformers import BertConfig, BertModel

from hvd_bert.config.command_line import parse
from hvd_bert.errors import UserError
from hvd_bert.evaluation.postprocess import SpanOptions
from hvd_bert.predict.__main__ import make_parser
from hvd_bert.predict.answering import _questions, _take_trained_settings, predict
from hvd_bert.training.inputs import load_inputs


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


def test_model_without_a_span_head_is_refused_unless_it_is_trained(tokenizer, tmp_path, write_squad, make_questions):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes), add_pooling_layer=False).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    file = str(write_squad(make_questions(2)))
    flags = ["--model_name_or_path", str(tmp_path), "--train_file", file, "--validation_file", file]
    words = rf"^{tmp_path} has no span head \(qa_outputs\.bias, qa_outputs\.weight\), so its answers would be"
    with pytest.raises(UserError, match=words):
        predict(str(tmp_path), make_questions(1), SpanOptions())
    with pytest.raises(UserError, match=words):
        load_inputs(parse([*flags, "--no_do_train"]), make_world())
    load_inputs(parse(flags), make_world())


def test_columns_must_differ():
    flags = make_parser().parse_args(["MODEL", "--questions_file", "file.csv", "--context_column", "question"])
    with pytest.raises(UserError, match=r"\(question, question, answers\): give three different names"):
        _questions(flags)


def test_questions_of_a_csv_file_without_answers(tmp_path):
    file = tmp_path / "asked.csv"
    file.write_text('passage,query\n"Ada, of London.",Who?\n"Bob\nof Rome.",Where?\n')
    columns = ["--context_column", "passage", "--question_column", "query"]
    flags = make_parser().parse_args(["MODEL", "--questions_file", str(file), "--num_questions", "2", *columns])
    assert [(q.context, q.question) for q in _questions(flags)] == [
        ("Ada, of London.", "Who?"),
        ("Bob\nof Rome.", "Where?"),
    ]
