"""QuestionAnswerer gives the answers of evaluation in any batch and order; the command `predict` in one process."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from refusals import refused
from test_families import small
from test_train_api import start
from test_world import make_world
from transformers import BertConfig, BertForQuestionAnswering, BertModel

from hvd_bert import QuestionAnswerer
from hvd_bert.config.command_line import parse, trained_settings
from hvd_bert.distributed.devices import RankInfo
from hvd_bert.distributed.launch import Launcher
from hvd_bert.distributed.world import CollectiveError, World
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_OK
from hvd_bert.evaluation.postprocess import Answer
from hvd_bert.model.cpu import kernels
from hvd_bert.model.families import model_class
from hvd_bert.model.layers import place
from hvd_bert.predict import answerer
from hvd_bert.predict.__main__ import main, parse_flags
from hvd_bert.predict.answering import COLUMNS, answer_file
from hvd_bert.tasks.question_answering import QuestionAnswering

ALONE = Launcher("none", None, None)
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SETTINGS = {"max_seq_length": 40, "doc_stride": 8, "n_best_size": 5, "max_answer_length": 6}


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory) -> Path:
    """The folder of a "trained" model with settings of its own; its large weights make large differences of logits."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    config = BertConfig(vocab_size=len(tokenizer), initializer_range=0.3, **SHAPE)
    BertForQuestionAnswering(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    record(folder, **SETTINGS)
    return folder


def record(folder: Path, **settings: object) -> None:
    (folder / "train_config.yaml").write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))


@pytest.fixture(scope="module")
def qa(model) -> QuestionAnswerer:
    return QuestionAnswerer(model)


@pytest.fixture(scope="module")
def questions(make_questions):
    """Questions with one to four windows."""
    made = make_questions(30, unanswered_every=4)
    return [replace(q, context=" ".join([q.context] * (1 + i % 4))) for i, q in enumerate(made)]


def test_lists_keep_their_order(qa, questions):
    asked = [(q.question, q.context) for q in questions[:7]]
    one_by_one = [qa(question, context) for question, context in asked]
    assert len({answer.text for answer in one_by_one}) > 1
    texts, contexts = zip(*asked, strict=True)
    same(qa(texts, contexts), one_by_one)
    same(qa(list(texts), contexts[3])[3:4], one_by_one[3:4])
    same(qa(texts[2], list(contexts))[2:3], one_by_one[2:3])
    assert qa([], []) == qa([], "The box.") == []


def test_questions_and_answers_in_the_shape_of_a_pipeline(qa, questions):
    asked = [{"question": q.question, "context": q.context} for q in questions[:3]]
    answers = qa(asked)
    same(answers, [qa(**one) for one in asked])
    one = qa(asked[0])
    assert [one[key] for key in ("answer", "start", "end", "score")] == [one.text, one.start, one.end, one.score]
    assert qa(asked[0], top_k=2) == list(one.nbest[:2])
    assert [[best["answer"] for best in top] for top in qa(asked, top_k=1)] == [[a.nbest[0].text] for a in answers]
    for wrong in ({"question": "Who?"}, [{"context": "Ada."}], "Who?", ["Who?"]):
        with refused("context"):
            qa(wrong)
    with refused("top_k 0"):
        qa(asked[0], top_k=0)


def same(found: list[Answer], expected: list[Answer]) -> None:
    """The same texts and places; numbers to the last bit where products do not depend on the other rows."""
    assert [places(answer) for answer in found] == [places(answer) for answer in expected]
    if kernels.active("fp32").linear == kernels.ONEDNN:
        assert found == expected
    assert [answer.score for answer in found] == pytest.approx([answer.score for answer in expected], abs=1e-5)


def places(answer: Answer) -> list[tuple[str, int | None, int | None]]:
    return [(one.text, one.start, one.end) for one in (answer, *answer.nbest)]


