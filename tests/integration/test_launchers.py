"""Each launcher starts one world: losses equal horovodrun's, a signal saves a checkpoint, and the run resumes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import stopping_at
from commands import losses, printed, small_run
from launch import TRAIN, launcher, run

pytestmark = pytest.mark.integration

# Launchers, each with a strategy. tests/cluster tests several hosts.
STARTED = [("torch", "horovod"), ("deepspeed", "deepspeed"), ("accelerate", "ddp")]
STARTED += [("JSM", "horovod"), ("FLUX", "ddp"), ("PMIX", "horovod")]


@pytest.mark.parametrize(("by", "strategy"), STARTED)
def test_two_ranks_are_one_world(tmp_path: Path, horovodruns: list[float], by: str, strategy: str) -> None:
    out = tmp_path / "out"
    words = small_run(2, out, "--strategy", strategy)[len(TRAIN) :]
    stop = [sys.executable, stopping_at.__file__, "3", "1", "SIGTERM", "start"]
    stopped = run([*launcher(2, by), *stop, *words], tmp_path)
    assert not stopped.hung and stopped.status != 0, stopped
    assert printed(stopped).count("Stopped by SIGTERM to rank 1 after step 3") == 1, stopped
    assert (out / "latest").read_text().strip() == "checkpoint-3"
    command = [*launcher(2, by), *TRAIN]
    if by == "deepspeed":  # deepspeed passes --local_rank to Python programs
        command = [*command[: command.index("--no_local_rank")], "--module", TRAIN[-1]]
    run([*command, *words], tmp_path).expect(0)
    results = json.loads((out / "train_results.json").read_text())
    assert results["world_size"] == 2 and [rank["local_rank"] for rank in results["ranks"]] == [0, 1]
    assert losses(out) == pytest.approx(horovodruns, abs=1e-5)
