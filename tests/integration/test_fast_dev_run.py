"""--fast_dev_run on two ranks prints an estimate and leaves no files, even if a rank fails or is killed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil
import pytest
from commands import printed, small_run
from launch import launcher, run
from processes import LIMIT_S

pytestmark = pytest.mark.integration

# If rank 0 is killed, a separate process removes rank 0's folder. The program deletes HVD_BERT_TEST_LAUNCH, by which
# processes.py would find and kill that process.
PROGRAM = """
import os, signal, sys
from hvd_bert import Callback, train

class Ends(Callback):
    def on_start(self, task, world):
        self.world = world

    def on_step(self, step):
        if step == 2 and sys.argv[2] == "error" and self.world.rank == 1:
            raise LookupError("in a callback")
        if step == 2 and sys.argv[2] == "SIGKILL" and self.world.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    del os.environ["HVD_BERT_TEST_LAUNCH"]
    train(config="sample", strategy=sys.argv[1], fast_dev_run=True, output_dir="out", callbacks=[Ends()])
"""


@pytest.mark.parametrize(("by", "strategy"), [("torchrun", "fsdp"), ("gloo", "horovod"), ("mpirun", "ddp")])
def test_two_ranks(by: str, strategy: str, tmp_path: Path) -> None:
    flags = ("--fast_dev_run", "--strategy", strategy, "--per_device_eval_batch_size", 1, "--max_eval_samples", 40)
    env = {"HVD_BERT_CACHE": str(tmp_path / "cache")}
    outcome = run([*launcher(2, by), *small_run(2, "out", *flags)], tmp_path, env=env).expect(0)
    assert {path.name for path in tmp_path.iterdir()} == {"cache"}, outcome
    (line,) = [line for line in printed(outcome).splitlines() if "A whole run" in line]
    pattern = r"about 0:00:\d\d: 6 step\(s\) of .* s and 1 evaluation\(s\) of .* s \(50 % measured\)\."
    assert re.search(pattern, line), outcome
    assert "on 20 questions" in printed(outcome) and "step 2/2" in printed(outcome), outcome


@pytest.mark.parametrize(
    ("by", "strategy", "end"),
    [("gloo", "horovod", "error"), ("mpirun", "ddp", "error"), ("torchrun", "ddp", "SIGKILL")],
)
def test_no_files_remain(by: str, strategy: str, end: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {"HVD_BERT_CACHE": str(tmp_path / "cache")}
    outcome = run([*launcher(2, by), sys.executable, tmp_path / "program.py", strategy, end], tmp_path, env=env)
    assert not outcome.hung and outcome.status, outcome
    assert "step 1/2" in printed(outcome), outcome
    processes = psutil.process_iter(["cmdline"])
    psutil.wait_procs([p for p in processes if any(str(tmp_path) in word for word in p.info["cmdline"] or ())], LIMIT_S)
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "program.py"}, outcome
