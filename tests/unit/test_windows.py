"""The window table: its content, its cache, and which ranks verify it."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from refusals import check_refusal, refused

from hvd_bert.data import window_cutting, window_table
from hvd_bert.data.counts import FileCounts, count_shared, is_unspaced, question_keys
from hvd_bert.data.sources import squad
from hvd_bert.data.sources.squad import Question
from hvd_bert.data.window_cutting import WindowOptions
from hvd_bert.data.window_table import WindowTable, check_lengths, prepare

SMALL = WindowOptions(max_seq_length=32, doc_stride=8)


@pytest.fixture
def source(make_questions):
    return squad.from_questions("small", make_questions(10, unanswered_every=5))


def cached_table(cache: Path) -> tuple[Path, int]:
    """Return the path of the cache's only table, and its inode, which changes when the table is rebuilt."""
    (file,) = cache.glob("*/windows.arrow")
    return file, file.stat().st_ino


def rows(table: WindowTable) -> pa.Table:
    return pa.Table.from_batches(table.batches)


# --- the table -------------------------------------------------------------------------------------


def test_table_has_its_schema_and_counts(source, tokenizer, own_cache):
    dataset = prepare(source, tokenizer, SMALL)
    cached_table(own_cache)
    assert rows(dataset).schema.equals(window_cutting.SCHEMA)
    assert sorted(set(dataset.column("question"))) == list(range(10))
    counted = dataset.counts
    assert (counted.questions, counted.answerable_questions, counted.windows) == (10, 8, len(dataset))
    assert prepare(source, tokenizer, SMALL).counts == counted


def test_questions_of_joined_tables_are_numbered_consecutively(make_questions, tokenizer, own_cache):
    sources = [squad.from_questions(f"source {n}", make_questions(5)[slice(*n)]) for n in ((0, 2), (2, 3), (3, 5))]
    joined = WindowTable.joined([prepare(source, tokenizer, SMALL) for source in sources])
    whole = prepare(squad.from_questions("whole", make_questions(5)), tokenizer, SMALL)
    np.testing.assert_array_equal(joined.column("question"), whole.column("question"))
    np.testing.assert_array_equal(joined.lengths, whole.lengths)


@pytest.mark.parametrize(
    ("name", "position"), [("windows.arrow", 0.8), ("windows.json", 0.5), ("sha256.json", 0.2), ("questions.npy", 0.9)]
)
def test_a_flipped_bit_in_the_cache_is_not_trained_on(source, tokenizer, own_cache, name, position):
    prepare(source, tokenizer, SMALL)
    path = cached_table(own_cache)[0].with_name(name)
    content = bytearray(path.read_bytes())
    content[int(position * len(content))] ^= 1
    path.write_bytes(content)
    with refused(path.parent, "damaged"):
        prepare(source, tokenizer, SMALL)


def test_one_rank_per_host_reads_the_whole_cache_and_the_others_see_a_truncated_one(
    source, tokenizer, own_cache, monkeypatch
):
    monkeypatch.setattr(window_cutting, "_WINDOWS_AT_ONCE", 3)
    prepare(source, tokenizer, SMALL)
    path = cached_table(own_cache)[0]
    content = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(window_table.cache, "sha256_of", None)
        assert len(prepare(source, tokenizer, SMALL, leader=False))
    for length in range(0, len(content) - 8, 200):  # the final 8 bytes only mark the stream's end
        path.write_bytes(content[:length])
        with refused(path.parent, "damaged"):
            prepare(source, tokenizer, SMALL, leader=False)


def test_cached_table_is_mapped_and_not_read(source, tokenizer, own_cache):
    prepare(source, tokenizer, SMALL)
    gc.collect()
    before = pa.total_allocated_bytes()
    dataset = prepare(source, tokenizer, SMALL)
    assert pa.total_allocated_bytes() <= before
    with pa.OSFile(str(cached_table(own_cache)[0])) as file, pa.ipc.open_stream(file) as stream:
        in_memory = stream.read_all()
    assert len(in_memory) == len(dataset)
    assert pa.total_allocated_bytes() > before  # reading without a memory map allocates memory


def test_windows_of_several_pieces_are_found_by_number(source, tokenizer, own_cache, monkeypatch):
    monkeypatch.setattr(window_cutting, "_WINDOWS_AT_ONCE", 3)
    dataset = prepare(source, tokenizer, SMALL)
    ids = range(len(dataset))[::-1]
    tokens = rows(dataset)["input_ids"].to_pylist()
    assert [window.tolist() for window in dataset.lists("input_ids", ids)] == tokens[::-1]
    assert (dataset.lengths.dtype, dataset.lengths.tolist()) == (np.int32, [len(window) for window in tokens])
    assert dataset.numbers("question", ids).tolist() == dataset.column("question").tolist()[::-1]
    assert dataset.numbers("question", []).dtype == np.int32


