"""Several data files: mixed for training, scored per file and together; bad examples are refused or skipped."""

from __future__ import annotations

import glob
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from refusals import refused
from test_squad import write
from test_train_run import base, process_stays_as_it_was, train  # noqa: F401  # fixtures

from hvd_bert.config.command_line import override_argv, parse, to_argv
from hvd_bert.config.settings import save
from hvd_bert.data.counts import FileCounts
from hvd_bert.data.sources import squad
from hvd_bert.data.sources.squad import Reading
from hvd_bert.data.window_cutting import WindowOptions
from hvd_bert.data.window_table import prepare
from hvd_bert.tasks.rows import read_rows


def touch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for name in ("d-2.json", "d-1.json", "a.json", "dev.jsonl.gz", "c:2", "lr=3.json", "[c].json"):
        (folder / name).touch()


@pytest.mark.parametrize(
    ("flag", "values", "expected"),
    [
        ("train_file", ["c:2"], [("c:2", "", 1)]),
        ("train_file", ["a.json:.5", "c:2:3", "d:1.json"], [("a.json", "", 0.5), ("c:2", "", 3), ("d:1.json", "", 1)]),
        ("train_file", ["d-*.json:2", "a.json"], [("d-1.json", "", 2), ("d-2.json", "", 2), ("a.json", "", 1)]),
        ("train_file", ["[c].json", "no-*.json"], [("[c].json", "", 1), ("no-*.json", "", 1)]),
        ("validation_file", ["d-*.json"], [("d-1.json", "d-1", 1), ("d-2.json", "d-2", 1)]),
        ("validation_file", ["x=**/a.j*"], [("a.json", "x", 1)]),
        ("validation_file", ["lr=3.json"], [("lr=3.json", "", 1)]),
        ("validation_file", ["A-1=a.json"], [("a.json", "A-1", 1)]),
        ("validation_file", ["x=lr=3.json", "dev.jsonl.gz"], [("lr=3.json", "x", 1), ("dev.jsonl.gz", "dev", 1)]),
    ],
)
def test_weights_and_names(tmp_path, monkeypatch, flag, values, expected):
    touch(tmp_path, monkeypatch)
    settings = parse([f"--{flag}", *values])
    assert [(file.path, file.name, file.weight) for file in settings.data.files(flag)] == expected
    assert getattr(settings.data, flag) == (values[0] if len(values) == 1 else tuple(values))
    save(settings.as_flat(), tmp_path / "settings.yaml")
    assert parse(["--config", str(tmp_path / "settings.yaml")]) == settings
    words = [*to_argv(flag, values), "--seed", "1"]
    assert override_argv(words, [f"--{flag}=other"]) == ["--seed", "1", f"--{flag}=other"]


@pytest.mark.parametrize(
    ("flag", "values", "named"),
    [
        *(("train_file", [f"a.json:{weight}"], [f"a.json:{weight}"]) for weight in ("0", "-1", "nan", "1001", "")),
        ("train_file", ["a.json", "./a.json:2"], ["a.json and ./a.json"]),
        ("train_file", [], ["--train_file"]),
        ("validation_file", ["x=a.json", "y=a.json"], ["a.json and a.json"]),
        ("validation_file", ["x=d-*.json"], ["d-1.json and d-2.json", "named x", "leave out NAME="]),
        ("train_file", ["a.json", "[a-b].json"], ["a.json and a.json"]),
        ("validation_file", ["x=a.json", "x=c:2"], ["a.json and c:2", "named x"]),
        ("validation_file", ["c:2", "a.json"], ["c:2", "NAME=FILE"]),
        *(("validation_file", [f"{name}=a.json"], [repr(name)]) for name in ("macro", "_mm", "x_HasAns", "ö")),
    ],
)
def test_refused_files(tmp_path, monkeypatch, flag, values, named):
    touch(tmp_path, monkeypatch)
    with refused(f"--{flag}", *named):
        parse([f"--{flag}", *values])


