"""The space that a training takes on the disk is known before it starts, and too little is warned about or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_train_run import base, content, process_stays_as_it_was, train, world_of_one  # noqa: F401

from hvd_bert.config.command_line import override_argv, parse
from hvd_bert.distributed.world import CollectiveError, World
from hvd_bert.output.callback import Callback, RunResult
from hvd_bert.tasks.base import Task
from hvd_bert.training import disk_space, loop

SAVES = [[], ["--ema_decay", "0.9"], ["--save_only_model"], ["--optim", "lars"], ["--lora_rank", "8"]]
SAVES += [["--save_steps", "0"], ["--save_steps", "1", "--save_total_limit", "1"]]


@pytest.mark.parametrize("flags", SAVES, ids=str)
def test_space_is_what_the_files_take(base, tmp_path, flags):  # noqa: F811
    """Of two steps, with a model whose tokenizer is small next to its weights."""
    large = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    shape = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape | large))
    sizes: list[int] = []

    class Sizes(Callback):
        def on_start(self, task: Task, world: World) -> None:
            self.most = disk_space.needed(config, task.model, task.plan).most

        def on_save(self, step: int, folder: Path) -> None:
            sizes.append(size(folder))

        def on_end(self, run: RunResult) -> None:
            sizes.append(
                size(run.output_dir / "model.safetensors") + sum(map(size, run.output_dir.glob("checkpoint-*")))
            )

    config = parse(override_argv(base, ["--max_steps", "2", *flags, "--output_dir", str(tmp_path / "out")]))
    callback = Sizes()
    loop.run(config, world_of_one(), [callback])
    most = sum(sizes[:2]) if "--save_total_limit" in flags else sizes[-1]
    assert callback.most == pytest.approx(most, rel=0.05)


def size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.iterdir())


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


def test_small_disk_is_warned_about_or_refused(base, tmp_path, monkeypatch, caplog):  # noqa: F811
    out = tmp_path / "out"
    base = [*base, "--output_dir", str(out), "--max_steps", "2", "--save_steps", "1", "--no_do_eval"]
    train(base)
    checkpoint = size(out / "checkpoint-1")
    for free, warns in ((3 * checkpoint, False), (checkpoint, True)):
        caplog.clear()
        with_free(monkeypatch, free - size(out / "model.safetensors") - 2 * checkpoint)
        train(base, "--overwrite_output_dir")  # whose earlier files count as free
        assert ("but the run may take" in caplog.text) == ("Lower --save_total_limit" in caplog.text) == warns
    before = content(out)
    with_free(monkeypatch, -2 * checkpoint)
    with pytest.raises(CollectiveError, match=r"has .* free, but a checkpoint takes") as refused:
        train(base, "--overwrite_output_dir")
    assert refused.value.status == 2 and content(out) == before


def test_checkpoints_to_resume_from_take_space_of_the_first_new_one(base, tmp_path, monkeypatch):  # noqa: F811
    out = tmp_path / "out"
    base = [*base, "--output_dir", str(out), "--no_do_eval", "--max_steps", "3", "--save_steps", "2"]
    train(base)
    (out / "train_results.json").unlink()
    with_free(monkeypatch, size(out / "checkpoint-2") // 2)
    train(base)  # all steps are done
    (out / "train_results.json").unlink()
    shutil.rmtree(out / "checkpoint-3")
    with pytest.raises(CollectiveError, match="a checkpoint takes") as kept:
        train(base)
    assert kept.tb  # whose frames have the world
    with_free(monkeypatch, 2 * size(out / "checkpoint-2"))
    train(base)