def test_tables_are_equal_with_other_batch_sizes_and_in_memory(make_questions, tokenizer, tmp_path, monkeypatch):
    source = squad.from_questions("small", make_questions(25, unanswered_every=4))
    whole = prepare(source, tokenizer, SMALL)
    monkeypatch.setattr(window_table, "_QUESTIONS_AT_ONCE", 7)
    monkeypatch.setattr(window_cutting, "_WINDOWS_AT_ONCE", 3)
    monkeypatch.setenv("HVD_BERT_CACHE", str(tmp_path / "b"))
    batched = prepare(source, tokenizer, SMALL)
    memory = window_table.in_memory(source.questions(), window_cutting.WindowTokenizer(tokenizer, SMALL))
    for table in (batched, memory):
        assert rows(table) == rows(whole) and table.counts == whole.counts


def test_max_samples_uses_the_first_questions(source, tokenizer, own_cache):
    every = prepare(source, tokenizer, SMALL)
    some = prepare(source, tokenizer, WindowOptions(32, 8, max_samples=3))
    assert rows(some) == rows(every).filter(pc.field("question") < 3)
    more = prepare(source, tokenizer, WindowOptions(32, 8, max_samples=99))
    assert rows(more) == rows(every)


# --- warnings ------------------------------------------------------------------------------------


def ask(context: str, *answers: str, question: str = "what?", id_: str = "a") -> Question:
    return Question(id_, "", context, question, answers, tuple(map(context.index, answers)))


def warnings(tokenizer, caplog, questions: list[Question], purpose: str, **more: Any) -> list[str]:
    table = prepare(squad.from_questions("FILE", questions), tokenizer, SMALL)
    FileCounts("FILE", purpose, table.counts, table.findings, **{"max_answer_length": 30, **more}).warn()
    assert all(message.startswith("FILE: ") for message in caplog.messages)
    return caplog.messages


COLOURS = "the box is red, the hall is green, the door is in the colour of the red box"
TEXT = "the " * 20 + "red " * 40
THAI, CHINESE = "\u0e02\u0e32\u0e22" * 40, "\u5317\u4eac" * 10
LENGTH, LONGER, LANGUAGE = {"max_answer_length": 2}, {"max_answer_length": 39}, {"answer_language": "th"}
EVERY = ("training", "validation", "prediction")
WARNED = {
    "truncated": (
        EVERY,
        [ask(TEXT, question="what " * 22)],
        {},
        ["1 of 1 question", "52 windows", "--max_seq_length"],
    ),
    "crowded": (EVERY, [ask(TEXT, question="what " * 20)], {}, ["1 of 1 questions", "52 windows", "--doc_stride"]),
    "cut": (
        EVERY[:2],
        [ask(TEXT, "red " * 39), ask(COLOURS, "red")],
        {"max_answer_length": 39},
        ["1 of 2 answers", "--doc_stride"],
    ),
    "no token": (EVERY[:2], [ask("the \x07 box", "\x07")], {}, ["1 of 1 answers", "of 1 the tokenizer drops"]),
    "unknown": (EVERY, [ask(THAI, THAI[:3])], LANGUAGE, ["100%", "1 of 1 answers", "--model_name"]),
    "unknown question": (EVERY, [ask("the red", "red", question=THAI[:9] + "?")], {}, ["1 of 1 questions", "0 of 1 a"]),
    "long word": (EVERY, [ask("the red " + "x" * 101, "red")], LANGUAGE, ["94%", "0 of 1 answers", "100 characters"]),
    "answers": (EVERY[:1], [ask(COLOURS, "red", "green"), ask(COLOURS, "red")], {}, ["1 of 2", "examples.md"]),
    "length": (
        EVERY[1:2],
        [
            *(ask(COLOURS, "box is red", "the box is red"), ask(COLOURS, "red", COLOURS[:14]), ask(COLOURS)),
            *(replace(ask(COLOURS, text), answer_starts=(None,)) for text in (COLOURS[:14], "red")),
        ],
        LENGTH,
        ["2 of 4 questions", "50.0%", "--max_answer_length 2,", "--max_answer_length 4 "],
    ),
    "spaces": (EVERY[1:2], [ask(CHINESE, question="what " * 4)], {}, ["1 of 1 questions", "--answer_language zh"]),
    "few spaces": (EVERY[1:2], [ask(CHINESE[:5] + " the box" * 5)], {"answer_language": "de"}, ["1 of 1", "ja or th"]),
    "shared": (EVERY[1:2], [ask(COLOURS, "red")], {"shared": 1}, ["1 of 1 questions", "training data"]),
}


