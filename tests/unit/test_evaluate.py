"""The command `evaluate`: its settings, the same scores as the trainer's, files, and comparisons."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from documented import undocumented
from refusals import refused
from test_text_classification import made, saved, workdir  # noqa: F401  # a fixture
from test_world import make_world
from transformers import BertConfig, BertForQuestionAnswering

from hvd_bert import QuestionAnswerer
from hvd_bert.config.command_line import parse
from hvd_bert.distributed.world import CollectiveError
from hvd_bert.errors import EXIT_OK
from hvd_bert.predict.__main__ import main as predict
from hvd_bert.tools.evaluate import __main__ as flags
from hvd_bert.tools.evaluate import running
from hvd_bert.training import loop, start

SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SETTINGS = {"max_seq_length": 64, "doc_stride": 8, "n_best_size": 5, "null_score_diff_threshold": 0.25}
UNUSED = dict.fromkeys(("version_2_with_negative", *SETTINGS.keys() - {"max_seq_length"}))  # other tasks lack these
QUESTIONS = 12


@pytest.fixture
def make_model(tmp_path, tokenizer, make_questions, write_squad):
    """Return `make(name, **settings)`, which makes an output folder as after a training, with random weights."""
    file = write_squad(make_questions(QUESTIONS, unanswered_every=3))

    def make(name: str = "model", **settings: Any) -> Path:
        folder = tmp_path / name
        torch.manual_seed(len(name))
        config = BertConfig(vocab_size=len(tokenizer), initializer_range=2.0, **SHAPE)
        BertForQuestionAnswering(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        record = {"version_2_with_negative": True, "validation_file": str(file), "learning_rate": 0.1} | SETTINGS
        lines = (f"{flag}: {json.dumps(value)}\n" for flag, value in (record | settings).items() if value is not None)
        (folder / "train_config.yaml").write_text("".join(lines))
        return folder

    return make


@pytest.fixture(autouse=True)
def process_stays_as_it_was(monkeypatch):
    for module in (start, running):
        monkeypatch.setattr(module, "set_up", lambda config, world: None)


def evaluate(*words: object) -> None:
    world = make_world()
    world.set_up_device()
    running.run(*flags.parse([str(word) for word in words] + ["--strategy", "none"]), world)


def evaluated(folder: Path, *words: object) -> dict[str, Any]:
    """Run `evaluate`. Returns the content of its JSON file."""
    file = folder.parent / "results.json"
    evaluate(folder, *words, "--json", file, "--overwrite")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def settings_of(*words: object) -> list[dict[str, Any]]:
    return [config.as_flat() for config in flags.parse([str(word) for word in words])[1]]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", SETTINGS | {"per_device_eval_batch_size": 3, "context_column": "passage", "max_eval_samples": None}),
        ("--max_seq_length=50 --bf16", {"max_seq_length": 50, "doc_stride": 8, "bf16": True}),
        ("--validation_file f.csv", {"context_column": "context", "validation_file": "f.csv", "dataset_name": None}),
        ("--dataset_name=squad", {"context_column": "context", "dataset_name": "squad", "validation_file": None}),
        ("--config sample", {"context_column": "context", "max_seq_length": 160, "config_name": None}),
    ],
)
def test_settings_come_from_the_training_unless_given(make_model, words, expected):
    changed = {"context_column": "passage", "per_device_eval_batch_size": 3, "max_eval_samples": 2, "bf16": True}
    folder = make_model(**changed, answer_language="zh")
    expected = {"version_2_with_negative": True, "answer_language": "zh", "bf16": False, "do_train": False} | expected
    for model in (folder, folder / "checkpoint-3"):
        (found,) = settings_of(model, *words.split())
        assert found.items() >= (expected | {"model_name_or_path": str(model)}).items()


def test_compared_models_have_the_same_questions_and_rules(make_model):
    others = {"version_2_with_negative": False, "validation_file": None, "dataset_name": "squad", "max_seq_length": 50}
    others["answer_language"] = "zh"
    first, second = settings_of(make_model("one"), "--compare", two := make_model("two", **others))
    assert second == first | {"model_name_or_path": str(two), "max_seq_length": 50}


def test_wrong_command_lines(make_model):
    model = make_model(train_file="train.json", validation_file=None)
    data = ["--validation_file", "f"]
    for named, words in (
        ("MODEL", [*data, model]),
        ("--learning_rate, --seed", [model, *data, "--seed=1", "--learning_rate=1"]),
        ("--train_file", [model, *data, "--train_file=rows.json"]),
        ("--validation_file", [model]),  # the training had no validation file
    ):
        with refused(named):
            settings_of(*words)


@pytest.mark.parametrize(("v2", "language"), [(False, "squad"), (True, "squad"), (False, "de")])
def test_scores_and_files_equal_the_trainers(make_model, make_questions, write_squad, tmp_path, capsys, v2, language):
    questions = make_questions(QUESTIONS, unanswered_every=3 * v2)
    if language == "de":  # answers with an English article
        questions = [replace(q, answer_texts=(q.context,), answer_starts=(0,)) for q in questions]
    file = write_squad(questions, "dev.json")
    folder = make_model(version_2_with_negative=v2, validation_file=str(file), answer_language=language)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    evaluate(folder, "--output_dir", ours)
    printed = capsys.readouterr().out
    words = [f"--{name}={value}" for name, value in SETTINGS.items()] + ["--no_do_train", "--strategy=none"]
    words += [f"--version_2_with_negative={v2}", f"--validation_file={file}", f"--model_name_or_path={folder}"]
    words.append(f"--answer_language={language}")
    world = make_world()
    world.set_up_device()
    loop.run(parse([*words, f"--output_dir={theirs}"]), world)

    names = {path.name for path in theirs.glob("eval_*.json")}
    assert len(names) == 4 + v2
    for name in names:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    results = json.loads((ours / "evaluation.json").read_text())
    metrics = json.loads((theirs / "eval_results.json").read_text())
    if language != "squad":
        assert metrics.pop("answer_language") == language and f"--answer_language {language}" in printed
        assert evaluated(folder, "--answer_language=squad")["metrics"]["f1"] != metrics["f1"]
    assert results["metrics"] == metrics
    sections = ("evaluation.json", "eval_samples.json", "train_results.json")
    assert undocumented(results, *sections, without=("settings", "slices", "versions", "metrics")) == []
    kinds = ("", "HasAns_", "NoAns_") if v2 else ("",)
    expected = [(pytest.approx(metrics[f"{kind}f1"]), metrics[f"{kind}total"]) for kind in kinds]
    assert [(row["f1"], row["questions"]) for row in results["slices"]["questions"]] == expected
    assert f"{metrics['f1']:.2f}" in printed and ("Thresholds for no answer" in printed) == v2
    assert ">Worst mistakes</h2>" in (ours / "evaluation.html").read_text()
    files = names | {"evaluation.json", "evaluation.html", "eval_config.yaml"}
    assert {path.name for path in ours.glob("[!.]*")} == files

    world.leave()
    (ours / "eval_null_odds.json").touch()  # from an evaluation with version_2_with_negative
    loop.run(parse([*words, f"--output_dir={ours}"]), world)
    assert {path.name for path in ours.glob("eval*")} == names | {"eval_config.yaml"}, "others are outdated"


def test_thresholds_and_mistakes(make_model):
    found = evaluated(folder := make_model(), "--mistakes", 100)
    metrics, mistakes = found["metrics"], found["mistakes"]
    assert metrics["best_f1"] > metrics["f1"]
    threshold = f"--null_score_diff_threshold={metrics['best_f1_thresh']!r}"
    at_best = evaluated(folder, threshold, "--mistakes", 0)
    assert (at_best["metrics"]["f1"], at_best["mistakes"]) == (metrics["best_f1"], [])
    assert len({mistake["id"] for mistake in mistakes}) == len(mistakes) > 2
    keys = [(mistake["f1"], -mistake["probability"]) for mistake in mistakes]
    assert keys == sorted(keys) and all(mistake["exact_match"] == 0 for mistake in mistakes)


@pytest.mark.parametrize("of_checkpoint", [False, True])
def test_kept_threshold_is_the_models(make_model, caplog, capsys, of_checkpoint):
    folder = make_model()
    model = folder / "checkpoint-3" if of_checkpoint else folder
    if of_checkpoint:
        shutil.copytree(folder, model, ignore=lambda *_: ["train_config.yaml"])
    before = (folder / "train_config.yaml").read_text()
    found = evaluated(model, "--keep_threshold")["metrics"]
    best = found["best_f1_thresh"]
    assert QuestionAnswerer(model).span_options.null_score_diff_threshold == best != 0.25
    assert predict([str(model), "--question=What?", "--context=Ada."]) == EXIT_OK
    assert f"{best!r} (from the train_config.yaml of {model})" in capsys.readouterr().out
    caplog.clear()
    caplog.set_level(logging.INFO)
    again = evaluated(model)["metrics"]
    assert again["f1"] == found["best_f1"] and found["f1"] < found["best_f1"]
    assert f"{best!r} (from the train_config.yaml of {model})" in caplog.text
    kept, parents = ((path / "train_config.yaml").read_text() for path in (model, folder))
    assert kept == before.replace("threshold: 0.25", f"threshold: {best!r}")
    assert parents == (before if of_checkpoint else kept)


def test_threshold_that_cannot_be_kept(make_model):
    model, other = make_model(), make_model("other", version_2_with_negative=False)
    bare = make_model("bare")
    (bare / "train_config.yaml").unlink()
    v2 = ("--validation_file=f", "--version_2_with_negative")
    for named, words in (
        ("--compare", (model, "--compare", other)),
        ("--version_2_with_negative", (other,)),
        (f"{other} was trained without", (other, "--version_2_with_negative")),
        (bare, (bare, *v2)),
        ("user/name", ("user/name", *v2)),
    ):
        with refused("--keep_threshold", named):
            settings_of(*words, "--keep_threshold")


def test_comparison(make_model, make_questions, write_squad, tmp_path, capsys):
    more = write_squad([replace(question, id=f"x{question.id}") for question in make_questions(5)], "b.json")
    files = [f"A={tmp_path}/squad.json", str(more)]
    one, other = make_model("one", validation_file=files), make_model("other", max_seq_length=50, validation_file=files)
    scores, results, alone = ("exact_match", "f1"), evaluated(one, "--compare", other), evaluated(other)
    metrics = results["metrics"]
    assert results["compared_metrics"] == alone["metrics"] and results["data"] == f"{tmp_path}/squad.json, {more}"
    of_files = [(name, total, pytest.approx(metrics[f"{name}_f1"])) for name, total in (("A", QUESTIONS), ("b", 5))]
    assert [(row["slice"], row["questions"], row["f1"]) for row in results["slices"]["file"]] == of_files
    for title, rows in results["slices"].items():
        for row, of_other in zip(rows, alone["slices"][title], strict=True):
            assert {name: row["compared"][name] for name in scores} == {name: of_other[name] for name in scores}
            gained = (row["exact_match"] - of_other["exact_match"]) * row["questions"] / 100
            assert row["only_right"] - row["only_compared_right"] == pytest.approx(gained)
    assert undocumented(list(results["slices"].values()), "evaluation.json") == []
    printed = capsys.readouterr().out
    assert f"Evaluation of {one} (A) and {other} (B)" in printed and "only A" in printed
    row = results["slices"]["questions"][0]
    low, high = row["interval"]["f1"]
    assert low < row["f1"] - row["compared"]["f1"] < high and f"{low:+.2f} to {high:+.2f}" in printed
    assert f"F1: {row['verdict']['f1']}." in printed
    evaluate(one, "--compare", one)
    assert "EM: no clear difference (McNemar's exact test: p = 1)." in capsys.readouterr().out


def test_custom_task_has_its_metrics(workdir, capsys):  # noqa: F811
    one, other = saved(made(), "one"), saved(made("--seed=1"), "other")
    results = evaluated(workdir / one, "--compare", workdir / other, "--output_dir", workdir / "out")
    for key, run in (("metrics", one), ("compared_metrics", other)):
        assert results[key] == evaluated(workdir / run)["metrics"]
    assert results["slices"] == {} and results["mistakes"] == []
    assert "matthews_correlation" in capsys.readouterr().out
    assert len(json.loads((workdir / "out" / "eval_predictions.json").read_text())["prediction"]) == 12
    with refused("--validation_file", "--dataset_name", error=CollectiveError):
        evaluate(workdir / saved(made(files=["--train_file=train.jsonl"])))


def test_foreign_files_are_not_replaced(make_model, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "load_task", None)  # the refusal must come first
    (tmp_path / "evaluation.html").write_text("mine")
    with refused("evaluation.html", error=CollectiveError):
        evaluate(make_model(), "--output_dir", tmp_path)


def test_custom_task_gets_the_training_file(make_model):
    trained = make_model("own", task="own_lines:Lines", train_file="rows.json", **UNUSED)
    assert settings_of(trained)[0]["train_file"] == "rows.json"
    first, second = settings_of(trained, "--compare", trained, "--train_file", "other.json")
    assert first["train_file"] == second["train_file"] == "other.json"
