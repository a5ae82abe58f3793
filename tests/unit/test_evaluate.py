"""The command evaluate, in this process: its settings, scores equal to the trainer's, its files, and comparisons."""

from __future__ import annotations

import json
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

from hvd_bert.config.command_line import parse
from hvd_bert.distributed.world import CollectiveError
from hvd_bert.output import run_folder
from hvd_bert.tasks.base import EvaluationResult
from hvd_bert.tools.evaluate import __main__ as flags
from hvd_bert.tools.evaluate import running
from hvd_bert.training import loop, start

SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SETTINGS = {"max_seq_length": 64, "doc_stride": 8, "n_best_size": 5, "null_score_diff_threshold": 0.25}
UNUSED = dict.fromkeys(("version_2_with_negative", *SETTINGS.keys() - {"max_seq_length"}))  # by other tasks
QUESTIONS = 12


@pytest.fixture
def make_model(tmp_path, tokenizer, make_questions, write_squad):
    """make_model(name, **settings) -> a folder as a training leaves it, with random weights."""
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
    """The content of evaluation.json."""
    file = folder.parent / "results.json"
    evaluate(folder, *words, "--json", file, "--overwrite")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def settings_of(*words: object) -> list[dict[str, Any]]:
    return [config.as_flat() for config in flags.parse([str(word) for word in words])[1]]


def test_settings_and_data_of_the_training_are_the_defaults(make_model):
    folder = make_model(per_device_eval_batch_size=3, max_eval_samples=2, seed=7, bf16=True)
    (found,) = settings_of(folder)
    trained = SETTINGS | {"version_2_with_negative": True, "per_device_eval_batch_size": 3}
    assert {name: found[name] for name in trained} == trained
    assert found["validation_file"].endswith("squad.json") and found["model_name_or_path"] == str(folder)
    assert (found["max_eval_samples"], found["bf16"], found["do_train"]) == (None, False, False)
    (found,) = settings_of(folder, "--max_seq_length", 50, "--bf16")
    assert (found["max_seq_length"], found["doc_stride"], found["bf16"]) == (50, 8, True)


def test_other_data_do_not_get_the_columns_of_the_trainings_data(make_model):
    folder = make_model(context_column="passage")
    (found,) = settings_of(folder)
    assert found["context_column"] == "passage"
    for words in (["--validation_file", "f.csv"], ["--dataset_name", "squad"], ["--validation-file=f.csv"]):
        (found,) = settings_of(folder, *words)
        assert found["context_column"] == "context"
        assert not (found["validation_file"] and found["dataset_name"])


def test_a_checkpoint_has_the_settings_of_its_folder_and_a_preset_overrides_them(make_model):
    assert settings_of(make_model() / "checkpoint-3")[0]["max_seq_length"] == 64
    (found,) = settings_of(make_model("other"), "--config", "sample")
    assert (found["max_seq_length"], found["config_name"]) == (160, None)


def test_compared_models_have_the_same_questions_and_rules(make_model):
    one = make_model("one")
    two = make_model(
        "two", version_2_with_negative=False, max_seq_length=50, validation_file=None, dataset_name="squad"
    )
    first, second = settings_of(one, "--compare", two)
    differing = {name for name in first if first[name] != second[name]}
    assert differing == {"model_name_or_path", "max_seq_length"}
    assert (second["max_seq_length"], second["version_2_with_negative"]) == (50, True)


def test_wrong_command_lines():
    with refused("MODEL"):
        flags.parse(["--validation_file", "f", "model"])
    with refused("--learning_rate"):
        flags.parse(["model", "--learning_rate", "1"])


