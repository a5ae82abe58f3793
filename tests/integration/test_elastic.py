"""Horovod elastic on this machine under two or three host names, and deadlocks reported by Horovod's users."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import stopping_at
import torch
from commands import printed, small_run
from launch import Outcome, built, launcher, run
from stopping_at import PHASES, notes, taken

from hvd_bert.distributed.horovod_world import QUEUED_TOO_LATE

pytestmark = pytest.mark.integration

WINDOWS, STEPS_PER_EPOCH = 33, 3  # as in small_run
MAX_DIFFERENCE = 1e-5  # after a change of ranks, gradients are summed in a different order
HOSTS = ("localhost", "127.0.0.1", "127.1")  # three names of this machine


def elastic(
    folder: Path, stop: str, *flags: object, slots: int = 1, least: int = 1, discover: str = "", limit_s: int = 30
) -> Outcome:
    """Run small_run on two hosts with `slots` ranks each. Each host name has a separate folder.

    `stop`: step, rank, signal and moment for stopping_at.py. `discover`: shell commands that print the hosts. `least`:
    --min-np, and with `discover` the number of ranks at the start. `limit_s`: Gloo's time limit, in seconds, for ranks
    that do not answer.
    """
    if "gloo" not in built():
        pytest.skip("this Horovod was built without gloo")
    for host in HOSTS:
        (folder / host).mkdir(parents=True)
    (folder / "discover").write_text("#!/bin/sh\n" + (discover or f"echo {HOSTS[0]}:{slots}\necho {HOSTS[1]}:{slots}"))
    (folder / "discover").chmod(0o755)
    size = least if discover else 2 * slots
    words = [Path(sys.executable).with_name("horovodrun"), "-np", size, "--min-np", least, "--max-np", 2 * slots]
    words += ["--host-discovery-script", folder / "discover", "--network-interfaces", "lo"]
    words += ["env", "sh", "-c", 'cd $HOROVOD_HOSTNAME && exec "$@"', "sh"]
    train = small_run(size, "out", "--elastic", *flags)
    words += [sys.executable, stopping_at.__file__, *stop.split(), *train[3:]]
    environ = {"HVD_BERT_CACHE": str(folder / "cache"), "HOROVOD_GLOO_TIMEOUT_SECONDS": str(limit_s)}
    return run([str(word) for word in words], folder, env=environ)


def test_training_continues_without_a_killed_worker(tmp_path: Path) -> None:
    outcome = elastic(tmp_path, "5 0 SIGKILL start").expect(0)
    assert "Resuming after step 4, kept by rank 0" in printed(outcome), outcome
    (results,) = tmp_path.glob("*/out/train_results.json")
    result = json.loads(results.read_text())
    assert (result["world_size"], result["train_samples"]) == (1, 2 * WINDOWS)
    windows = taken(tmp_path, 4)
    for epoch in range(2):
        steps = range(epoch * STEPS_PER_EPOCH + 1, (epoch + 1) * STEPS_PER_EPOCH + 1)
        assert sum((windows[step] for step in steps), Counter()) == Counter(range(WINDOWS))


def test_operation_queued_too_late_ends_the_rank(tmp_path: Path) -> None:
    outcome = elastic(tmp_path, "5 0 SIGKILL queued").expect(1)
    assert f"lost another rank: {QUEUED_TOO_LATE}" in printed(outcome), outcome


# Rank 1 exits while rank 0 queues operations whose tensors only Python owns.
LOSES_RANK_1 = """
import faulthandler, os, time
from pathlib import Path

import horovod.torch as hvd
import torch

hvd.init()
if hvd.rank() == 1:
    while not Path("queued").exists():
        time.sleep(0.01)
    os._exit(0)
faulthandler.dump_traceback_later(60, exit=True)  # runs without Python's lock
try:
    for number in range(10**8):
        hvd.allreduce_async_(torch.zeros(1), name=str(number))
        if number == 100:
            Path("queued").touch()
except RuntimeError as error:
    print("raised", type(error).__name__, flush=True)