@pytest.mark.parametrize("version_2", [False, True])
def test_answers_are_those_of_evaluation(model, questions, write_squad, tmp_path, monkeypatch, version_2):
    if not version_2:
        questions = [question for question in questions if question.answer_texts]
    flags = ["--no_do_train", "--model_name_or_path", str(model), "--validation_file", str(write_squad(questions))]
    flags += [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    config = parse([*flags, "--null_score_diff_threshold", "-5.5", *["--version_2_with_negative"] * version_2])
    task = QuestionAnswering(config, make_world())
    place(task.model, torch.device("cpu"))
    evaluated = task.evaluate(task.model).outputs
    assert {bool(answer.text) for answer in evaluated} == ({True, False} if version_2 else {True})

    monkeypatch.setattr(answerer, "BLOCK_QUESTIONS", 7)
    asked = task.dev.questions  # in the file's order, with the answers, which must not matter
    for batch_size, order in ((8, 1), (3, -1), (1, 1)):
        qa = QuestionAnswerer(
            model, batch_size=batch_size, version_2_with_negative=version_2, null_score_diff_threshold=-5.5
        )
        answers = list(qa.answers(asked[::order]))
        same(answers[::order], evaluated)


@pytest.mark.slow
def test_copies_also_in_another_process_give_the_same_answers(tokenizer, questions, tmp_path):
    asked = [{"question": q.question, "context": q.context} for q in questions[:3]]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for name in ("bert", "roberta", "distilbert", "longformer"):
            config = small(name)
            config.vocab_size = len(tokenizer)
            model_class(config)(config).save_pretrained(tmp_path / name)
            tokenizer.save_pretrained(tmp_path / name)
            qa = QuestionAnswerer(tmp_path / name, max_seq_length=40, doc_stride=8)
            expected = qa(asked)
            same(pool.apply(qa, (asked,)), expected)
            for copied in (pickle.loads(pickle.dumps(qa)), copy.deepcopy(qa)):
                same(copied(asked), expected)


def test_settings_are_those_of_the_training(model, tmp_path):
    def options(**given: int) -> tuple[int, int, int, bool]:
        qa = QuestionAnswerer(tmp_path, **given)
        windows, spans = qa.window_options, qa.span_options
        return windows.max_seq_length, windows.doc_stride, spans.n_best_size, spans.version_2_with_negative

    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "train_config.yaml").unlink()
    assert options() == (384, 128, 20, False)
    tokenizer = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"model_max_length": 90}))
    assert options() == (90, 30, 20, False)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    record(tmp_path, max_seq_length=128, doc_stride=100, n_best_size=3, version_2_with_negative=True)
    assert options() == (128, 100, 3, True)
    record(tmp_path, max_seq_length=384, doc_stride=128, n_best_size=3, version_2_with_negative=True)
    assert options(max_seq_length=256) == (256, 128, 3, True), "an evaluation has these windows, too"
    with refused("--max_seq_length 60", "--doc_stride 128"):
        options(max_seq_length=60)
    assert options(max_seq_length=120, doc_stride=5, n_best_size=4) == (120, 5, 4, True)


def test_truncated_questions_are_reported_once(model, caplog):
    qa = QuestionAnswerer(model)
    qa("What is red?", "The box is red.")
    assert not caplog.messages
    for _ in range(2):
        qa("What is red? " * 30, "The box is red.")
    assert len(caplog.messages) == 1 and "--max_seq_length" in caplog.text


@pytest.mark.parametrize(
    ("question", "context", "named"),
    [
        ("Who?", " \n", ["context"]),
        ("Who?", ["Ada.", "A\ud800"], ["question 1", "its context"]),
        (["Who?", "Where?"], ["a", "b", "c"], [2, 3]),
        (5, "Ada.", ["question 5", "str"]),
        ({"question": "Who?", "context": "Ada."}, "Ada.", ["one context"]),
    ],
)
def test_what_cannot_be_answered(qa, question, context, named):
    with refused(*named):
        qa(question=question, context=context)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"precision": "int8"}, ["precision 'int8'", "fp32, bf16, fp16"]),
        ({"batch_size": 0}, ["batch_size 0"]),
        ({"device": "cuda:99"}, ["device 'cuda:99'"]),
        ({"max_seq_length": 0}, ["max_seq_length 0"]),
        ({"max_seq_length": 9999}, ["max_seq_length 9999", 512]),
        ({"doc_stride": 60}, ["max_seq_length 40", "doc_stride 60"]),
        ({"model": ""}, ["model ''"]),
        ({"model": "n" * 300}, ["n" * 300]),
        ({"batch_size": 2.5}, ["batch_size 2.5", "int"]),
        ({"doc_stride": True}, ["doc_stride True", "int"]),
    ],
)
def test_wrong_settings(model, settings, named):
    with refused(*named):
        QuestionAnswerer(**{"model": model} | settings)


def test_settings_may_be_numpys_numbers_and_questions_a_column(model):
    qa = QuestionAnswerer(model, batch_size=np.int64(4), null_score_diff_threshold=np.float32(1), n_best_size=3)
    answers = qa(pandas.Series(["What is red?", "What?"], index=[5, 7]), "The box is red. The hall is green.")
    assert [len(answer.nbest) <= 3 for answer in answers] == [True, True]