@pytest.mark.parametrize("v2", [False, True], ids=["v1.1", "v2.0"])
def test_scores_and_files_are_the_trainers(make_model, make_questions, write_squad, tmp_path, capsys, v2):
    file = write_squad(make_questions(QUESTIONS, unanswered_every=3 * v2), "dev.json")
    folder = make_model(version_2_with_negative=v2, validation_file=str(file))
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    evaluate(folder, "--output_dir", ours)
    printed = capsys.readouterr().out
    words = [f"--{name}={value}" for name, value in SETTINGS.items()] + ["--no_do_train", "--strategy=none"]
    words += [f"--version_2_with_negative={v2}", f"--validation_file={file}", f"--model_name_or_path={folder}"]
    world = make_world()
    world.set_up_device()
    loop.run(parse([*words, f"--output_dir={theirs}"]), world)

    names = {path.name for path in theirs.glob("eval_*.json")}
    assert len(names) == 4 + v2
    for name in names:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    results = json.loads((ours / "evaluation.json").read_text())
    metrics = json.loads((theirs / "eval_results.json").read_text())
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
    loop.run(parse([*words, f"--output_dir={ours}"]), world)
    assert not list(ours.glob("evaluation.*")), "they would contradict the new scores"


def test_files_of_an_earlier_evaluation_are_removed(tmp_path):
    (tmp_path / "eval_null_odds.json").write_text("{}")
    files = {"eval_predictions.json": {"q0": "red"}}
    run_folder.write_evaluation(tmp_path, EvaluationResult({"f1": 60.0}, "", files))
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert found == files | {"eval_results.json": {"f1": 60.0}}


def test_scores_of_each_file(make_model, make_questions, write_squad, tmp_path):
    other = write_squad([replace(question, id=f"x{question.id}") for question in make_questions(5)], "b.json")
    found = evaluated(make_model(validation_file=[f"A={tmp_path}/squad.json", str(other)]))
    rows = [(row["slice"], row["questions"], row["f1"]) for row in found["slices"]["file"]]
    of_files = [(name, total, pytest.approx(found["metrics"][f"{name}_f1"])) for name, total in (("A", 12), ("b", 5))]
    assert rows == of_files and found["data"] == f"{tmp_path}/squad.json, {other}"


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


def test_comparison(make_model, capsys):
    one, other = make_model("one"), make_model("other", max_seq_length=50)
    scores, results, alone = ("exact_match", "f1"), evaluated(one, "--compare", other), evaluated(other)
    assert results["compared_metrics"] == alone["metrics"]
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


def test_own_task_has_its_metrics(workdir, capsys):  # noqa: F811
    one, other = saved(made(), "one"), saved(made("--seed=1"), "other")
    results = evaluated(workdir / one, "--compare", workdir / other, "--output_dir", workdir / "out")
    for key, run in (("metrics", one), ("compared_metrics", other)):
        assert results[key] == evaluated(workdir / run)["metrics"]
    assert results["slices"] == {} and results["mistakes"] == []
    assert "matthews_correlation" in capsys.readouterr().out
    assert len(json.loads((workdir / "out" / "eval_predictions.json").read_text())["prediction"]) == 12


def test_files_of_others_are_kept(make_model, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "load_task", None)  # before any work
    (tmp_path / "evaluation.html").write_text("mine")
    with refused("evaluation.html", error=CollectiveError):
        evaluate(make_model(), "--output_dir", tmp_path)


def test_training_without_validation_data(make_model):
    folder = make_model(train_file="train.json", validation_file=None)
    with refused(folder, "--validation_file"):
        flags.parse([str(folder)])
    assert settings_of(folder, "--validation_file", "dev.json")[0]["validation_file"] == "dev.json"


def test_own_task_without_validation_data(workdir):  # noqa: F811
    with refused("--validation_file", "--dataset_name", error=CollectiveError):
        evaluate(workdir / saved(made(files=["--train_file=train.jsonl"])))


def test_own_task_gets_the_training_file(make_model):
    """It may read its model's shape, or all its data, from it."""
    trained = make_model("own", task="own_lines:Lines", train_file="rows.json", **UNUSED)
    assert settings_of(trained)[0]["train_file"] == "rows.json"
    first, second = settings_of(trained, "--compare", trained, "--train_file", "other.json")
    assert first["train_file"] == second["train_file"] == "other.json"
    with refused("--train_file"):
        settings_of(make_model(), "--train_file", "rows.json")
