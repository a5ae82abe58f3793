"""The sweep: its plan, its commands, and points that fail, cannot run or are done. No rank is started."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import PretendedRuns, make_run
from refusals import refused

from hvd_bert.config import settings
from hvd_bert.config.command_line import parse
from hvd_bert.config.settings import STRATEGIES
from hvd_bert.distributed import slurm
from hvd_bert.storage import writing
from hvd_bert.tools.bench import sweep
from hvd_bert.tools.bench.points import Point, SweepPlan, check_flags
from hvd_bert.tools.runs import launching, one_run
from hvd_bert.tools.runs.launching import Allocation, Launching, Machine, find_allocation
from hvd_bert.tools.runs.one_run import Stopped

TWO_CORES = Machine(cores=2, gpus=0, allocation=None)
FOUR_GPUS = Machine(cores=64, gpus=4, allocation=None)
DEFAULT = parse([]).as_flat()


def plan_of(
    *flags: str, strategies: str = "none,horovod,ddp", ranks: tuple[int, ...] = (1, 2, 4), **more: object
) -> SweepPlan:
    settings = {"scaling": "strong", "repeats": 3, "steps": 10, "global_batch": 16, "threads": 1} | more
    return SweepPlan(tuple(strategies.split(",")), ranks, flags=flags, **settings)  # type: ignore[arg-type]


def points_of(plan: SweepPlan) -> list[Point]:
    return plan.points(check_flags(plan)[0])


def by(choice: str, machine: Machine = TWO_CORES, hosts: str = "", *words: str) -> Launching:
    return Launching(choice, words, hosts or None, machine)


def point(strategy: str, ranks: int) -> Point:
    return Point(strategy, ranks, "strong", 1, 16)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The installed launchers, regardless of this machine: all, unless a test removes one."""
    there = {"horovodrun", "mpirun", "srun"}
    monkeypatch.setattr(launching, "program_path", lambda name: f"/bin/{name}" if name in there else None)
    return there


def test_strong_and_weak_batches() -> None:
    flags = ("--per_device_train_batch_size=6", "--gradient_accumulation_steps=2")  # the last of two batches counts
    plan = plan_of(*flags, strategies="ddp", ranks=(1, 4), scaling="both", repeats=1)
    points = points_of(plan)
    given = {each.name: parse(plan.trainer_flags(each, 2, Path("out"))).train for each in points}
    batches = {each.name: (each.global_batch, given[each.name].per_device_train_batch_size) for each in points}
    strong, weak = {"ddp-1-strong-1": (16, 8), "ddp-4-strong-1": (16, 2)}, {"ddp-1-weak-1": (12, 6)}
    assert batches == strong | weak | {"ddp-4-weak-1": (48, 6)}
    assert {train.lr_scaling for train in given.values()} == {"none"}  # one learning rate, comparable losses


def test_a_run_per_seed_of_so_many_epochs(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("max_steps: 7\nseed: 5\nglobal_batch: 24\n")  # the sweep's values replace the file's
    plan = plan_of(f"--config={file}", strategies="horovod", ranks=(1, 2), epochs=2.5, seeds=(7, 3))
    points = points_of(plan)
    first = ["horovod-1-strong-7", "horovod-2-strong-7"]
    assert [each.name for each in points] == [*first, *(name[:-1] + "3" for name in reversed(first))]
    assert str(points[-1]) == "horovod, 1 rank, strong, seed 3"
    train = parse(plan.trainer_flags(points[-1], 1, Path("out"))).train
    assert (train.seed, train.num_train_epochs, train.max_steps) == (3, 2.5, -1)
    assert train.windows_per_step(1) == points[-1].global_batch


def test_dp_and_the_baseline_are_one_process() -> None:
    points = points_of(plan_of(strategies="none,dp", repeats=1))
    names = [("none-1-strong-1", 1), ("dp-2-strong-1", 1), ("dp-4-strong-1", 1)]
    assert [(each.name, each.processes) for each in points] == names
    assert "--per_device_train_batch_size=4" in plan_of().trainer_flags(points[-1], 1, Path("out"))  # per GPU
    seen = by("auto", FOUR_GPUS).environment(points[1], {"CUDA_VISIBLE_DEVICES": "3,1,0,2"})
    assert seen["CUDA_VISIBLE_DEVICES"] == "3,1"


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        (plan_of(global_batch=18), ["--global_batch 18", "4 ranks", "a multiple of 4"]),
        (plan_of("--gradient_accumulation_steps=3"), ["1 or 2 or 4 ranks", "3 passes per step"]),
        (plan_of("--strategy=ddp"), ["--strategy"]),
        (plan_of("--seed=2", seeds=(1, 2)), ["--seed", "--seeds"]),
        (plan_of("--per_device_train_batch_size=4"), ["--per_device_train_batch_size"]),
        (plan_of("--train_file=nowhere.json"), ["--train_file nowhere.json"]),
        (plan_of("--max_step=3"), ["--max_step"]),
        (plan_of("--num_groups=-1"), ["--num_groups -1"]),  # although strategy none ignores it
    ],
)
def test_invalid_plan(plan: SweepPlan, named: list[str]) -> None:
    with refused(*named):
        points_of(plan)