def test_a_callback_may_answer_and_leaves_its_training_alone(model, tmp_path):
    def answer() -> None:
        assert QuestionAnswerer(model)("What is red?", "The box is red.").text is not None

    assert start(tmp_path / "asked", answer)[1][1:-1] == start(tmp_path / "alone")[1][1:-1]


def test_loading_leaves_random_numbers_alone(model, monkeypatch):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _: pytest.fail("seeds the GPUs"))
    QuestionAnswerer(model)
    assert torch.rand(1) == expected


def test_blocks_are_small(make_questions):
    questions = [replace(q, context=q.context[:10]) for q in make_questions(200)]
    questions[100:102] = [replace(q, context="a" * answerer.BLOCK_CHARACTERS) for q in questions[100:102]]
    parts = list(answerer.blocks(questions))
    assert [question for part in parts for question in part] == questions
    assert [len(part) for part in parts] == [64, 36, 1, 1, 64, 34]
    assert list(answerer.blocks([])) == []


def test_trained_settings_of_a_wrong_type(tmp_path):
    record(tmp_path, max_seq_length="2.5")
    with refused("train_config.yaml", "2.5"):
        QuestionAnswerer(tmp_path)


def test_model_of_another_task_is_refused(tmp_path):
    record(tmp_path, task="digits:Digits")
    with refused("--task digits:Digits", f"hvd-bert predict {tmp_path} --input"):
        QuestionAnswerer(tmp_path)


def test_settings_of_a_checkpoint_are_found_by_any_name(tmp_path, monkeypatch):
    record(tmp_path, seed=5)
    checkpoint = tmp_path / "checkpoint-6"
    checkpoint.mkdir()
    (tmp_path / "best").symlink_to(checkpoint)
    (tmp_path / "checkpoint-7").symlink_to(tmp_path)
    monkeypatch.chdir(checkpoint)
    for name in (checkpoint, tmp_path / "best", tmp_path / "checkpoint-7", "."):
        assert trained_settings(str(name)) == {"seed": 5}


def test_model_without_a_span_head_is_refused_unless_it_is_trained(tokenizer, tmp_path, write_squad, make_questions):
    BertModel(BertConfig(vocab_size=len(tokenizer), **SHAPE), add_pooling_layer=False).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    file = str(write_squad(make_questions(2)))
    flags = ["--model_name_or_path", str(tmp_path), "--train_file", file, "--validation_file", file]
    named = (tmp_path, "qa_outputs.bias, qa_outputs.weight")
    with refused(*named):
        QuestionAnswerer(tmp_path)
    with refused(*named):
        QuestionAnswering(parse([*flags, "--no_do_train"]), make_world())
    QuestionAnswering(parse(flags), make_world())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], ["--question", "--context", "--input FILE"]),
        (["--question", " ", "--context", "a"], ["--question", "--context"]),
        (["--input", "a", "--question", "a"], ["--input", "--question"]),
        (["--output", "a.jsonl"], ["--output a.jsonl", "--input"]),
        (["--input", "a", "--output", "a.txt"], ["--output a.txt", ".jsonl", ".csv", ".parquet"]),
    ],
)
def test_wrong_command_lines(words, named):
    with refused(*named):
        parse_flags(["MODEL", *words], ALONE)


def test_only_files_are_answered_by_several_ranks():
    launcher = Launcher("mpirun", 2, 0)
    for words in (["--question", "a", "--context", "b"], ["--input", "a"]):
        with refused("mpirun", "2 processes", "--input", "--output"):
            parse_flags(["MODEL", *words], launcher)
    assert parse_flags(["MODEL", "--input", "a", "--output", "a.jsonl"], launcher)


def test_one_question(model, capsys):
    asked = {"question": "What is red?", "context": "The box is red. The hall is green."}
    answer = QuestionAnswerer(model)(**asked)
    assert main([str(model), "--question", asked["question"], "--context", asked["context"]]) == EXIT_OK
    line = f"  A: {answer.text}  (probability {answer.score:.2f})"
    assert capsys.readouterr().out == f"  {asked['context']}\n  Q: {asked['question']}\n{line}\n"
    assert main([str(model), "--question", "Who?", "--context", " "]) == EXIT_BAD_INPUT
    assert "its context is empty" in capsys.readouterr().err


