"""One world under every launcher: the losses of horovodrun's, a checkpoint at a signal, an end of the resumed run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import stopping_at
from commands import losses, read_lines, said, small_run
from launch import TRAIN, Outcome, launcher, run

from hvd_bert.errors import EXIT_BAD_INPUT

pytestmark = pytest.mark.integration

# How the ranks are started, with the strategy. tests/cluster has those of several hosts.
STARTED = [("torch", "horovod"), ("torch", "fsdp"), ("deepspeed", "deepspeed"), ("accelerate", "ddp")]
STARTED += [("JSM", "horovod"), ("FLUX", "ddp"), ("PMIX", "horovod")]


@pytest.mark.parametrize(("by", "strategy"), STARTED)
def test_two_ranks_are_one_world(tmp_path: Path, horovodruns: list[float], by: str, strategy: str) -> None:
    out = tmp_path / "out"
    words = small_run(2, out, "--strategy", strategy)[len(TRAIN) :]
    stop = [sys.executable, stopping_at.__file__, "3", "1", "SIGTERM", "start"]
    stopped = run([*launcher(2, by), *stop, *words], tmp_path)
    assert not stopped.hung and stopped.status != 0, stopped
    assert said(stopped).count("Stopped after step 3 by SIGTERM to rank 1") == 1, stopped
    assert (out / "latest").read_text().strip() == "checkpoint-3"
    command = [*launcher(2, by), *TRAIN]
    if by == "deepspeed":  # it gives a Python program the flag --local_rank
        command = [*command[: command.index("--no_local_rank")], "--module", TRAIN[-1]]
    run([*command, *words], tmp_path).expect(0)
    results = json.loads((out / "train_results.json").read_text())
    assert results["world_size"] == 2 and [rank["local_rank"] for rank in results["ranks"]] == [0, 1]
    assert losses(out) == pytest.approx(horovodruns, abs=1e-5)


def test_rank_without_its_world(tmp_path: Path) -> None:
    def alone(**variables: str) -> Outcome:
        return run(small_run(1, "out"), tmp_path, env=variables)

    refused = alone(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1").expect(EXIT_BAD_INPUT)
    assert refused.output.count("MASTER_PORT") == 1 and "Traceback" not in refused.output, refused
    assert not (tmp_path / "out").exists()
    trained = alone(WORLD_SIZE="2").expect(0)
    assert trained.output.count("WORLD_SIZE=2 is ignored") == 1, trained
    warnings = [event for event in read_lines(tmp_path / "out" / "events.jsonl") if event["event"] == "warning"]
    assert any("WORLD_SIZE=2" in event["message"] for event in warnings)
