"""QuestionAnswerer gives the same answers as evaluation, for any batch size and order of questions."""

from __future__ import annotations

import asyncio
import copy
import json
import multiprocessing
import pickle
import threading
from dataclasses import replace
from pathlib import Path

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
from hvd_bert.evaluation.postprocess import Answer
from hvd_bert.model.cpu import kernels
from hvd_bert.model.families import model_class
from hvd_bert.model.layers import place
from hvd_bert.predict import answerer
from hvd_bert.tasks.question_answering import QuestionAnswering

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SETTINGS = {"max_seq_length": 40, "doc_stride": 8, "n_best_size": 5, "max_answer_length": 6}


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory) -> Path:
    """Save a model with its tokenizer and settings. Its random weights are large, so that logits differ clearly."""
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
    """Make questions whose contexts repeat a passage one to four times, so that their numbers of windows differ."""
    made = make_questions(30, unanswered_every=4)
    return [replace(q, context=" ".join([q.context] * (1 + i % 4))) for i, q in enumerate(made)]


def test_lists_keep_their_order(qa, questions):
    asked = [(q.question, q.context) for q in questions[:7]]
    single = [qa(question, context) for question, context in asked]
    assert len({answer.text for answer in single}) > 1
    texts, contexts = zip(*asked, strict=True)
    same(qa(texts, contexts), single)
    same(qa(list(texts), contexts[3])[3:4], single[3:4])
    same(qa(texts[2], list(contexts))[2:3], single[2:3])
    assert qa([], []) == qa([], "The box.") == []


def test_dictionaries_and_top_k_as_in_transformers_pipeline(qa, questions):
    asked = [{"question": q.question, "context": q.context} for q in questions[:3]]
    answers = qa(asked)
    same(answers, [qa(**question) for question in asked])
    first = qa(asked[0])
    assert len(repr(first)) < 240  # not with the n best
    found = [first[key] for key in ("answer", "start", "end", "score")]
    assert found == [first.text, first.start, first.end, first.score]
    assert qa(asked[0], top_k=2) == list(first.nbest[:2])
    assert {qa(asked[0], top_k=top_k)[0].score for top_k in (1, 25)} == {first.score}
    assert [[best["answer"] for best in top] for top in qa(asked, top_k=1)] == [[a.nbest[0].text] for a in answers]
    repeated = {"question": "Who?", "context": " ".join(["The box is red. The hall is green."] * 9)}
    places = [(candidate.start, candidate.end) for candidate in qa(repeated).nbest]
    assert len(set(places)) == len(places) == SETTINGS["n_best_size"]
    for top_k in (SETTINGS["n_best_size"], 12):
        top = qa(repeated, top_k=top_k)
        assert len({candidate.text for candidate in top}) == len(top) == top_k
        assert top[0].text == qa(repeated).text
    with refused("top_k 0"):
        qa(asked[0], top_k=0)


def same(found: list[Answer], expected: list[Answer]) -> None:
    """Compare texts and positions exactly, and scores to 1e-5, because a batch's other rows may change rounding.

    oneDNN computes each row alike in any batch, so with it the answers must be equal.
    """
    assert [positions(answer) for answer in found] == [positions(answer) for answer in expected]
    if kernels.active("fp32").linear == kernels.ONEDNN:
        assert found == expected
    assert [answer.score for answer in found] == pytest.approx([answer.score for answer in expected], abs=1e-5)


def positions(answer: Answer) -> list[tuple[str, int | None, int | None]]:
    return [(span.text, span.start, span.end) for span in (answer, *answer.nbest)]


@pytest.mark.parametrize("version_2", [False, True])
def test_answers_equal_those_of_an_evaluation(model, questions, write_squad, tmp_path, monkeypatch, version_2):
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
    asked = task.dev.questions  # in the file's order, with gold answers, which must not affect the result
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