def test_a_few_answers_are_printed(model, questions, write_squad, capsys):
    assert main([str(model), "--input", str(write_squad(questions))]) == EXIT_OK
    printed = capsys.readouterr().out
    for question in (questions[0], questions[10], questions[20]):
        assert f"  Q: {question.question}\n  A: " in printed
    assert printed.count("  A: ") == 3 and "  expected: blue\n" in printed
    assert printed.endswith("3 of 30 questions. To answer all of them, name a file with --output.\n")


def test_printed_texts_are_no_commands_to_the_terminal(model, make_questions, write_squad, capsys, monkeypatch):
    asked = [replace(q, question="Who\x1b[31m?", context=f"{q.context}\x1b[31m") for q in make_questions(1)]
    answers = [SimpleNamespace(text="a\x1b]0;b", score=1.0)]
    monkeypatch.setattr(QuestionAnswerer, "answers", lambda *_: answers)
    assert main([str(model), "--input", str(write_squad(asked))]) == EXIT_OK
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and printed.count(r"\x1b") == 3


def answered(*words: object, world: World | None = None, by: Any = answer_file) -> None:
    flags = parse_flags([str(word) for word in words], ALONE)
    flags.strategy = "none"
    by(flags, world or one_rank())


def one_rank() -> World:
    world = make_world()
    world.rank_infos = (RankInfo(0, "here", 0, "cpu", None, frozenset()),)
    return world


@pytest.mark.parametrize("what", ["the model", "the tokenizer", "the settings", "the input"])
def test_ranks_with_other_inputs_are_refused(model, tmp_path, monkeypatch, what):
    (tmp_path / "asked.jsonl").write_text(json.dumps({"question": "Who?", "context": "Ada."}) + "\n")
    world = one_rank()
    world.rank_infos *= 2

    def gathered(value: object) -> list[object]:
        return [value, value | {what: "another"} if isinstance(value, dict) else value]

    monkeypatch.setattr(world, "allgather", gathered)
    with refused(what, "rank 0", error=CollectiveError):
        answered(model, "--input", tmp_path / "asked.jsonl", "--output", tmp_path / "a.jsonl", world=world)


def test_files_of_others_stay_and_a_full_disk_leaves_none(model, tmp_path):
    (tmp_path / "asked.jsonl").write_text(json.dumps({"question": "Who?", "context": "Ada."}) + "\n")
    words = (model, "--input", tmp_path / "asked.jsonl", "--output")
    (tmp_path / "mine.jsonl").write_text("mine")
    with refused("--output", "mine.jsonl", "--overwrite", error=CollectiveError):
        answered("no model", *words[1:], tmp_path / "mine.jsonl")
    assert (tmp_path / "mine.jsonl").read_text() == "mine"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(CollectiveError, match=r"answers\.jsonl cannot be written: File too large") as failed:
            answered(*words, tmp_path / "new" / "answers.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert failed.value.status == EXIT_FAILURE
    assert os.listdir(tmp_path / "new") == []


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_file_of_answers(model, questions, tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(answerer, "BLOCK_QUESTIONS", 13)
    questions = [*questions[:2], replace(questions[2], context='Zo\u00eb, "a"\rb,\nc is red.'), *questions[3:]]
    asked = [{"id": q.id, "passage": q.context, "query": q.question} for q in questions]
    file, output = tmp_path / "asked.jsonl", tmp_path / f"answers{suffix}"
    file.write_text("".join(json.dumps(row) + "\n" for row in asked))
    words = (model, "--input", file, "--output", output, "--question_column", "query", "--context_column", "passage")
    answered(*words, "--n_best", "0")
    assert [*read_rows(output)[0]] == [*COLUMNS]
    answered(*words, "--overwrite")  # the first
    rows = read_rows(output)
    for row, question, found in zip(rows, questions, QuestionAnswerer(model).answers(questions), strict=True):
        values = (question.id, question.question, question.context, found.text)
        assert tuple(row[name] for name in COLUMNS) == (*values, found.start, found.end, found.score, found.null_odds)
        assert [entry["text"] for entry in row["nbest"]] == [candidate.text for candidate in found.nbest]
        assert row["nbest"][0].keys() == {"text", "start", "end", "probability", "start_logit", "end_logit"}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of answers, as others read them."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_bytes().decode().splitlines()]
    rows = {".csv": pandas.read_csv, ".parquet": pandas.read_parquet}[path.suffix](path, dtype_backend="pyarrow")
    return [
        row | ({"nbest": json.loads(row["nbest"])} if path.suffix == ".csv" and "nbest" in row else {})
        for row in rows.to_dict("records")
    ]
