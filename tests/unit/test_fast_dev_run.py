"""--fast_dev_run: its estimate, the chosen first step, and no remaining files however it ends."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from test_train_run import base, content, process_stays_as_it_was, train, world_of_one  # noqa: F401

from hvd_bert.config.command_line import override_argv, parse
from hvd_bert.errors import UserError
from hvd_bert.output.callback import Callback, RunResult
from hvd_bert.training import fast_dev_run


def rehearse(base: list[str], *flags: str, callback: Callback | None = None) -> RunResult:  # noqa: F811
    config = parse(override_argv(base, ["--fast_dev_run", *flags]))
    return fast_dev_run.run(config, world_of_one(), [callback] if callback else [])


class Fails(Callback):
    """Stores the run's folder, and fails in step 2. `how`: "error", "Ctrl-C", or anything else for no failure."""

    def __init__(self, out: Path, how: str) -> None:
        self._out, self._how = out, how

    def on_step(self, step: int) -> None:
        (self.folder,) = self._out.glob(".fast_dev_run-*")
        if step == 2 and self._how == "Ctrl-C":
            os.kill(os.getpid(), signal.SIGINT)
        elif step == 2 and self._how == "error":
            raise MemoryError


@pytest.mark.parametrize(("how", "raised"), [("no", None), ("error", MemoryError), ("Ctrl-C", KeyboardInterrupt)])
def test_no_files_are_left_next_to_an_earlier_run(base, tmp_path, how, raised):  # noqa: F811
    out = tmp_path / "out"
    train(base, "--output_dir", str(out), "--max_steps", "1")
    (out / "train_results.json").unlink()  # an unfinished run, which a training would resume
    rehearse(base, "--output_dir", str(tmp_path / "new" / "run"))  # fills the cache of windows
    assert not (tmp_path / "new").exists()
    before, fails = content(tmp_path), Fails(out, how)
    flags = ["--overwrite_output_dir", "--save_steps", "1", "--report_to", "wandb,tensorboard"]
    with pytest.raises(raised) if raised else nullcontext():
        result = rehearse(base, "--output_dir", str(out), *flags, callback=fails)
        assert result.output_dir == fails.folder and result.results["checkpoints"] == 2
    assert content(tmp_path) == before and not fails.folder.exists()


def test_estimate_of_the_whole_run(base, tmp_path, make_questions, write_squad, caplog):  # noqa: F811
    dev = str(write_squad(make_questions(40), "dev.json"))
    flags = ["--max_steps", "9", "--eval_steps", "3", "--validation_file", dev, "--per_device_eval_batch_size", "1"]
    rates: list[float] = []

    class Rates(Callback):
        def on_log(self, step: int, metrics: dict[str, float]) -> None:
            rates.append(metrics["learning_rate"])

    whole = [*flags, "--output_dir", str(tmp_path / "out"), "--logging_steps", "1"]
    with caplog.at_level(logging.INFO, "hvd_bert"):
        found = rehearse(base, *whole, callback=Rates())
    estimate = found.results["estimate"]
    assert (estimate["steps"], estimate["evaluations"], found.results["checkpoints"]) == (9, 3, 1)
    assert found.scores["total"] == 14  # every third of 40 questions, at most 16 batches
    assert estimate["evaluation_s"] == pytest.approx(found.results["evaluation_s"] * 40 / 14)
    assert estimate["run_s"] == pytest.approx(9 * estimate["step_s"] + 3 * estimate["evaluation_s"])
    assert estimate["memory_bytes"] == found.results["processes"][0]["memory_peak_bytes"]
    assert re.search(r"about 0:00:\d\d: 9 step", caplog.text)
    train(base, *whole)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert rates == [line["learning_rate"] for line in lines if "loss" in line][:2]


def test_first_step_has_the_most_tokens(base, tmp_path, make_questions, write_squad):  # noqa: F811
    tokens: list[int] = []

    class Tokens(Callback):
        def on_start(self, task: Any, world: Any) -> None:
            plan = task.plan
            self.most = max(int(plan.lengths[plan.step_windows(n)].sum()) for n in range(plan.steps_per_epoch))

        def on_batch(self, batch: Any) -> None:
            tokens.append(batch.num_tokens)

    callback = Tokens()
    rehearse(base, "--per_device_train_batch_size", "1", "--output_dir", str(tmp_path / "out"), callback=callback)
    assert tokens[0] == callback.most > tokens[1]


@pytest.mark.parametrize("flag", [["--no_do_train"], ["--resume_from_checkpoint", "latest"]], ids=str)
def test_flags_without_a_training_from_the_start_are_refused(base, flag):  # noqa: F811
    with pytest.raises(UserError, match=f"--fast_dev_run .* remove .*{flag[0]}"):
        rehearse(base, *flag)