def test_run_with_several_files(base, tmp_path, make_questions, write_squad):  # noqa: F811
    other = [replace(question, id=f"x{question.id}") for question in make_questions(9)]
    same, others = base[base.index("--train_file") + 1], str(write_squad(other, "b.json"))
    flags = ["--output_dir", str(tmp_path / "out"), "--save_steps", "2", "--max_train_samples", "9"]
    files = ["--train_file", same, f"{others}:0.5", "--validation_file", f"A={same}", others]
    train(base, *files, *flags)
    found = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    results = json.loads((tmp_path / "out" / "train_results.json").read_text())
    assert results["train_windows"] == 6 + 4 and set(results["scores"]) >= {"A_f1", "b_f1", "macro_f1", "f1"}
    for name in ("exact_match", "f1"):
        assert found[name] == pytest.approx((6 * found[f"A_{name}"] + 9 * found[f"b_{name}"]) / 15)
        assert found[f"macro_{name}"] == (found[f"A_{name}"] + found[f"b_{name}"]) / 2
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Evaluated on `A=squad.json, b.json`: 15 examples." in card and str(tmp_path) not in card
    assert "`squad.json, b.json:0.5`: 10 windows" in card

    (tmp_path / "out" / "train_results.json").unlink()
    files[2] = f"{others}:0.8"
    with refused("cannot be resumed", "[6, 4]", "[6, 7]"):
        train(base, *files, *flags)
    with refused("squad.json and ", "'q0'"):
        write_squad(make_questions(1), "b.json")
        train(base, *files)


def test_all_files_are_opened_before_the_first_is_tokenized(base, tmp_path, own_cache):  # noqa: F811
    with refused("nowhere.json"):
        train(base, "--validation_file", str(tmp_path / "nowhere.json"), "--output_dir", str(tmp_path / "out"))
    assert not own_cache.exists() and not (tmp_path / "out").exists()


def test_wrong_cache_is_refused_before_the_model_is_loaded(base, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HVD_BERT_CACHE", "s3://b/cache")
    with refused("HVD_BERT_CACHE", "s3://b/cache"):
        train(base, "--model_name_or_path", "nowhere")


def test_folders_and_patterns_that_are_no_file(tmp_path, make_questions, to_rows):
    rows = datasets.Dataset.from_list(to_rows(make_questions(2)))
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=rows).save_to_disk(tmp_path / "both")
    (tmp_path / "[a]" / "shards").mkdir(parents=True)
    shards = tmp_path / "[a]" / "shards"
    for name in ("README.md", "1.jsonl", "2.jsonl"):
        rows.to_json(shards / name)
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    for path, remedy in (
        (tmp_path / "saved", 'load_from_disk("PATH").to_json'),
        (tmp_path / "both", 'load_from_disk("PATH").items(): split.to_json'),
        (shards, f"{glob.escape(str(shards))}/*.jsonl"),
        (shards.parent, "Give a readable data file"),  # a folder of folders
        (Path(glob.escape(str(shards)), "*.jsonl"), "join files"),
        (arrow, "Dataset.from_file"),
    ):
        with refused(path, remedy.replace("PATH", str(path))):
            squad.open_file(path, False).questions()
        with refused(path, remedy.replace("PATH", str(path))):
            read_rows(str(path), "--train_file")


TRAINING = Reading(bad_examples="skip")
EVALUATION = Reading(bad_examples="skip", purpose="evaluation")
MISTAKES = {
    "misplaced answer": 4,
    "unusable text": 2,
    "duplicate id": 1,
    "wrong type": 1,
    "unanswered question": 1,
}


@pytest.fixture
def bad_file(tmp_path, make_questions, to_squad) -> Path:
    """Write a SQuAD file of 12 questions, 9 of which have mistakes."""
    content: dict[str, Any] = to_squad(make_questions(12))
    qas = [entry for article in content["data"] for paragraph in article["paragraphs"] for entry in paragraph["qas"]]
    qas[0]["answers"][0]["answer_start"] = -2
    qas[1]["question"] = ""
    qas[2]["answers"][0]["answer_start"] += 1
    qas[3]["answers"][0]["text"] = "Pale grey"
    qas[4]["id"] = "q9"  # the real q9 becomes a duplicate
    qas[5]["answers"] = [{"text": "is"}]  # occurs twice in the context
    qas[6]["answers"][0]["answer_start"] = "here"
    qas[7]["question"] = "\ud83d?"
    qas[8]["answers"] = []
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_error_names_the_flag(bad_file):
    for reading in (Reading(), Reading(purpose="evaluation")):
        with refused("9 mistakes in 12", "'q0'", "--bad_examples skip", "--version_2_with_negative"):
            squad.open_file(bad_file, False, reading).questions()
    with refused("2 mistakes") as raised:
        squad.open_file(bad_file, False, Reading(purpose="prediction")).questions()
    assert "--bad_examples" not in str(raised.value)


def test_evaluation_scores_all_questions_with_a_text_as_answer(bad_file, make_questions, tokenizer, own_cache, caplog):
    file = squad.open_file(bad_file, False, EVALUATION)
    questions, findings = file.load()
    assert [question.id for question in questions] == ["q0", "q2", "q3", "q9", "q5", "q6", "q10", "q11"]
    assert [question.answer_starts for question in questions[:3]] == [(None,)] * 3
    assert questions[0].answer_texts == make_questions(1)[0].answer_texts
    assert (findings.mistakes, findings.left_out) == (MISTAKES, 4)
    table = prepare(file, tokenizer, WindowOptions(32, 8))
    FileCounts(file.name, "validation", table.counts, table.findings, 30).warn()
    assert "4 left out, 5 scored by their answers' texts" in caplog.text