def test_settings_come_from_the_training(model, tmp_path):
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
    assert options(max_seq_length=256) == (256, 128, 3, True), "an evaluation cuts the same windows"
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
        *((question, None, ["one context"]) for question in ({"question": "Who?"}, [{"context": "Ada."}], "Who?")),
    ],
)
def test_questions_that_cannot_be_answered(qa, question, context, named):
    with refused(*named):
        qa(question=question, context=context)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"precision": "int8"}, ["precision 'int8'", "fp32, bf16, fp16"]),
        ({"batch_size": 0}, ["batch_size 0"]),
        ({"device": "cuda:99"}, ["device 'cuda:99'"]),
        ({"device": "meta"}, ["device 'meta'"]),
        ({"max_seq_length": 0}, ["max_seq_length 0"]),
        ({"max_seq_length": 9999}, ["max_seq_length 9999", 512]),
        ({"doc_stride": 60}, ["max_seq_length 40", "doc_stride 60"]),
        ({"model": ""}, ["model ''"]),
        ({"model": "s3://b/model"}, ["model 's3://b/model'"]),
        ({"model": "n" * 300}, ["n" * 300]),
        ({"batch_size": 2.5}, ["batch_size 2.5", "int"]),
        ({"doc_stride": True}, ["doc_stride True", "int"]),
    ],
)
def test_wrong_settings(model, settings, named):
    with refused(*named):
        QuestionAnswerer(**{"model": model} | settings)


def test_numbers_of_numpy_and_a_column_of_pandas(model):
    qa = QuestionAnswerer(model, batch_size=np.int64(4), null_score_diff_threshold=np.float32(1), n_best_size=3)
    answers = qa(pandas.Series(["What is red?", "What?"], index=[5, 7]), "The box is red. The hall is green.")
    assert [len(answer.nbest) <= 3 for answer in answers] == [True, True]


def test_answering_in_a_callback_does_not_change_the_training(model, tmp_path):
    def answer() -> None:
        assert QuestionAnswerer(model)("What is red?", "The box is red.").text is not None

    assert start(tmp_path / "asked", answer)[1][1:-1] == start(tmp_path / "alone")[1][1:-1]


def test_loading_draws_no_random_numbers(model, monkeypatch):
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


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_seq_length": "2.5"}, ["train_config.yaml", "2.5"]),
        ({"task": "digits:Digits"}, ["--task digits:Digits", "hvd-bert predict"]),
    ],
)
def test_trained_settings_that_cannot_be_used(tmp_path, settings, named):
    record(tmp_path, **settings)
    with refused(tmp_path, *named):
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


def test_questions_that_arrive_during_a_batch_share_the_next_one(qa, questions):
    pytest.importorskip("fastapi", reason="needs env/setup.sh --dev")
    from answer_server import Batches, Request

    requests = [Request(question=q.question, context=q.context) for q in questions[:9]]
    started, arrived, sizes = threading.Event(), threading.Event(), []

    class Slow:
        """Begins its first batch, then waits for more questions. Fails for the sixth question."""

        def __call__(self, batch, top_k):
            sizes.append(len(batch))
            started.set()
            assert arrived.wait(60)
            if requests[5].model_dump(exclude={"top_k"}) in batch:
                raise MemoryError
            return qa(batch, top_k=top_k)

    async def ask():
        batches = Batches(Slow(), size=4)
        running = asyncio.create_task(batches.run())
        asked = [asyncio.create_task(batches.answer(requests[0]))]
        await asyncio.to_thread(started.wait, 60)
        asked += [asyncio.create_task(batches.answer(request)) for request in requests[1:]]
        while batches.waiting.qsize() < len(requests) - 1:
            await asyncio.sleep(0)
        asked[8].cancel()
        arrived.set()
        found = await asyncio.gather(*asked, return_exceptions=True)
        running.cancel()
        return found, batches.questions

    found, count = asyncio.run(ask())
    assert (sizes, count) == ([1, 4, 4], 5)
    same([*found[:5]], [*qa.answers(questions[:5])])
    assert [type(error) for error in found[5:]] == [MemoryError] * 3 + [asyncio.CancelledError]
