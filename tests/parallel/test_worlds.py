"""Run checks on 1, 2 and 4 ranks under horovodrun, mpirun and torchrun, and compare the worlds with each other.

Each world starts once and runs all checks (ranks.py).
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import command_checks
import evaluation_checks
import health_checks  # noqa: F401  # registers checks
import numpy as np
import predict_checks
import pytest
import resume_checks  # noqa: F401  # registers checks
import resuming
import strategy_checks  # noqa: F401  # registers checks
import task_checks
import training_checks
import world_checks  # noqa: F401  # registers checks
from commands import TINY
from launch import SAMPLE, TIMEOUT_S, Outcome, launcher, run
from ranks import check_names

pytestmark = pytest.mark.parallel

# (size, launcher, strategy) of each world. Each launcher starts some of the strategies.
HOROVOD = [(4, "gloo", "horovod"), (2, "mpi", "horovod"), (1, "none", "horovod")]
OTHERS = [
    (4, "gloo", "fsdp"),
    (4, "torchrun", "ddp"),
    (2, "gloo", "deepspeed:1"),
    (2, "torchrun", "deepspeed"),
    (2, "mpirun", "ddp"),
    (1, "none", "deepspeed"),
    (1, "none", "fsdp"),
    (1, "none", "none"),
]
# Output folder of a run -> the check that trains it.
RUNS = {"run": "whole_run_ends_well", "padded_run": "padded_and_clipped_run_in_micro_batches_ends_well"}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


@dataclass(frozen=True)
class Launch:
    """A world that has run all its checks. `results`: check -> the traceback of each rank, or None."""

    outcome: Outcome
    folder: Path
    size: int
    strategy: str
    results: dict[str, list[str | None]]

    def expect(self, check: str) -> None:
        if check not in self.results:
            pytest.fail(f"{check} was not reached\n{self.outcome}", pytrace=False)
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(self.results[check]) if text]
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)

    def read(self, name: str) -> Any:
        path = self.folder / name
        if not path.exists():
            pytest.fail(f"{name} was not made\n{self.outcome}", pytrace=False)
        return json.loads(path.read_text(encoding="utf-8"))

    def metrics(self, name: str = "run") -> list[dict[str, float]]:
        """Read the lines of metrics.jsonl of a run in RUNS."""
        self.expect(RUNS[name])
        return [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]

    def losses(self, name: str = "run") -> list[float]:
        """Return the loss of each step."""
        return [line["loss"] for line in self.metrics(name) if "loss" in line]


def _start(folder: Path, size: int, by: str, strategy: str) -> Launch:
    shutil.copytree(SAMPLE, folder / "tiny", ignore=shutil.ignore_patterns("*.json.gz"))
    config = json.loads((SAMPLE / "config.json").read_text()) | TINY | DROPOUT
    (folder / "tiny" / "config.json").write_text(json.dumps(config))
    controller = {"horovod": by.replace("torchrun", "gloo"), "none": "none"}.get(strategy, "torch.distributed")
    controller = "none" if (size, strategy) == (1, "horovod") else controller
    ranks = Path(__file__).with_name("ranks.py")
    command = [*launcher(size, by), sys.executable, ranks, folder, controller, strategy]
    env = {"HVD_BERT_CACHE": str(folder / "cache")}
    outcome = run(command, folder, env=env, timeout=2 * TIMEOUT_S)
    results = folder / "results.json"
    return Launch(outcome, folder, size, strategy, json.loads(results.read_text()) if results.exists() else {})


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """worlds(size, by, strategy) -> Launch. The first call starts the world."""

    @functools.cache
    def start(size: int, by: str, strategy: str) -> Launch:
        return _start(tmp_path_factory.mktemp(f"world-{size}-{by}-{strategy}"), size, by, strategy)

    return start


def world_name(world: tuple[int, str, str]) -> str:
    size, by, strategy = world
    return f"{size}-{by}" if strategy == "horovod" else f"{size}-{by}-{strategy}"


@pytest.fixture(params=HOROVOD + OTHERS, ids=world_name, scope="session")
def launch(request: pytest.FixtureRequest, worlds: Any) -> Launch:
    """Each world in turn."""
    size, by, strategy = request.param
    launcher(size, by)  # skips the test if the world cannot start here
    if strategy.startswith("deepspeed") and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed (env/setup.sh --deepspeed)")
    return worlds(size, by, strategy)


horovod_worlds = pytest.mark.parametrize("launch", HOROVOD, ids=world_name, indirect=True, scope="session")


@pytest.fixture(scope="session")
def alone(worlds: Any) -> Launch:
    """The world of one process without a launcher."""
    return worlds(1, "none", "horovod")


def test_every_check(launch: Launch) -> None:
    """All checks pass. Failures are listed with their ranks."""
    launch.outcome.expect(0)
    checks = check_names(launch.size, launch.strategy)
    failures = [
        f"{check}, rank {rank}: {text}"
        for check in checks
        for rank, text in enumerate(launch.results.get(check, ["was not reached"]))
        if text
    ]
    if failures:
        pytest.fail("\n".join([*failures, str(launch.outcome)]), pytrace=False)
    assert set(checks) == set(launch.results)


def test_losses_of_one_process_equal_the_recorded_ones(alone: Launch) -> None:
    """golden_losses.json was recorded before the package had strategies (torch 2.13.0, on a CPU)."""
    golden = json.loads(Path(__file__).with_name("golden_losses.json").read_text())
    np.testing.assert_allclose(alone.losses(), golden, rtol=0, atol=1e-4)


@pytest.mark.parametrize("run", RUNS)
def test_losses_of_every_step_equal_those_of_one_rank(launch: Launch, alone: Launch, run: str) -> None:
    found, expected = launch.losses(run), alone.losses(run)
    assert found[0] == pytest.approx(expected[0], rel=0, abs=1e-6)
    assert len(found) == len(expected) == command_checks.STEPS[run]
    assert min(expected[len(expected) // 2 :]) < expected[0], "the model has learned nothing"
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    results = launch.read(f"{run}/train_results.json")
    expected = command_checks.LEARNING_RATE, training_checks.GLOBAL_BATCH
    assert (results["learning_rate"], results["global_batch"]) == expected


def test_padded_run_is_clipped(alone: Launch) -> None:
    norms = [line["grad_norm"] for line in alone.metrics("padded_run") if "loss" in line]
    assert min(norms) > command_checks.CLIP, norms


def test_deterministic_steps_of_ddp_equal_horovods_to_the_bit(worlds: Any) -> None:
    """Use two ranks, because the sum over more ranks depends on the order in which an allreduce adds them."""
    recorded = []
    for by, strategy in (("mpi", "horovod"), ("mpirun", "ddp")):
        launcher(2, by)  # skips the test if the world cannot start here
        launch = worlds(2, by, strategy)
        launch.expect("deterministic_steps_are_recorded")
        recorded.append(np.load(launch.folder / "deterministic.npz"))
    horovods, ddps = recorded
    losses = horovods["losses"]
    assert len(losses) == 8 and losses[-1] != losses[0] and set(horovods) == set(ddps)
    assert [name for name in horovods if not np.array_equal(horovods[name], ddps[name])] == []


def test_whole_run_is_evaluated_as_by_one_rank(launch: Launch, alone: Launch) -> None:
    evaluated, expected = ([line for line in one.metrics() if "eval_loss" in line] for one in (launch, alone))
    assert [line["step"] for line in evaluated] == [10, 20]
    for line, other in zip(evaluated, expected, strict=True):
        assert line.pop("eval_s") > 0 and other.pop("eval_s") > 0
        assert line == pytest.approx(other, abs=1e-4)
    assert launch.read("run/eval_predictions.json").keys() == alone.read("run/eval_predictions.json").keys()


def test_classification_equals_that_of_one_rank(launch: Launch, alone: Launch) -> None:
    for one in (launch, alone):
        one.expect("classification_ends_well")
    found, expected = (resuming.rows(one.folder / "classified") for one in (launch, alone))
    losses, others = ([line["loss"] for line in rows if "loss" in line] for rows in (found, expected))
    assert len(losses) == task_checks.STEPS and min(others) < others[0]
    np.testing.assert_allclose(losses, others, rtol=0, atol=1e-4)
    scores, of_one = ([line for line in rows if "eval_loss" in line] for rows in (found, expected))
    assert [line["step"] for line in scores] == [3, task_checks.STEPS]
    assert scores == [pytest.approx(line, abs=1e-4) for line in of_one]
    predictions = "classified/eval_predictions.json"
    found, expected = launch.read(predictions), alone.read(predictions)
    assert found["prediction"] == expected["prediction"]
    assert found["probability"] == pytest.approx(expected["probability"], abs=1e-4)


@horovod_worlds
@pytest.mark.parametrize(
    ("check", "run", "steps"),
    [
        ("custom_task_ends_well", "digits", 23),
        ("several_answers_end_well", "several", task_checks.STEPS),
    ],
)
def test_losses_of_a_custom_task_equal_those_of_one_rank(
    launch: Launch, alone: Launch, check: str, run: str, steps: int
) -> None:
    _compare_losses(launch, alone, check, run, steps)


def test_losses_of_distillation_equal_those_of_one_rank(launch: Launch, alone: Launch) -> None:
    _compare_losses(launch, alone, "distillation_ends_well", "distilled", task_checks.STEPS)


def _compare_losses(launch: Launch, alone: Launch, check: str, run: str, steps: int) -> None:
    for one in (launch, alone):
        one.expect(check)
    lines = [resuming.rows(one.folder / run) for one in (launch, alone)]
    found, expected = ([line["loss"] for line in some if "loss" in line] for some in lines)
    assert len(found) == steps and expected[-1] < expected[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@horovod_worlds
def test_answers_to_a_file_equal_those_of_one_rank(launch: Launch, alone: Launch) -> None:
    for one in (launch, alone):
        one.expect("file_is_answered_as_by_one_rank")
    found, expected = ((one.folder / predict_checks.ANSWERS).read_bytes() for one in (launch, alone))
    assert found == expected and len(expected.splitlines()) == 33


@horovod_worlds
@pytest.mark.parametrize("num_questions", evaluation_checks.NUM_QUESTIONS)
@pytest.mark.parametrize("preset", evaluation_checks.PRESETS)
def test_evaluation_equals_that_of_one_rank(launch: Launch, alone: Launch, preset: str, num_questions: int) -> None:
    name = evaluation_checks.evaluation_name(preset, num_questions)
    found, expected = launch.read(name), alone.read(name)
    for exact in ("predictions", "best_spans", "nbest"):
        assert found[exact] == expected[exact]
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)
    assert found["null_odds"] == pytest.approx(expected["null_odds"], abs=1e-4)
