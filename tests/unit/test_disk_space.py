"""A training's disk space: the estimate of --fast_dev_run, and the refusal of a disk that is too full."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_fast_dev_run import rehearse
from test_train_run import base, content, process_stays_as_it_was, train, world_of_one  # noqa: F401

from hvd_bert.config.command_line import override_argv, parse
from hvd_bert.distributed.world import CollectiveError
from hvd_bert.output.callback import Callback, RunResult
from hvd_bert.training import loop

LIMITED = ["--save_steps", "1", "--save_total_limit", "1"]
SAVES = [["--ema_decay", "0.9", "--optim", "lars"], ["--save_only_model"], ["--lora_rank", "8"], ["--save_steps", "0"]]


@pytest.mark.parametrize("flags", [*SAVES, LIMITED], ids=str)
def test_estimated_space_equals_the_files(base, tmp_path, monkeypatch, flags):  # noqa: F811
    """Use a model whose weights are large compared with the tokenizer's files."""
    large = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    shape = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape | large))
    saved: list[int] = []

    class Sizes(Callback):
        def on_save(self, step: int, folder: Path) -> None:
            saved.append(size(folder))

        def on_end(self, run: RunResult) -> None:
            self.at_end = size(run.output_dir / "model.safetensors")
            self.at_end += sum(map(size, run.output_dir.glob("checkpoint-*")))

    flags = ["--max_steps", "2", "--output_dir", str(tmp_path / "out"), *flags]
    sizes = Sizes()
    loop.run(parse(override_argv(base, flags)), world_of_one(), [sizes])
    most = sum(saved[:2]) if len(saved) > 1 else sizes.at_end
    with_free(monkeypatch, 10 * most)
    estimate = rehearse(base, *flags).results["estimate"]
    assert estimate["disk_bytes"] == pytest.approx(most, rel=0.05)


def test_run_without_enough_space_is_warned_about(base, tmp_path, monkeypatch, caplog):  # noqa: F811
    flags = ["--output_dir", str(tmp_path / "out"), "--max_steps", "2", *LIMITED]
    most = rehearse(base, *flags).results["estimate"]["disk_bytes"]
    for free, warns in ((most, False), (most - 1, True)):
        with_free(monkeypatch, free)
        rehearse(base, *flags)
        assert ("--save_total_limit" in caplog.text) == warns


def size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.iterdir())


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


def test_disk_without_space_for_a_checkpoint_is_refused(base, tmp_path, monkeypatch):  # noqa: F811
    out = tmp_path / "out"
    flags = ["--output_dir", str(out), "--max_steps", "2", "--save_steps", "1", "--no_do_eval"]
    train(base, *flags)
    before, checkpoint = content(out), size(out / "checkpoint-1")

    def refused(free: int, *more: str) -> None:
        with_free(monkeypatch, free)
        with pytest.raises(CollectiveError, match="a checkpoint takes") as refusal:
            train(base, *flags, *more)
        assert refusal.value.status == 2

    refused(-2 * checkpoint, "--overwrite_output_dir")
    assert content(out) == before
    (out / "train_results.json").unlink()
    with_free(monkeypatch, checkpoint // 2)
    train(base, *flags)  # resumes after the last step: only the model is written
    (out / "train_results.json").unlink()
    shutil.rmtree(out / "checkpoint-2")
    (out / "latest").write_text("checkpoint-1")
    refused(checkpoint // 2)  # a resumed run's checkpoints stay
    with_free(monkeypatch, 0)
    train(base, *flags, "--overwrite_output_dir")  # the earlier checkpoint is removed first