def test_a_flag_of_one_strategy_is_passed_to_that_strategy_only(tmp_path: Path) -> None:
    _, left_out = check_flags(plan_of("--fp16", strategies="none,deepspeed"))  # one refuses it, the others run
    assert left_out.keys() == {"deepspeed"} and "--fp16" in left_out["deepspeed"]
    plan = plan_of("--zero-stage", "2", "--bf16", "--zero_stage", "1", "--fp16_allreduce")
    assert plan.common_flags()[-1] == "--bf16"
    assert plan.divided.owned == {"deepspeed": ["--zero_stage=1"], "horovod": ["--fp16_allreduce"]}
    file = tmp_path / "mine.yaml"
    file.write_text("zero_stage: 1\nnum_groups: 0\nfp16_allreduce: true\n")
    plan = plan_of("--config", str(file), "--fp16_allreduce=false", strategies="none,deepspeed")
    given = [parse(plan.trainer_flags(point(name, 1), 1, Path("out"))).parallel for name in plan.strategies]
    assert [(one.zero_stage, one.fp16_allreduce) for one in given] == [(DEFAULT["zero_stage"], False), (1, False)]
    with refused("--zero_stage", "deepspeed", "ddp"):
        check_flags(plan_of("--config", str(file), strategies="ddp,horovod"))


PYTHON = Path(sys.executable).name


def test_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where horovodrun can write its cache
    hosts, job = "a100-01:2,a100-02:2", Machine(cores=64, gpus=2, allocation=Allocation(2, 2, 32))
    gloo, slurm = by("horovodrun", TWO_CORES, hosts, "--gloo"), by("auto", job)
    srun = "srun --mpi=pmix --kill-on-bad-exit=1 --wait=60"
    for launch, strategy, ranks, expected in (
        (by("mpirun"), "ddp", 4, f"mpirun -np 4 -H localhost:4 --bind-to none {PYTHON}"),
        (gloo, "none", 1, f"horovodrun -np 1 -H {hosts} --gloo {PYTHON}"),  # the baseline runs on those hosts, too
        (slurm, "none", 1, f"{srun} --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=32 {PYTHON}"),
        (slurm, "horovod", 4, f"{srun} --nodes=2 --ntasks=4 --ntasks-per-node=2 --cpus-per-task=32 {PYTHON}"),
    ):
        words = [Path(word).name for word in launch.command(point(strategy, ranks), ["--bf16"])]
        assert " ".join(words) == f"{expected} -m hvd_bert.train --bf16"
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    assert "--disable-cache" in by("auto").command(point("horovod", 2), [])


