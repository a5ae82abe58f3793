"""A program on two ranks trains twice with a callback, and a callback fails on one rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import documented
import pytest
from commands import printed
from launch import launcher, run

pytestmark = pytest.mark.integration

PROGRAM = """
import json, sys
from digits import Digits
from hvd_bert import Callback, train

class Steps(Callback):
    def on_start(self, task, world):
        self.world, self.seen = world, []

    def on_step(self, step):
        self.seen.append(self.world.allgather((self.world.rank, step)))
        if "fail" in sys.argv and step == 2 and self.world.rank == 1:
            raise LookupError("in a callback")

if __name__ == "__main__":
    steps, found, settings = Steps(), [], {"strategy": sys.argv[1], "max_steps": 3, "overwrite_output_dir": True}
    for out in ("first", "second"):
        result = train(task=Digits, output_dir=out, callbacks=[steps], **settings)
        found.append([steps.seen, result.scores["accuracy"], result.results["train_loss"]])
    with open(f"rank{steps.world.rank}.json", "w") as file:
        json.dump(found, file)
"""


@pytest.mark.parametrize(("by", "strategy"), [("torchrun", "ddp"), ("gloo", "horovod"), ("mpirun", "fsdp")])
def test_two_trainings_on_two_ranks(by: str, strategy: str, tmp_path: Path) -> None:
    (tmp_path / "digits.py").write_text(documented.custom_task())
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [*launcher(2, by), sys.executable, tmp_path / "program.py", strategy]
    run(command, tmp_path).expect(0)
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1] and found[0][0] == found[0][1], "equal on both ranks and in both trainings"
    assert found[0][0][0] == [[[0, step], [1, step]] for step in (1, 2, 3)]
    if strategy != "horovod":
        return
    failed = run([*command, "fail"], tmp_path)
    assert not failed.hung and failed.status == 1, failed
    assert "rank 1 on" in printed(failed) and "LookupError: in a callback" in printed(failed), failed