def test_repair_moves_answers_whose_text_occurs_once(bad_file, make_questions):
    with refused("answers of 2 question(s)", "--bad_examples repair"):
        squad.open_file(bad_file, False).questions()
    expected = make_questions(12)
    for purpose, unlocated, left_out in (("training", [], 7), ("evaluation", ["q3", "q5", "q6"], 4)):
        questions, findings = squad.open_file(bad_file, False, Reading(bad_examples="repair", purpose=purpose)).load()
        located = [question for question in questions if question.id not in unlocated]
        assert located[:2] == [expected[0], expected[2]] and len(located) + len(unlocated) == len(questions)
        assert findings.mistakes == {**MISTAKES, "misplaced answer": 2} and findings.left_out == left_out
        assert findings.repaired == 2
    for context, answer in (("a b b", "b"), ("a c", "b")):  # never a guess
        row = {"context": context, "question": "?", "answers": {"text": [answer], "answer_start": [0]}}
        with refused("'b'") as raised:
            squad.open_file(write(bad_file.parent, [row]), False, Reading(bad_examples="repair")).questions()
        assert "--bad_examples" not in str(raised.value)


def test_file_of_mistakes_only_is_refused(tmp_path, make_questions, to_rows):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{**row, "answers": "Paris"} for row in to_rows(make_questions(2))]))
    for reading in (Reading(), TRAINING):
        with refused("2 mistakes in 2") as raised:
            squad.open_file(path, False, reading).questions()
        assert "--bad_examples" not in str(raised.value)


def test_training_skips_mistakes_and_windows_are_equal_on_all_nodes(bad_file, tokenizer, tmp_path, caplog, monkeypatch):
    """Two nodes without a shared cache make equal windows; the third call reads the first node's cache."""
    tables = []
    for node in ("a", "b", "a"):
        monkeypatch.setenv("HVD_BERT_CACHE", str(tmp_path / node))
        tables.append(prepare(squad.open_file(bad_file, False, TRAINING), tokenizer, WindowOptions(32, 8)))
    assert all(table.batches == tables[0].batches and table.findings.mistakes == MISTAKES for table in tables)
    assert tables[0].counts.questions == 3
    FileCounts("FILE", "training", tables[0].counts, tables[0].findings).warn()
    assert len(caplog.messages) == 1
    for words in ("9 questions have mistakes", "misplaced answer: 4", "9 left out", "question 'q0' (data[0]"):
        assert words in caplog.messages[0]


@pytest.mark.parametrize(("setting", "moved"), [("skip", 0), ("repair", 2)])
def test_a_run_records_the_counts_of_all_files(base, bad_file, tmp_path, caplog, capsys, setting, moved):  # noqa: F811
    files = ["--train_file", str(bad_file), str(tmp_path / "squad.json"), "--validation_file", str(bad_file)]
    flags = [*files, "--output_dir", str(tmp_path / "out")]
    with refused("--bad_examples skip"):
        train(base, *flags)
    train(base, *flags, "--bad_examples", setting, "--per_device_train_batch_size", "3")
    assert "\r" not in capsys.readouterr().err, "no bar without a terminal"
    results = json.loads((tmp_path / "out" / "train_results.json").read_text())
    found = results["bad_examples"]
    assert [len(facts.pop("first_repaired", [])) for facts in found.values()] == [moved, moved]
    repaired = {"repaired": moved} if moved else {}
    mistakes = {**MISTAKES, "misplaced answer": 4 - moved}
    assert found == {
        "training": {"left_out": 9 - moved, "mistakes": mistakes, **repaired},
        "validation": {"left_out": 4, "mistakes": mistakes, **repaired},
    }
    files = {name: list(counts) for name, counts in results["data_counts"].items()}
    assert files == {"training": flags[1:3], "validation": [str(bad_file)]}
    found = results["data_counts"]["validation"][str(bad_file)]
    assert (found["questions"], found["shared_questions"], found["answers_above_max_length"]) == (8, 7, 0)
    assert caplog.text.count("7 of 8 questions are also in the training data") == 1
    assert caplog.text.count("2 questions had answers with a wrong answer_start") == moved  # once per file
    assert json.loads((tmp_path / "out" / "eval_results.json").read_text())["total"] == 8