def test_allocation_of_a_job() -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "3(x2)"}
    assert find_allocation(job) == Allocation(2, 3, None)
    assert find_allocation(job | {"SLURM_NTASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "8"}) == Allocation(2, 2, 8)
    assert find_allocation({"SLURM_NNODES": "2"}) is None


def test_invalid_launcher(installed: set[str]) -> None:
    by("mpirun").check()
    installed.remove("mpirun")
    for launch, *named in (
        (by("torchrun", TWO_CORES, "a:2"), "-H", "--launcher torchrun"),
        (by("auto", TWO_CORES, "", "--gloo"), "--launcher_flag"),
        (by("srun"), "--launcher srun", "Slurm"),
        (by("mpirun"), "mpirun", "PATH"),
    ):
        with refused(*named):
            launch.check()


def test_obstacles(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda name: object())
    installed.remove("horovodrun")
    job = Machine(8, 1, Allocation(2, 2, 1))
    for launch, where, words in (
        (by("auto"), point("ddp", 4), ""),  # slow, but only warned of: see below
        (by("auto", FOUR_GPUS), point("ddp", 8), "8 ranks, but 4 GPUs"),
        (by("auto", FOUR_GPUS), point("dp", 4), ""),
        (by("none"), point("ddp", 2), "--launcher none starts one process only"),
        (by("mpirun", TWO_CORES, "a:1,b"), point("horovod", 4), "4 ranks, but -H a:1,b has 2 slots"),
        (by("auto", job), point("ddp", 8), "the Slurm job has 4 tasks"),
        (by("auto", job), point("ddp", 4), "2 ranks per node, but 1 GPUs"),
        # Only the points of a missing launcher cannot run.
        (by("auto"), point("horovod", 2), "horovodrun is not on PATH: run `bash env/setup.sh`"),
        (by("auto", TWO_CORES, "a:2"), point("none", 1), "horovodrun"),
    ):
        found = launch.obstacle(where)
        assert words in found and bool(words) == bool(found)


def test_ranks_that_share_cores_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    by("auto").warn_of_shared_cores([point("ddp", 2)], 1)
    by("auto", FOUR_GPUS).warn_of_shared_cores([point("ddp", 4)], 99)
    assert capsys.readouterr().err == ""
    by("auto").warn_of_shared_cores([point("ddp", 2)], 2)
    assert "warning: 2 ranks of 2 threads share 2 cores" in capsys.readouterr().err


def made(folder: Path, given: dict[str, str], name: str) -> Path:
    ranks = int(name.split("-")[1])
    return make_run(folder, given["strategy"], ranks, batch=int(given["per_device_train_batch_size"]) * ranks)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> PretendedRuns:
    runs = PretendedRuns(lambda folder, command, environ: folder.name, made)
    monkeypatch.setattr(one_run, "start_and_wait", runs)
    monkeypatch.setattr(Machine, "here", lambda environ: TWO_CORES)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return runs


@pytest.fixture
def start(tmp_path: Path, pretended: PretendedRuns) -> Callable[..., int]:
    """start(*flags) -> the exit status of a small sweep in tmp_path/out. `started` begins empty."""

    def begin(*flags: str) -> int:
        pretended.started = []
        defaults = {"--strategies": "none,horovod", "--ranks": "1,2", "--out": str(tmp_path / "out")}
        defaults |= {} if "--seeds" in flags else {"--repeats": "2"}
        words = [f"{name}={value}" for name, value in defaults.items() if name not in flags]
        return sweep.main([*words, *flags])

    return begin


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads((folder / "out" / "sweep.json").read_text())["points"]}


def states(folder: Path) -> list[str]:
    return [row["state"] for row in rows(folder).values()]


ORDER = [f"{name}-1" for name in ("none-1-strong", "horovod-1-strong", "horovod-2-strong")]
ORDER += [f"{name[:-2]}-2" for name in reversed(ORDER)]


def test_all_points_are_run_and_recorded(pretended, start, tmp_path, capsys) -> None:
    assert start() == 0
    assert pretended.started == ORDER == list(rows(tmp_path)) and set(states(tmp_path)) == {"done"}
    last = rows(tmp_path)["none-1-strong-2"]
    assert last["windows_per_s"] == pytest.approx(10)
    assert last["command"][1:3] == ["-m", "hvd_bert.train"] and "--num_threads=1" in last["command"]
    same = json.loads((tmp_path / "out" / "sweep.json").read_text())["same"]
    assert same["versions"]["torch"] and same["--steps"] == 30
    weights = {path.parent.name for path in (tmp_path / "out").glob("*/model.safetensors")}
    assert weights == {*ORDER[:3]}  # those of the first repeat are enough
    output = capsys.readouterr().out
    assert "[6/6] none, 1 rank, strong, repeat 2: 10.0 windows/s" in output and "preset `sweep`" in output
    assert f"hvd-bert report {tmp_path / 'out'}" in output


def test_a_report_that_fails_after_all_points_is_a_failure(pretended, start, tmp_path, monkeypatch, capsys) -> None:
    failed = subprocess.CompletedProcess([], 2)  # such as a full disk
    monkeypatch.setattr(sweep.subprocess, "run", lambda *args, **options: failed)
    assert start("--report", str(tmp_path / "report")) == 1
    assert set(states(tmp_path)) == {"done"} and f"hvd-bert report {tmp_path / 'out'}" in capsys.readouterr().out


def test_a_requeue_needs_a_point_that_is_done(pretended, start, monkeypatch) -> None:
    asked: list[tuple[str, str]] = []
    requeue = lambda environ, mode, progress, announce: asked.append((mode, progress)) or ""  # noqa: E731
    monkeypatch.setattr(slurm, "requeue", requeue)
    pretended.ends = {"horovod-2-strong-1": Stopped("SIGUSR1")}
    assert start() == start("--requeue", "no") == 75
    pretended.ends = {"horovod-2-strong-1": Stopped("SIGINT")}
    assert start() == 75
    pretended.ends = {ORDER[2]: 1, ORDER[3]: Stopped("SIGUSR1")}
    assert start() == 75
    assert asked == [("auto", "2 of 6 points"), ("no", ""), ("auto", "")]


def test_a_failing_point_is_a_row_and_the_sweep_continues(pretended, start, tmp_path, capsys) -> None:
    pretended.ends = {"horovod-2": 1, "none-1-strong-2": None}
    assert start("--repeats", "3") == 1
    assert [name for name in pretended.started if name.startswith("horovod-2")] == ORDER[2:4]  # not a third repeat
    record = rows(tmp_path)
    failed = record["horovod-2-strong-1"]
    assert failed["state"] == "failed" and failed["reason"].startswith("bad input (status 1; ")
    assert (tmp_path / "out" / "horovod-2-strong-1" / "run.log").exists()
    assert "--timeout 3600 s" in record["none-1-strong-2"]["reason"]
    assert record["horovod-2-strong-3"]["reason"].startswith("not run")
    assert "5 done, 0 skipped, 4 failed" in capsys.readouterr().out
    pretended.ends = {}
    assert start("--repeats", "3") == 0  # fixed points are run again
    assert sorted(pretended.started) == ["horovod-2-strong-1", "horovod-2-strong-2", "horovod-2-strong-3", ORDER[-1]]
    (tmp_path / "out" / ORDER[0] / "metrics.jsonl").write_text("{")  # its results cannot be read
    assert start("--repeats", "3") == 0 and pretended.started == ORDER[:1]


def test_bad_input_of_the_baseline_ends_the_sweep(pretended, start, capsys) -> None:
    pretended.ends = {"": 2}
    assert start() == 2
    assert pretended.started == ORDER[:1] and capsys.readouterr().err == "hvd_bert: bad input\n"


def test_a_strategy_or_launcher_that_is_not_here_is_a_row(start, pretended, installed, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(STRATEGIES, "deepspeed", replace(STRATEGIES["deepspeed"], package="no_such_package"))
    assert start("--strategies", "none,deepspeed,dp") == 0
    assert pretended.started == ["none-1-strong-1", "none-1-strong-2"]
    skipped = {row["strategy"]: row["reason"] for row in rows(tmp_path).values() if row["state"] == "skipped"}
    assert skipped["deepspeed"] == "no_such_package is not installed: run `bash env/setup.sh --deepspeed`"
    assert skipped["dp"] == "dp needs 2 GPUs in its one process, but 0 are visible"
    output = capsys.readouterr().out
    assert output.count("no_such_package is not installed") == 1 and "deepspeed-1-strong-1 and 3 more" in output


def test_folders_that_cannot_be_used(pretended, start, tmp_path, capsys, monkeypatch) -> None:
    def full(partial: Path, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writing.os, "replace", full)
    (tmp_path / "file").write_text("")
    for folder, reason in (("out", "No space left on device"), ("file", "not a folder")):
        assert start("--out", str(tmp_path / folder)) == 2
        message = capsys.readouterr().err
        assert f"--out {tmp_path / folder} " in message and reason in message
        assert pretended.started == []


def test_a_sweep_can_grow_but_not_change(pretended, start, tmp_path, capsys) -> None:
    assert start("--strategies", "none", "--repeats", "1") == 0
    assert start("--scaling", "both") == 0
    assert len(pretended.started) == 11  # the finished point is not run again
    assert start("--strategies", "ddp", "--repeats", "1") == 0
    assert states(tmp_path).count("done") == 14  # points that are not named now are kept
    for flags, words in (
        (["--epochs", "1"], "--steps was 30 and is not set; --epochs was not set and is 1.0"),
        (["--launcher", "mpirun"], "--launcher was auto, one host and is mpirun"),
    ):
        assert start(*flags) == 2
        assert words in capsys.readouterr().err


def test_one_sweep_at_a_time(pretended, start, capsys, monkeypatch) -> None:
    seen = []
    pretended.ends = {"none-1-strong-1": Stopped("")}

    def begin_another(*arguments: Any) -> int | None:
        seen.append(start())
        return pretended(*arguments)

    monkeypatch.setattr(one_run, "start_and_wait", begin_another)
    assert start() == 75 and seen == [2]
    assert f"process {os.getpid()} on " in capsys.readouterr().err