os._exit(0)
"""


def test_horovod_reports_a_lost_rank_while_operations_are_queued(tmp_path: Path) -> None:
    outcome = run([*launcher(2, "gloo"), sys.executable, "-c", LOSES_RANK_1], tmp_path).expect(0)
    assert "raised HorovodInternalError" in printed(outcome), outcome


# Rank 0's host leaves in step 3. A third host joins after six polls, one per second. Until then, the remaining host
# waits.
THIRD_JOINS = """
for host in localhost 127.0.0.1; do [ -e $host/signalled ] && echo >>looks || echo $host:1; done
[ $(cat looks 2>/dev/null | wc -l) -lt 6 ] || echo 127.1:1
"""
REPORTED = {
    "horovod#2652: the optimizer of an added worker has no state yet": (
        "3 0 hosts start",
        {"discover": "echo localhost:1\n[ ! -e localhost/signalled ] || echo 127.0.0.1:1"},
    ),
    "horovod#3264: all workers of a host are killed at once": ("5 2,3 SIGKILL start", {"slots": 2, "least": 2}),
    "horovod#3494: a host is removed, fewer than --min-np remain, another host joins": (
        "3 0 hosts start",
        {"least": 2, "discover": THIRD_JOINS},
    ),
    "horovod#3494, with a host that dies": ("3 0 SIGKILL start", {"least": 2, "discover": THIRD_JOINS}),
    "a rank is stopped for longer than Gloo waits": ("3 1 SIGSTOP 22", {"least": 2, "limit_s": 15}),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights after an uninterrupted run on one rank."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(small_run(1, "out", "--deterministic"), folder).expect(0)
    return weights(folder / "out")


@pytest.mark.parametrize("stop, hosts", REPORTED.values(), ids=list(REPORTED))
def test_reported_deadlocks(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor], stop: str, hosts: dict[str, Any]
) -> None:
    outcome = elastic(tmp_path, stop, "--deterministic", **hosts).expect(0)
    assert "kept by rank" in printed(outcome), outcome
    out = finished(tmp_path)
    result = json.loads((out / "train_results.json").read_text())
    assert (result["world_size"], result["train_samples"]) == (2, 2 * WINDOWS), outcome
    assert largest_difference(out, undisturbed) <= MAX_DIFFERENCE, outcome


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_random_kills_change_no_weight(tmp_path: Path) -> None:
    """Kill one of four ranks that train, evaluate and save at a random moment of each phase, $HVD_BERT_KILLS times.

    A run that ends before its kill does not count. At most $HVD_BERT_ABORTED kills may end the run because Gloo also
    aborts another rank. Each kill adds a line to the file $HVD_BERT_MEASURED.
    """
    flags = ["--max_steps", 40, "--eval_strategy", "steps", "--eval_steps", 10, "--save_steps", 15, "--deterministic"]
    elastic(tmp_path / "whole", "0 0 SIGKILL start", *flags, slots=2).expect(0)
    whole, trained = finished(tmp_path / "whole"), taken(tmp_path / "whole", 40)
    dice, kills = random.Random(int(os.environ.get("HVD_BERT_SEED", "0"))), int(os.environ.get("HVD_BERT_KILLS", "6"))
    resumed = aborted = runs = 0
    while resumed < kills:
        phase, rank, folder, runs = [*PHASES][resumed % len(PHASES)], dice.randrange(4), tmp_path / "killed", runs + 1
        outcome = elastic(folder, f"{dice.randint(1, 36)} {rank} SIGKILL {phase}", *flags, slots=2)
        kill: dict[str, Any] = {"phase": phase, "rank": rank, "seconds": outcome.seconds, "hung": outcome.hung}
        kill["aborted"] = "gloo::EnforceNotMet" in outcome.output and outcome.status != 0
        resumed_after = [int(step) for step in re.findall(r"Resuming after step (\d+), kept by", printed(outcome))]
        if outcome.status == 0:
            out = finished(folder)
            kill["ranks"] = json.loads((out / "train_results.json").read_text())["world_size"]
            kill["difference"] = largest_difference(out, weights(whole))
            if resumed_after:
                first, next_ = ([row["step"] for row in notes(folder) if row["world"] == world] for world in (1, 2))
                kill |= {"kept": resumed_after[0], "begun": max(first)}
                kill["begun_again"] = min(next_, default=resumed_after[0] + 1)
                kill["repeated_steps"] = max(0, kill["begun"] - kill["begun_again"])
        if kill.get("ranks") != 4:  # otherwise the run ended before the kill
            with open(os.environ.get("HVD_BERT_MEASURED", os.devnull), "a", encoding="utf-8") as file:
                file.write(json.dumps(kill) + "\n")
        if not kill["aborted"] or outcome.hung:
            outcome.expect(0)
            assert len(resumed_after) == (kill["ranks"] < 4) and kill["difference"] <= MAX_DIFFERENCE, (kill, outcome)
        if "begun" in kill:
            assert (kill["repeated_steps"], kill["begun_again"]) == (0, resumed_after[0] + 1), (kill, outcome)
            assert taken(folder, resumed_after[0]) == trained, (kill, outcome)
            resumed += 1
        aborted += kill["aborted"]
        assert aborted <= int(os.environ.get("HVD_BERT_ABORTED", "2")), outcome
        assert runs < 2 * kills + 10, "too many runs end before their kills"
        shutil.rmtree(folder)


def finished(folder: Path) -> Path:
    """Return the output folder of a run: the newest, if rank 0 was killed after it had written the results."""
    files = folder.glob("*/out/train_results.json")
    return max(files, key=lambda file: file.stat().st_mtime).parent


def weights(out: Path) -> dict[str, torch.Tensor]:
    """Return a model's weights, except biases that shift all logits equally and so contain only rounding errors."""
    found = safetensors.torch.load_file(out / "model.safetensors")
    shifts = ("key.bias", "qa_outputs.bias", "layer.1.output.LayerNorm.bias")
    return {name: weight for name, weight in found.items() if not name.endswith(shifts)}


def largest_difference(out: Path, expected: dict[str, torch.Tensor]) -> float:
    """Return the largest relative difference of a tensor: the norm of its difference over the tensor's norm."""
    return float(torch.stack([(w - expected[name]).norm() / w.norm() for name, w in weights(out).items()]).max())
