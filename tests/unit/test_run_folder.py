"""The output folder: when it is refused, which files are removed, and that files are complete."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, BertConfig, BertForQuestionAnswering

from hvd_bert.checkpoint import run_folder
from hvd_bert.config.command_line import parse
from hvd_bert.config.settings import Config
from hvd_bert.errors import UserError
from hvd_bert.evaluation.evaluator import Evaluation
from hvd_bert.evaluation.postprocess import Answer


def config(folder: Path | None, *flags: str) -> Config:
    return parse([*([] if folder is None else ["--output_dir", str(folder)]), *flags])


def test_check_changes_nothing(tmp_path):
    run_folder.check(config(tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []


def test_folder_is_made_with_the_settings(tmp_path):
    wanted = config(tmp_path / "a" / "b")
    run_folder.make_ready(wanted, None)
    assert parse(["--config", str(tmp_path / "a" / "b" / "train_config.yaml")]) == wanted


def test_dated_folders_are_never_shared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder.time, "strftime", lambda pattern: "runs/now")
    runs = [config(None) for _ in range(3)]
    for run in runs:
        run_folder.check(run)
        run_folder.make_ready(run, None)
    assert [run.train.output_dir for run in runs] == ["runs/now", "runs/now-2", "runs/now-3"]


def test_folder_with_files_is_refused_and_left_alone(tmp_path):
    for name in ("d", "a", "c", "b"):
        (tmp_path / name).write_text(name)
    with pytest.raises(UserError, match=r"is not empty \(a, b, c, \.\.\.\): .* --overwrite_output_dir"):
        run_folder.check(config(tmp_path))
    run_folder.check(config(tmp_path, "--overwrite_output_dir"))
    run_folder.check(config(tmp_path, "--no_do_train"))  # an evaluation adds to a folder
    assert sorted(path.name for path in tmp_path.iterdir()) == [run_folder.LOCK, "a", "b", "c", "d"]


def test_the_model_that_training_starts_from_is_kept(tmp_path):
    flags = ["--model_name_or_path", str(tmp_path), "--overwrite_output_dir"]
    with pytest.raises(UserError, match="is the folder of the model that training starts from"):
        run_folder.check(config(tmp_path, *flags))
    run_folder.check(config(tmp_path, *flags, "--no_do_train"))


@pytest.mark.parametrize("inside", ["", "below"])
def test_file_in_the_way(tmp_path, inside):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"--output_dir .*file.* cannot be written: "):
        run_folder.check(config(tmp_path / "file" / inside, "--overwrite_output_dir"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot be written: Permission denied"):
        run_folder.check(config(tmp_path))


@pytest.mark.parametrize("train", [True, False])
def test_only_a_runs_own_files_are_removed(tmp_path, train):
    kept = {"notes.txt", "checkpoint", "train-v1.1.json", "precious"}
    (tmp_path / "checkpoint").mkdir()
    for name in kept - {"checkpoint"}:
        (tmp_path / name).write_text(name)
    for name in run_folder.RUN_FILES:
        if name == "tb":
            (tmp_path / name).mkdir()
            (tmp_path / name / "events.1").write_text("x")
        else:
            (tmp_path / name).write_text("x")
    if not train:
        kept |= {name for name in run_folder.RUN_FILES if not name.startswith("eval_")}
    run_folder.clear(tmp_path, train)
    assert {path.name for path in tmp_path.iterdir()} == kept
    run_folder.clear(tmp_path, train)  # nothing there: fine


def test_what_a_link_points_to_is_kept(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "events.1").write_text("x")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "tb").symlink_to(elsewhere)
    run_folder.clear(folder, train=True)
    assert list(folder.iterdir()) == []
    assert (elsewhere / "events.1").exists()


def answer(number: int, odds: float | None) -> Answer:
    return Answer(f"q{number}", f"text {number}", [{"text": f"text {number}", "probability": 1.0}], odds)


@pytest.mark.parametrize("v2", [False, True], ids=["v1.1", "v2.0"])
def test_evaluation_files(tmp_path, v2):
    metrics = {"exact_match": 50.0, "f1": 60.0, "eval_loss": 1.5}
    run_folder.write_evaluation(
        tmp_path, Evaluation(metrics, [answer(n, n - 0.5 if v2 else None) for n in range(3)], 1.5)
    )
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert found.pop("eval_null_odds.json", None) == ({"q0": -0.5, "q1": 0.5, "q2": 1.5} if v2 else None)
    assert found == {
        "eval_results.json": metrics,
        "eval_predictions.json": {f"q{n}": f"text {n}" for n in range(3)},
        "eval_nbest_predictions.json": {f"q{n}": [{"text": f"text {n}", "probability": 1.0}] for n in range(3)},
    }
    assert set(os.listdir(tmp_path)) <= run_folder.RUN_FILES.keys()  # or the next run would not replace it


def test_saved_model_is_loaded_by_transformers(tmp_path, tokenizer):
    model = BertForQuestionAnswering(
        BertConfig(
            vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
        )
    )
    run_folder.save_model(tmp_path, model, tokenizer)
    assert set(os.listdir(tmp_path)) <= run_folder.RUN_FILES.keys()
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1  # readable as the umask allows
    loaded = AutoModelForQuestionAnswering.from_pretrained(tmp_path).state_dict()
    assert all(value.equal(loaded[name]) for name, value in model.state_dict().items())
    text = "what colour is the box?"
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_describe_names_what_is_there(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "tb").mkdir()
    (tmp_path / "notes.txt").write_text("")
    head, *lines = run_folder.describe(tmp_path).splitlines()
    assert head == f"In {tmp_path}:"
    assert [line.split()[0] for line in lines] == ["metrics.jsonl", "tb"]
