"""Several files: how they are named on the command line, mixed for training, and scored separately and together."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refused
from test_card import last_code_block
from test_train_run import base, process_stays_as_it_was, train  # noqa: F401  # fixtures

from hvd_bert.config.command_line import override_argv, parse, to_argv
from hvd_bert.config.settings import save


def touch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for name in ("a.json", "dev.jsonl.gz", "c:2", "lr=3.json"):
        (folder / name).touch()


@pytest.mark.parametrize(
    ("flag", "values", "expected"),
    [
        ("train_file", ["c:2"], [("c:2", "", 1)]),
        ("train_file", ["a.json:.5", "c:2:3", "d:1.json"], [("a.json", "", 0.5), ("c:2", "", 3), ("d:1.json", "", 1)]),
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
        ("validation_file", ["x=a.json", "x=c:2"], ["a.json and c:2", "named x"]),
        ("validation_file", ["c:2", "a.json"], ["c:2", "NAME=FILE"]),
        *(("validation_file", [f"{name}=a.json"], [repr(name)]) for name in ("macro", "_mm", "x_HasAns", "ö")),
    ],
)
def test_refused_files(tmp_path, monkeypatch, flag, values, named):
    touch(tmp_path, monkeypatch)
    with refused(f"--{flag}", *named):
        parse([f"--{flag}", *values])


def test_run_with_several_files(base, tmp_path, make_questions, write_squad, monkeypatch):  # noqa: F811
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
    monkeypatch.chdir(tmp_path)
    card = (tmp_path / "out" / "README.md").read_text()
    again = parse(shlex.split(last_code_block(card, "bash").replace("\\\n", ""))[3:]).data
    assert again.train_file == ("squad.json", "b.json:0.5") and again.validation_file == ("A=squad.json", "b.json")
    assert "Evaluated on `A=squad.json, b.json`: 15 examples." in card and str(tmp_path) not in card
    assert "10 windows, made of the first 9 examples of each file." in card

    (tmp_path / "out" / "train_results.json").unlink()
    files[2] = f"{others}:0.8"
    with refused("cannot be resumed", "[6, 4]", "[6, 7]"):
        train(base, *files, *flags)
    with refused("squad.json and ", "'q0'"):
        write_squad(make_questions(1), "b.json")
        train(base, *files)
