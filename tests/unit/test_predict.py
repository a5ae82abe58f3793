"""The command `predict`, run in this process."""

from __future__ import annotations

import json
import os
import resource
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pandas
import pyarrow
import pytest
from pyarrow import parquet
from refusals import check_refusal, refused
from test_answerer import model, questions  # noqa: F401  # fixtures
from test_world import make_world

from hvd_bert import QuestionAnswerer
from hvd_bert.distributed.devices import RankInfo
from hvd_bert.distributed.launch import Launcher
from hvd_bert.distributed.world import CollectiveError, World
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_OK
from hvd_bert.predict import answerer
from hvd_bert.predict.__main__ import main, parse_flags
from hvd_bert.predict.answering import COLUMNS, answer_file
from hvd_bert.predict.writing import reserved
from hvd_bert.storage import writing

ALONE = Launcher("none", None, None)


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


def test_one_question(model, capsys):  # noqa: F811
    asked = {"question": "What is red?", "context": "The box is red. The hall is green."}
    answer = QuestionAnswerer(model)(**asked)
    assert main([str(model), "--question", asked["question"], "--context", asked["context"]]) == EXIT_OK
    line = f"  A: {answer.text}  (probability {answer.score:.2f})"
    assert capsys.readouterr().out == f"  {asked['context']}\n  Q: {asked['question']}\n{line}\n"
    assert main([str(model), "--question", "Who?", "--context", " "]) == EXIT_BAD_INPUT
    assert "its context is empty" in capsys.readouterr().err


def test_a_few_answers_are_printed(model, questions, write_squad, capsys):  # noqa: F811
    assert main([str(model), "--input", str(write_squad(questions))]) == EXIT_OK
    printed = capsys.readouterr().out
    for question in (questions[0], questions[10], questions[20]):
        assert f"  Q: {question.question}\n  A: " in printed
    assert printed.count("  A: ") == 3 and "  expected: blue\n" in printed
    assert printed.endswith("3 of 30 questions. To answer all of them, name a file with --output.\n")


def test_escape_sequences_in_texts_are_not_printed(model, make_questions, write_squad, capsys, monkeypatch):  # noqa: F811
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


@pytest.mark.parametrize("differing", ["the model", "the tokenizer", "the settings", "the input"])
def test_ranks_with_other_inputs_are_refused(model, tmp_path, monkeypatch, differing):  # noqa: F811
    (tmp_path / "asked.jsonl").write_text(json.dumps({"question": "Who?", "context": "Ada."}) + "\n")
    world = one_rank()
    world.rank_infos *= 2

    def gathered(value: object) -> list[object]:
        return [value, value | {differing: "another"} if isinstance(value, dict) else value]

    monkeypatch.setattr(world, "allgather", gathered)
    with refused(differing, "rank 0", error=CollectiveError):
        answered(model, "--input", tmp_path / "asked.jsonl", "--output", tmp_path / "a.jsonl", world=world)