@pytest.mark.parametrize("kind", WARNED)
@pytest.mark.parametrize("purpose", EVERY)
def test_each_kind_of_warning_names_its_number_and_remedy(make_tokenizer, caplog, kind, purpose):
    purposes, questions, more, named = WARNED[kind]
    tokenizer = make_tokenizer("the", "what", "is", "box", "red", "green", "hall", "door", "colour", "in", *CHINESE)
    found = warnings(tokenizer, caplog, questions, purpose, **more)
    assert len(found) == (purpose in purposes)
    for message in found:
        check_refusal(message, *named)


REPEATS = [("red", "red"), ("red, the", "red"), ("hall is green", "green"), ("red box", "red")]


@pytest.mark.parametrize("purpose", EVERY)
def test_ordinary_files_give_no_warning(make_questions, tokenizer, caplog, purpose):
    annotated = [ask(COLOURS, *answers) for answers in REPEATS]
    assert not warnings(tokenizer, caplog, [*make_questions(9, unanswered_every=3), *annotated], purpose)
    assert not warnings(tokenizer, caplog, [ask(COLOURS, COLOURS[:14])], purpose, max_answer_length=4)
    korean, link = "\uc11c\uc6b8\ud2b9\ubcc4\uc2dc\ub294 " * 9, "https://example.org/" + "x" * 40
    for text in (korean, link, CHINESE[:4] + " the" * 9, f"{CHINESE[:4]} " * 9):
        assert not is_unspaced(text)


def test_shared_questions_have_an_id_and_text_or_a_context_and_text_in_common(make_questions):
    questions = make_questions(6)
    changed = [
        replace(questions[0], context="Another."),
        replace(questions[1], id="new", context=questions[1].context.replace(" ", "  ").upper()),
        replace(questions[2], question="Where?"),
        replace(questions[3], id="new", context="Another."),
        replace(questions[4], id="line 5", context="Another."),
    ]
    changed.append(replace(questions[5], id="5", context="Another."))
    keys = question_keys([*questions[:4], replace(questions[4], id="line 5"), replace(questions[5], id="5")])
    assert [count_shared(question_keys([question]), keys) for question in changed] == [1, 1, 0, 0, 0, 0]
    assert count_shared(question_keys(changed), keys) == 2 and count_shared(keys, question_keys([])) == 0


# --- the cache -------------------------------------------------------------------------------------


def test_same_call_finds_the_table_without_reading_the_questions(source, tokenizer, own_cache):
    def never() -> list[squad.Question]:
        raise AssertionError("must not be read")

    prepare(source, tokenizer, SMALL)
    first = cached_table(own_cache)
    tokenizer("what is", "red box in the hall", truncation="only_second", max_length=9, padding="max_length")
    prepare(squad.Source("elsewhere", source.digest, never), tokenizer, SMALL)
    assert cached_table(own_cache) == first


def test_key_covers_every_option_the_text_and_the_tokenizer(
    source, make_questions, tokenizer, make_tokenizer, own_cache, monkeypatch
):
    prepare(source, tokenizer, SMALL)
    for options in (WindowOptions(33, 8), WindowOptions(32, 9), WindowOptions(32, 8, 5)):
        prepare(source, tokenizer, options)
    prepare(squad.from_questions("small", make_questions(9)), tokenizer, SMALL)
    prepare(source, make_tokenizer("hall"), SMALL)
    cased = copy.deepcopy(tokenizer)
    cased.backend_tokenizer.normalizer = None
    prepare(source, cased, SMALL)
    split = copy.deepcopy(tokenizer)
    split.backend_tokenizer.encode_special_tokens = True
    prepare(source, split, SMALL)
    other_special = copy.deepcopy(tokenizer)
    other_special.sep_token = "?"
    prepare(source, other_special, SMALL)
    monkeypatch.setattr(window_table.tokenizers, "__version__", "0.0")
    prepare(source, tokenizer, SMALL)
    monkeypatch.setattr(window_table, "_FORMAT", 10**6)
    prepare(source, tokenizer, SMALL)
    assert len(list(own_cache.glob("*.lock"))) == 11


# --- wrong values ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (WindowOptions(132, 128), ["--max_seq_length 132", "--doc_stride 128", "at least 133"]),
        (WindowOptions(513, 128), ["--max_seq_length 513", "at most 512"]),
    ],
)
def test_impossible_options_are_refused_before_any_work(source, tokenizer, own_cache, options, named):
    with refused(*named):
        prepare(source, tokenizer, options)
    assert not own_cache.exists()
    for length in (133, 512):  # the limits are allowed
        check_lengths(WindowOptions(length, 128), tokenizer)
