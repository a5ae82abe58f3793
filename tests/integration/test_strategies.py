"""Whole runs with each strategy equal one process, and a strategy resumes another strategy's checkpoint."""

from __future__ import annotations

import json
import sys

import pytest
import stopping_at
from commands import GLOBAL_BATCH, losses, read_lines, skip_without, small_run
from launch import TRAIN, launcher, run

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed"])
def test_two_ranks_write_the_same_files_and_scores_as_one_process(tmp_path, baseline, strategy):
    skip_without(strategy)
    out = tmp_path / "out"
    run([*launcher(2, "mpi"), *small_run(2, out, "--strategy", strategy)], tmp_path).expect(0)
    names = {path.name for path in baseline.iterdir()}
    assert {path.name for path in out.iterdir()} == names
    assert losses(out) == pytest.approx(losses(baseline), abs=1e-4)
    scores, expected = (json.loads((folder / "eval_results.json").read_text()) for folder in (out, baseline))
    assert scores["total"] == 7 and scores == pytest.approx(expected, abs=1e-3)
    results = json.loads((out / "train_results.json").read_text())
    assert (results["strategy"], results["world_size"], results["global_batch"]) == (strategy, 2, GLOBAL_BATCH)
    assert [process["rank"] for process in results["processes"]] == [0, 1]
    assert all(process["user_s"] > 0 and 0 < process["real_s"] < 600 for process in results["processes"])
    assert results["work"] == json.loads((baseline / "train_results.json").read_text())["work"]


def test_a_launchers_local_rank_is_no_setting(tmp_path, baseline):
    out = tmp_path / "out"
    launch = [sys.executable, "-m", "torch.distributed.launch", "--standalone", "--nproc-per-node=2"]
    words = small_run(2, out, "--strategy", "ddp")[len(TRAIN) :]
    run([*launch, "--module", "hvd_bert.train", *words], tmp_path).expect(0)
    assert losses(out) == pytest.approx(losses(baseline), abs=1e-4)
    assert json.loads((out / "train_results.json").read_text())["world_size"] == 2
    assert "\nlocal_rank:" not in (out / "train_config.yaml").read_text()


def test_checkpoint_of_one_strategy_is_resumed_under_another(tmp_path, baseline):
    out = tmp_path / "out"
    # Do not compare the status, because launchers replace it.
    for step, by, strategy, size in ((2, "torchrun", "fsdp", 2), (4, "none", "none", 1)):
        stop = [sys.executable, stopping_at.__file__, step, 0, "SIGTERM", "start"]
        words = small_run(size, out, "--strategy", strategy)[len(TRAIN) :]
        outcome = run([*launcher(size, by), *map(str, stop), *words], tmp_path)
        assert not outcome.hung and (out / "latest").read_text().strip() == f"checkpoint-{step}", outcome
    last = run([*launcher(2, "torchrun"), *small_run(2, out, "--strategy", "ddp")], tmp_path).expect(0)
    assert "Resuming from step 4" in last.output
    scores, expected = (json.loads((folder / "eval_results.json").read_text()) for folder in (out, baseline))
    assert scores == pytest.approx(expected, abs=1e-3)
    assert losses(out) == pytest.approx(losses(baseline), abs=1e-4)


@pytest.mark.parametrize("flags", [("fsdp",), ("deepspeed", "--zero_stage", 1)])
def test_best_model_is_saved(tmp_path, flags):
    """The learning rate is so high that the last evaluation is not the best."""
    skip_without(flags[0])
    out = tmp_path / "out"
    best = ["--load_best_model_at_end", "--metric_for_best_model", "eval_loss", "--eval_steps", 1]
    best += ["--learning_rate", 0.02, "--lr_scheduler_type", "constant", "--save_steps", 100]
    run([*launcher(2, "mpi"), *small_run(2, out, "--strategy", *flags, *best)], tmp_path).expect(0)
    *evaluated, last = [line["eval_loss"] for line in read_lines(out / "metrics.jsonl") if "eval_loss" in line]
    assert evaluated[-1] > min(evaluated) + 0.01
    assert last == pytest.approx(min(evaluated), abs=1e-5)