def test_existing_files_stay_and_a_full_disk_leaves_no_file(model, tmp_path):  # noqa: F811
    (tmp_path / "asked.jsonl").write_text(json.dumps({"question": "Who?", "context": "Ada." + " " * 9000}) + "\n")
    words = (model, "--input", tmp_path / "asked.jsonl", "--output")
    (tmp_path / "mine.jsonl").write_text("mine")
    with refused("--output", "mine.jsonl", "--overwrite", error=CollectiveError):
        answered("no model", *words[1:], tmp_path / "mine.jsonl")
    assert (tmp_path / "mine.jsonl").read_text() == "mine"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(CollectiveError, match=r"answers\.jsonl cannot be written: File too large") as failed:
            answered(*words, tmp_path / "new" / "answers.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert failed.value.status == EXIT_FAILURE
    assert os.listdir(tmp_path / "new") == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_file_that_appears_meanwhile_is_replaced_with_overwrite_only(tmp_path, overwrite):
    path = tmp_path / "a.csv"
    with nullcontext() if overwrite else pytest.raises(FileExistsError), reserved(path, overwrite) as new:
        new.write_text("mine")
        path.write_text("another's")
    assert path.read_text() == ("mine" if overwrite else "another's")
    assert os.listdir(tmp_path) == ["a.csv"]
    if not overwrite:  # as if the file appeared after the command's first check
        with pytest.raises(FileExistsError), reserved(path, overwrite):
            pytest.fail("the work began")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2"])  # horovodrun sends SIGUSR2 for Ctrl-C
def test_signal_leaves_no_file(tmp_path, monkeypatch, name):
    number = signal.Signals[name]
    if not (child := os.fork()):
        try:
            signal.signal(number, signal.SIG_DFL)  # as in a command
            with reserved(tmp_path / "a.csv", False) as new:
                if not (worker := os.fork()):  # as a custom task's, which Python terminates
                    signal.raise_signal(number)
                os.waitpid(worker, 0)
                new.stat()
                monkeypatch.setattr(writing, "flush", lambda _: signal.raise_signal(number))
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == number
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_file_of_answers(model, questions, tmp_path, monkeypatch, suffix):  # noqa: F811
    monkeypatch.setattr(answerer, "BLOCK_QUESTIONS", 13)
    questions = [*questions[:2], replace(questions[2], context='Zo\u00eb, "a"\rb,\nc is red.'), *questions[3:]]
    asked = [{"id": q.id, "passage": q.context, "query": q.question} for q in questions]
    file, output = tmp_path / "asked.jsonl", tmp_path / f"answers{suffix}"
    file.write_text("".join(json.dumps(row) + "\n" for row in asked))
    words = (model, "--input", file, "--output", output, "--question_column", "query", "--context_column", "passage")
    answered(*words)
    assert [*read_rows(output)[0]] == [*COLUMNS, "passage", "query"]
    answered(*words, "--n_best", 50, "--overwrite")  # replaces the first answers
    rows = read_rows(output)
    for row, question, found in zip(rows, questions, QuestionAnswerer(model).answers(questions), strict=True):
        values = (question.id, question.question, question.context, found.text)
        values += (found.start, found.end, found.score, found.null_odds, None, question.context, question.question)
        assert tuple(row[name] for name in (*COLUMNS, "passage", "query")) == values
        best = [(entry["text"], entry["probability"]) for entry in row["nbest"]]
        assert best[: len(found.nbest)] == [(candidate.text, candidate.probability) for candidate in found.nbest]
        assert len(best) == 50
        assert row["nbest"][0].keys() == {"text", "start", "end", "probability", "start_logit", "end_logit"}


def test_warnings_count_the_questions_of_all_blocks_once(model, tmp_path, monkeypatch, caplog):  # noqa: F811
    monkeypatch.setattr(answerer, "BLOCK_QUESTIONS", 1)
    texts = [("What is red?", "The box is red."), ("What is red? " * 90, "Ada."), ("Who?", "\u0e01" * 120)]
    file = tmp_path / "asked.jsonl"
    file.write_text("".join(json.dumps({"question": asked, "context": text}) + "\n" for asked, text in texts))
    answered(model, "--input", file, "--output", tmp_path / "a.jsonl")
    long, unknown = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    check_refusal(long, file, "1 of 3 questions", "--max_seq_length")
    check_refusal(unknown, file, "%", "--model_name_or_path")


GOOD = {"id": "q1", "question": "What is red?", "context": "The box is red. The hall is green.", "n": 5}
BAD = [GOOD | {"context": " "}, GOOD | {"question": None}]
WORSE = [GOOD | {"context": ["Ada"]}, {"id": "q1", "context": "Ada"}, GOOD | {"question": "\ud800?", "id": None}]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows in the format that the name stands for; NAME.squad.json: as SQuAD's nested levels."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffixes == [".squad", ".json"]:
        path.write_text(json.dumps({"data": [{"paragraphs": [row | {"qas": [row]}]} for row in rows]}))
    elif path.suffixes == [".data", ".json"]:
        path.write_text(json.dumps({"data": [*rows, None]}))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        frame = pandas.DataFrame(rows).astype({"n": "int32"})
        frame.to_csv(path, index=False) if path.suffix == ".csv" else frame.to_parquet(path, index=False)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.data.json", "a.squad.json", "a.csv", "a.parquet"])
def test_rows_that_cannot_be_answered_do_not_stop_the_others(model, tmp_path, name, capsys):  # noqa: F811
    bad = BAD + (WORSE if "json" in name else [])
    file, output = tmp_path / name, tmp_path / "answers.jsonl"
    words = (model, "--input", file, "--output", output, "--overwrite")
    write_rows(file, [GOOD, *bad, GOOD])
    if name == "a.csv":
        file.write_text(file.read_text() + "q5,a cell\n")
    bad += [{}] * (name in ("a.csv", "a.data.json"))
    with refused(output, "2 question(s)", f"{len(bad)} row(s)", error=CollectiveError) as raised:
        answered(*words)
    assert raised.value.status == EXIT_BAD_INPUT
    rows = read_rows(output)
    assert [*map(len, rows)] == [len(rows[0])] * (2 + len(bad))
    right = [row for row in rows if row["error"] is None]
    assert [row["answer"] for row in right] == [QuestionAnswerer(model)(GOOD["question"], GOOD["context"]).text] * 2
    assert rows[0] == right[0] and all("n" not in rows[0] or row["n"] in (5, "5") for row in right)
    wrong = [(row["answer"], row["start"], bool(row["error"])) for row in rows if row["error"] is not None]
    assert wrong == [("", None, True)] * len(bad)
    assert sum(row["id"] == "q1" for row in rows) == 2 + sum(row.get("id") == "q1" for row in bad)
    assert main([str(word) for word in words[:3]]) == EXIT_BAD_INPUT
    printed = capsys.readouterr()
    assert "2 of 2 questions" in printed.out and f"{len(bad)} row(s) cannot be answered" in printed.err
    write_rows(file, bad[:2])
    output.unlink()
    with refused(file, "mistakes in", error=CollectiveError):
        answered(*words)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_columns_of_the_input_are_kept(model, tmp_path, suffix):  # noqa: F811
    file, output = tmp_path / f"a{suffix}", tmp_path / f"b{suffix.removesuffix('.json') or '.jsonl'}"
    words = (model, "--input", file, "--output", output, "--overwrite")
    row = {"ticket": "T1", **GOOD, "id": "1.0", "answers": "red", "n": 7} | ({} if suffix == ".csv" else {"list": [1]})
    other = {"list": {"a": "\u00fc\ud800"}} if "json" in suffix else {}
    write_rows(file, [row, row | {"ticket": None} | other])
    answered(*words)
    first, second = read_rows(output)
    given = {name: value for name, value in row.items() if name not in COLUMNS}
    assert [*first] == [*COLUMNS, *given] and second["ticket"] is None and second.items() >= other.items()
    assert {name: first[name] if name != "list" else [*first[name]] for name in given} == given
    if suffix == ".parquet":
        assert pandas.read_parquet(output)["n"].dtype == "int32"
    write_rows(file, [{"start": "mine", "n": 1, **row}])
    with refused("'start'", "--overwrite_columns", error=CollectiveError):
        answered("no model", *words[1:])
    answered(*words, "--overwrite_columns")
    assert read_rows(output)[0]["start"] == first["start"]


def test_types_that_the_format_lacks_become_texts(model, tmp_path):  # noqa: F811
    columns = {name: [GOOD[name]] * 2 for name in ("question", "context")}
    key = pyarrow.array([UUID(int=5).bytes, None], pyarrow.uuid())
    parquet.write_table(pyarrow.table(columns | {"key": key, "list": [[1], None]}), tmp_path / "a.parquet")
    answered(model, "--input", tmp_path / "a.parquet", "--output", tmp_path / "a.csv")
    row, _ = read_rows(tmp_path / "a.csv")
    assert (row["key"], row["list"]) == (str(UUID(int=5)), "[1]")
    assert (tmp_path / "a.csv").read_text().endswith(",,\n"), "null is empty"
    write_rows(tmp_path / "a.jsonl", [GOOD | {"meta": {"tags": {}}}])
    answered(model, "--input", tmp_path / "a.jsonl", "--output", tmp_path / "b.parquet")
    assert read_rows(tmp_path / "b.parquet")[0]["meta"] == '{"tags": {}}'


def test_columns_are_those_of_the_training_where_the_file_has_them(model, tmp_path):  # noqa: F811
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    settings = (tmp_path / "train_config.yaml").read_text()
    (tmp_path / "train_config.yaml").unlink()
    (tmp_path / "train_config.yaml").write_text(f"{settings}question_column: q\ncontext_column: passage\n")
    words = (tmp_path, "--input", tmp_path / "a.jsonl", "--output", tmp_path / "b.jsonl", "--overwrite")
    found = []
    for q, passage in (("question", "context"), ("q", "passage"), ("q", "context")):
        write_rows(tmp_path / "a.jsonl", [{q: GOOD["question"], passage: GOOD["context"], "meta": {"a": 1}}])
        answered(*words)
        found += read_rows(tmp_path / "b.jsonl")
    assert len({row["answer"] for row in found}) == 1 and found[1]["q"] == GOOD["question"]
    assert all(row["meta"] == {"a": 1} for row in found)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a file of answers with json or pandas, not with this package's code."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_bytes().decode().splitlines()]
    rows = {".csv": pandas.read_csv, ".parquet": pandas.read_parquet}[path.suffix](path, dtype_backend="pyarrow")
    return [
        row | ({"nbest": json.loads(row["nbest"])} if path.suffix == ".csv" and "nbest" in row else {})
        for row in rows.to_dict("records")
    ]
