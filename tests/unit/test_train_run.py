"""A refused run changes nothing: an earlier run's files stay until the new one starts training or has evaluated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_world import make_world

from hvd_bert.checkpoint import output_dir
from hvd_bert.config.command_line import overriding, parse
from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.distributed.world import CollectiveError, World
from hvd_bert.storage import written
from hvd_bert.train import loop

SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture
def base(tmp_path, tokenizer, make_questions, write_squad) -> list[str]:
    """Flags of a training of three steps with an evaluation, which takes a tenth of a second."""
    model = tmp_path / "model"
    tokenizer.save_pretrained(model)
    (model / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": len(tokenizer), **SHAPE}))
    file = str(write_squad(make_questions(6)))
    flags = ["--config_name", str(model), "--train_file", file, "--validation_file", file, "--max_seq_length", "64"]
    return [*flags, "--doc_stride", "8", "--max_steps", "3", "--strategy", "none", "--num_threads", "1"]


@pytest.fixture(autouse=True)
def process_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loop, "set_up", lambda config, world: None)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    output_dir.unlock()


def world_of_one() -> World:
    world = make_world()
    world.set_up_device()
    return world


def train(base: list[str], *flags: str) -> None:
    loop.run(parse(overriding(base, flags)), world_of_one())


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_refused_training_keeps_the_earlier_run(base, tmp_path, monkeypatch):
    out = tmp_path / "out"
    train(base, "--output_dir", str(out))
    before = content(out)
    assert written.names(out) >= {"train_results.json", "eval_results.json", "checkpoint-3", "config.json", "tb"}
    horovod = ["--strategy", "horovod", "--timeline_file", str(tmp_path / "timeline.json")]
    refusals = {
        "this run has only 3 steps": ["--profile", "--timeline_steps", "11:30"],
        "a single rank sends no gradients": [*horovod, "--timeline_steps", "1:2"],
        "need evaluations during training": ["--load_best_model_at_end", "--eval_strategy", "no"],
    }
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(BatchPlan, "rank_windows", no_memory)
        train(base, "--output_dir", str(out), "--overwrite_output_dir")
    output_dir.unlock()
    assert content(out) == before
    monkeypatch.setattr(loop, "strategy_class", lambda name: None)
    monkeypatch.setattr("hvd_bert.training.state.make_strategy", without_horovod)
    for words, flags in refusals.items():
        with pytest.raises(CollectiveError, match=words):
            train(base, "--output_dir", str(out), "--overwrite_output_dir", *flags)
        output_dir.unlock()
        assert content(out) == before
        with pytest.raises(CollectiveError, match=words):
            train(base, "--output_dir", str(tmp_path / "new"), *flags)
        assert not (tmp_path / "new").exists() and not (tmp_path / "timeline.json").exists()
    train(base, "--output_dir", str(out), "--overwrite_output_dir", "--max_steps", "2", "--no_do_eval")
    assert {"checkpoint-2"} == {path.name for path in out.glob("checkpoint-*")}
    assert not list(out.glob("eval_*.json")) and (out / "train_results.json").exists()


def no_memory(plan, step, rank):
    raise MemoryError


def without_horovod(name, *arguments):
    from hvd_bert.strategies.table import make_strategy

    return make_strategy("none", *arguments)


def test_failed_evaluation_keeps_the_earlier_one(base, tmp_path):
    out, model = tmp_path / "out", tmp_path / "trained"
    train(base, "--output_dir", str(model), "--no_do_eval")
    evaluate = [*base[2:], "--no_do_train", "--model_name_or_path", str(model)]
    train(evaluate, "--output_dir", str(out))
    before = content(out)
    weights = load_file(model / "model.safetensors")
    save_file({name: value * float("nan") for name, value in weights.items()}, model / "model.safetensors")
    for folder in (out, tmp_path / "new"):
        with pytest.raises(CollectiveError, match="NaN"):
            train(evaluate, "--output_dir", str(folder))
    assert content(out) == before and not (tmp_path / "new").exists()
