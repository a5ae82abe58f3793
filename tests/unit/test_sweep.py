"""The sweep: its plan, its commands, and points that fail, cannot run or are done. No rank is started."""

from __future__ import annotations

import errno
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from made_runs import make_run
from processes import started

from hvd_bert.config.command_line import parse
from hvd_bert.distributed.slurm import Allocation, find_allocation
from hvd_bert.errors import UserError
from hvd_bert.storage import writing, written
from hvd_bert.tools.bench import launching, one_run, sweep
from hvd_bert.tools.bench.launching import Hosts, Launching, Machine
from hvd_bert.tools.bench.one_run import Stopped, failure_in, signals, start_and_wait
from hvd_bert.tools.bench.points import OWNERS, Plan, Point, check_flags

TWO_CORES = Machine(cores=2, gpus=0, allocation=None)
FOUR_GPUS = Machine(cores=64, gpus=4, allocation=None)


def plan_of(
    *flags: str, strategies: str = "none,horovod,ddp", ranks: tuple[int, ...] = (1, 2, 4), **more: object
) -> Plan:
    settings = {"scaling": "strong", "repeats": 3, "steps": 10, "global_batch": 16, "threads": 1} | more
    return Plan(tuple(strategies.split(",")), ranks, flags=flags, **settings)  # type: ignore[arg-type]


def points_of(plan: Plan) -> list[Point]:
    return plan.points(check_flags(plan)[0])


def by(choice: str, machine: Machine = TWO_CORES, hosts: str = "", *words: str) -> Launching:
    return Launching(choice, words, Hosts(hosts) if hosts else None, machine)


def point(strategy: str, ranks: int) -> Point:
    return Point(strategy, ranks, "strong", 1, 16)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The installed launchers, regardless of this machine: all, unless a test removes one."""
    there = {"horovodrun", "mpirun", "srun"}
    monkeypatch.setattr(launching, "_program", lambda name: f"/bin/{name}" if name in there else None)
    return there


# The plan


def test_repeats_run_all_points_in_alternating_order() -> None:
    names = [each.name for each in points_of(plan_of(ranks=(1, 2)))]
    first = ["none-1-strong-1", "horovod-1-strong-1", "horovod-2-strong-1", "ddp-1-strong-1", "ddp-2-strong-1"]
    assert names[:5] == first
    assert names[5:10] == [name[:-1] + "2" for name in reversed(first)]
    assert names[10:] == [name[:-1] + "3" for name in first]


def test_strong_and_weak_batches() -> None:
    plan = plan_of("--per_device_train_batch_size=6", "--gradient_accumulation_steps=2", scaling="both", repeats=1)
    batches = {each.name: (each.global_batch, plan.trainer_flags(each, 2, Path("out"))) for each in points_of(plan)}
    assert {name: batch for name, (batch, _) in batches.items() if name.startswith("ddp")} == {
        "ddp-1-strong-1": 16, "ddp-2-strong-1": 16, "ddp-4-strong-1": 16,
        "ddp-1-weak-1": 12, "ddp-2-weak-1": 24, "ddp-4-weak-1": 48,
    }  # fmt: skip
    given = {name: [word for word in flags if "batch_size" in word][-1] for name, (_, flags) in batches.items()}
    assert given["ddp-4-strong-1"] == "--per_device_train_batch_size=2"  # the last of two counts
    assert given["ddp-4-weak-1"] == "--per_device_train_batch_size=6"
    assert all("--lr_scaling=none" in flags for _, flags in batches.values())  # one learning rate, comparable losses


def test_a_sweeps_batch_replaces_the_files(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("global_batch: 24\n")
    plan = plan_of(f"--config={tmp_path / 'mine.yaml'}", scaling="both")
    for point in points_of(plan):
        train = parse(plan.trainer_flags(point, 1, Path("out"))).train
        assert train.windows_per_step(point.ranks) == point.global_batch


def test_a_run_per_seed_of_so_many_epochs(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("max_steps: 7\nseed: 5\n")
    plan = plan_of(f"--config={file}", strategies="horovod", ranks=(1, 2), epochs=2.5, seeds=(7, 3))
    points = points_of(plan)
    first = ["horovod-1-strong-7", "horovod-2-strong-7"]
    assert [each.name for each in points] == [*first, *(name[:-1] + "3" for name in reversed(first))]
    assert str(points[-1]) == "horovod, 1 rank, strong, seed 3"
    train = parse(plan.trainer_flags(points[-1], 1, Path("out"))).train
    assert (train.seed, train.num_train_epochs, train.max_steps) == (3, 2.5, -1)


def test_dp_and_the_baseline_are_one_process() -> None:
    points = points_of(plan_of(strategies="none,dp", repeats=1))
    assert [(each.name, each.processes) for each in points] == [
        ("none-1-strong-1", 1), ("dp-2-strong-1", 1), ("dp-4-strong-1", 1)
    ]  # fmt: skip
    flags = plan_of().trainer_flags(points[-1], 1, Path("out"))
    assert "--per_device_train_batch_size=4" in flags  # the trainer counts it per GPU
    seen = by("auto", FOUR_GPUS).environment(points[1], {"CUDA_VISIBLE_DEVICES": "3,1,0,2"})
    assert seen["CUDA_VISIBLE_DEVICES"] == "3,1"


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (plan_of(global_batch=18), "18 does not divide evenly over 4 ranks: use a multiple of 4"),
        (plan_of("--gradient_accumulation_steps=3"), "over 1 or 2 or 4 ranks with 3 passes per step"),
        (plan_of("--max_step=3"), "did you mean --max_steps?"),
        (plan_of("--strategy=ddp"), "--strategy: a sweep sets it"),
        (plan_of("--num_train_epochs=2"), "--num_train_epochs: a sweep sets it"),
        (plan_of("--seed=2", seeds=(1, 2)), "--seed: --seeds sets it"),
        (plan_of("--learning_rate=much"), "'much'"),
        (plan_of("--per_device_train_batch_size=4"), "--per_device_train_batch_size"),
        (plan_of("--train_file=nowhere.json"), "--train_file nowhere.json"),
        (plan_of(strategies="dp", ranks=(1,)), "add 2 or more to --ranks"),
        (plan_of("--zero_stage", "3"), "not with none. Add deepspeed to --strategies"),
        (plan_of("--num_groups=-1"), "--num_groups -1"),  # although strategy none ignores it
        (plan_of("--zero_stage"), "expected one argument"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_invalid_plan(plan: Plan, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        points_of(plan)


def test_the_users_flags_override_defaults_and_name_the_data(tmp_path: Path) -> None:
    config, refused = check_flags(plan_of("--dropout=0.2", "--logging_steps", "2"))
    assert (config.model.dropout, config.train.logging_steps, config.checkpoint.save_steps) == (0.2, 2, 0)
    assert config.data.train_file and config.data.train_file.endswith("sample/train-v1.1.json")
    assert not refused and not config.train.do_eval
    (tmp_path / "mine.json").write_text("{}")
    for data in (str(tmp_path), str(tmp_path / "mine.json")):  # a task may read a folder
        mine = check_flags(plan_of(f"--train_file={data}"))[0]
        assert (mine.data.train_file, mine.model.config_name) == (data, None)


def test_a_flag_that_one_strategy_refuses_does_not_affect_the_others() -> None:
    _, refused = check_flags(plan_of("--fp16", strategies="none,deepspeed"))
    assert refused.keys() == {"deepspeed"} and "--fp16" in refused["deepspeed"]


def given_to(plan: Plan, strategy: str) -> dict[str, object]:
    """The settings of a strategy's runs that belong to a single strategy and are not the default."""
    settings = parse(plan.trainer_flags(point(strategy, 1), 1, Path("out"))).as_flat()
    return {name: settings[name] for name in OWNERS if settings[name] != DEFAULT[name]}


DEFAULT = parse([]).as_flat()


def test_a_flag_of_one_strategy_is_passed_to_that_strategy_only() -> None:
    plan = plan_of(
        *("--zero-stage", "1", "--bf16", "--zero_stage", "3", "--fp16_allreduce", "--learning_rate", "-1e-5"),
        strategies="none,horovod,deepspeed,ddp",
    )
    assert plan.common_flags()[-3:] == ["--bf16", "--learning_rate", "-1e-5"]
    assert plan.owned_flags() == {"deepspeed": ["--zero_stage=3"], "horovod": ["--fp16_allreduce"]}
    plan = plan_of(
        "--zero_stage=3", "--num_groups", "2", "--fp16_allreduce", "true", strategies="none,horovod,deepspeed"
    )
    assert check_flags(plan)[1] == {}
    assert given_to(plan, "none") == {}
    assert given_to(plan, "horovod") == {"num_groups": 2, "fp16_allreduce": True}
    assert given_to(plan, "deepspeed") == {"zero_stage": 3}
    assert not any("zero_stage" in word for word in plan.flags_of("none"))


def test_a_flag_of_one_strategy_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("zero_stage: 3\nnum_groups: 0\nfp16_allreduce: true\n")
    plan = plan_of("--config", str(file), "--fp16_allreduce=false", strategies="none,horovod,deepspeed")
    assert check_flags(plan)[1] == {}
    assert [given_to(plan, name) for name in plan.strategies] == [{}, {}, {"zero_stage": 3}]
    with pytest.raises(UserError, match="--zero_stage works only with --strategy deepspeed, not with ddp"):
        check_flags(plan_of("--config", str(file), strategies="ddp,horovod"))


# The commands


PYTHON = Path(sys.executable).name


def test_commands() -> None:
    hosts, job = "a100-01:2,a100-02:2", Machine(cores=64, gpus=2, allocation=Allocation(2, 2, 32))
    auto, gloo, slurm = by("auto"), by("horovodrun", TWO_CORES, hosts, "--gloo"), by("auto", job)
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node=2"
    srun = "srun --mpi=pmix --kill-on-bad-exit=1 --wait=60"
    for launch, strategy, ranks, expected in (
        (auto, "none", 1, PYTHON),
        (auto, "horovod", 2, f"horovodrun -np 2 {PYTHON}"),
        (auto, "fsdp", 2, f"{PYTHON} {torchrun}"),
        (by("mpirun"), "ddp", 4, f"mpirun -np 4 -H localhost:4 --bind-to none {PYTHON}"),
        (gloo, "none", 1, f"horovodrun -np 1 -H {hosts} --gloo {PYTHON}"),  # the baseline runs on those hosts, too
        (gloo, "ddp", 4, f"horovodrun -np 4 -H {hosts} --gloo {PYTHON}"),
        (by("auto", TWO_CORES, hosts), "fsdp", 2, f"horovodrun -np 2 -H {hosts} {PYTHON}"),
        (slurm, "none", 1, f"{srun} --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=32 {PYTHON}"),
        (slurm, "ddp", 2, f"{srun} --nodes=1 --ntasks=2 --ntasks-per-node=2 --cpus-per-task=32 {PYTHON}"),
        (slurm, "horovod", 4, f"{srun} --nodes=2 --ntasks=4 --ntasks-per-node=2 --cpus-per-task=32 {PYTHON}"),
    ):
        words = [Path(word).name for word in launch.command(point(strategy, ranks), ["--bf16"])]
        assert " ".join(words) == f"{expected} -m hvd_bert.train --bf16"
    assert slurm.obstacle(point("horovod", 4)) == ""


def test_allocation_of_a_job() -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "3(x2)"}
    assert find_allocation(job) == Allocation(2, 3, None)
    assert find_allocation(job | {"SLURM_NTASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "8"}) == Allocation(2, 2, 8)
    assert find_allocation({"SLURM_NNODES": "2"}) is None


def test_invalid_launcher(installed: set[str]) -> None:
    by("mpirun").check()
    installed.remove("mpirun")
    for launch, words in (
        (by("torchrun", TWO_CORES, "a:2"), "--launcher torchrun takes no hosts"),
        *(
            (by("horovodrun", TWO_CORES, f"a:{count}"), f"'a:{count[:9]}.*' is not HOST:SLOTS")
            for count in ("two", "\u00b2", "9" * 5000, "00")
        ),
        (by("auto", TWO_CORES, "", "--gloo"), "--launcher_flag: select its launcher"),
        (by("srun"), "this is not a Slurm job"),
        (by("mpirun"), "--launcher mpirun: mpirun is not on PATH"),
    ):
        with pytest.raises(UserError, match=words):
            launch.check()


def test_obstacles() -> None:
    job = Machine(8, 1, Allocation(2, 2, 1))
    for launch, each, words in (
        (by("auto"), point("horovod", 4), ""),  # slow, but only warned of
        (by("auto", FOUR_GPUS), point("horovod", 8), "8 ranks, but 4 GPUs"),
        (by("auto", FOUR_GPUS), point("dp", 4), ""),
        (by("auto"), point("dp", 2), "dp needs 2 GPUs in its one process, but 0 are visible"),
        (by("none"), point("ddp", 2), "--launcher none starts one process only"),
        (by("auto", TWO_CORES, "a:1,b"), point("horovod", 4), "4 ranks, but -H a:1,b has 2 slots"),
        (by("auto", job), point("ddp", 8), "the Slurm job has 4 tasks"),
        (by("auto", job), point("ddp", 4), "2 ranks per node, but 1 GPUs"),
    ):
        found = launch.obstacle(each)
        assert words in found and bool(words) == bool(found)


def test_a_missing_launcher_is_an_obstacle_only_for_its_points(
    installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching.importlib.util, "find_spec", lambda name: object())
    installed.clear()
    auto, hosts = by("auto"), by("auto", TWO_CORES, "a:2")
    no_horovodrun = "horovodrun is not on PATH: run `bash env/setup.sh`"
    assert auto.obstacle(point("horovod", 2)) == no_horovodrun
    assert auto.obstacle(point("ddp", 2)) == "" == auto.obstacle(point("none", 1))
    assert hosts.obstacle(point("ddp", 2)) == no_horovodrun == hosts.obstacle(point("none", 1))
    in_job = by("auto", Machine(8, 0, Allocation(1, 2, 1)))
    assert "srun is not on PATH: " in in_job.obstacle(point("ddp", 2))


def test_warning_for_more_ranks_than_cores() -> None:
    assert "4 ranks share 2 cores" in by("auto").warning([point("ddp", 4)], 1)
    assert "2 ranks of 2 threads share 2 cores" in by("auto").warning([point("ddp", 2)], 2)
    assert by("auto").warning([point("ddp", 2)], 1) == "" == by("auto", FOUR_GPUS).warning([point("ddp", 4)], 99)


# The sweep


class Pretended:
    """Replaces a launcher and its ranks. `ends`: prefix of a run's name -> how the run ends."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.environs: list[dict[str, str]] = []
        self.ends: dict[str, int | Exception | None] = {}

    def __call__(self, command: list[str], environ: dict[str, str], log: object, timeout: float) -> int | None:
        given = dict(word.lstrip("-").split("=", 1) for word in command if word.startswith("--") and "=" in word)
        folder = Path(given["output_dir"])
        self.started.append(folder.name)
        self.environs.append(environ)
        end = next((end for name, end in self.ends.items() if folder.name.startswith(name)), 0)
        if isinstance(end, Exception):
            written.add(folder, "train_config.yaml")
            (folder / "train_config.yaml").write_text("half: true\n")
            raise end
        if end == 0:
            log_text = (folder / "log.txt").read_text()
            strategy, ranks = given["strategy"], int(folder.name.split("-")[1])
            made = make_run(folder / "run", strategy, ranks, batch=int(given["per_device_train_batch_size"]) * ranks)
            written.add(folder, "model.safetensors", *(file.name for file in made.iterdir()))
            for file in made.iterdir():
                file.rename(folder / file.name)
            made.rmdir()
            (folder / "model.safetensors").write_bytes(b"")
            assert log_text.startswith("$ ")
        else:
            (folder / "log.txt").write_text("noise\n[1,0]<stderr>:hvd_bert: bad input\nmessage of the launcher\n")
        return end


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    runs = Pretended()
    monkeypatch.setattr(one_run, "start_and_wait", runs)
    monkeypatch.setattr(Machine, "here", lambda environ: TWO_CORES)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return runs


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., int]:
    """start(*flags) -> the exit status of a small sweep in tmp_path/out."""

    def begin(*flags: str) -> int:
        defaults = {"--strategies": "none,horovod", "--ranks": "1,2", "--repeats": "2", "--out": str(tmp_path / "out")}
        words = [f"{name}={value}" for name, value in defaults.items() if name not in flags]
        return sweep.main([*words, *flags])

    return begin


def states(folder: Path) -> dict[str, str]:
    return {row["name"]: row["state"] for row in json.loads((folder / "out" / "sweep.json").read_text())["points"]}


ORDER = [f"{name}-1" for name in ("none-1-strong", "horovod-1-strong", "horovod-2-strong")]
ORDER += [f"{name[:-2]}-2" for name in reversed(ORDER)]


def test_all_points_are_run_and_recorded(pretended, start, tmp_path, capsys) -> None:
    assert start() == 0
    assert pretended.started == ORDER
    record = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert set(states(tmp_path).values()) == {"done"} and len(record["points"]) == 6
    last = record["points"][-1]
    assert (last["name"], last["windows_per_s"]) == ("none-1-strong-2", pytest.approx(10))
    assert last["command"][1:3] == ["-m", "hvd_bert.train"] and "--num_threads=1" in last["command"]
    assert record["same"]["versions"]["torch"] and record["same"]["--steps"] == 30
    kept = [name for name in ORDER if (tmp_path / "out" / name / "model.safetensors").exists()]
    assert kept == [name for name in ORDER if name.endswith("-1")]  # weights of the first repeat are enough
    output = capsys.readouterr().out
    assert "[6/6] none, 1 rank, strong, repeat 2: 10.0 windows/s" in output and "preset `sweep`" in output
    assert f"hvd-bert report {tmp_path / 'out'}" in output


def test_every_seed_is_a_run_of_each_point(pretended, start, tmp_path, capsys) -> None:
    def begin(seeds: str) -> int:
        words = ["--strategies", "none,horovod", "--ranks", "2", "--out", str(tmp_path / "out"), "--epochs", "2"]
        return sweep.main([*words, "--seeds", seeds])

    assert begin("40,50") == 0
    names = ["none-1-strong-40", "horovod-2-strong-40", "horovod-2-strong-50", "none-1-strong-50"]
    assert pretended.started == names
    assert "4 runs of 2 epochs" in capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "sweep.json").read_text())
    given = [row["command"] for row in record["points"]]
    assert all("--num_train_epochs=2.0" in words for words in given)
    assert [word for words in given for word in words if word.startswith("--seed")] == [
        "--seed=40", "--seed=40", "--seed=50", "--seed=50"
    ]  # fmt: skip
    kept = [name for name in names if (tmp_path / "out" / name / "model.safetensors").exists()]
    assert kept == names[:2]
    pretended.started = []
    assert begin("40,50,60") == 0
    assert [name[-2:] for name in pretended.started] == ["60", "60"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--seeds", "1,2", "--repeats", "4"], "not allowed with argument"),
        (["--epochs", "1", "--steps", "4"], "not allowed with argument"),
        (["--seeds", "1,-2"], "'1,-2' is not a list of seeds such as 1,2,4"),
        (["--epochs", "0"], "--epochs 0: must be a positive number."),
        (["--epochs", "nan"], "--epochs nan: must be a positive number."),
    ],
)
def test_seeds_and_epochs_that_will_not_do(pretended, tmp_path, capsys, flags: list[str], words: str) -> None:
    assert sweep.main(["--out", str(tmp_path / "out"), *flags]) == 2
    assert words in capsys.readouterr().err and pretended.started == []


def test_an_interrupted_sweep_resumes(pretended, start, tmp_path, capsys) -> None:
    pretended.ends = {"horovod-2-strong-1": Stopped("SIGINT")}
    assert start() == 75
    assert "Stopped by SIGINT, 4 points left. Rerun the same command to resume." in capsys.readouterr().out
    half = tmp_path / "out" / "horovod-2-strong-1"
    assert (half / "train_config.yaml").exists()
    pretended.ends, pretended.started = {}, []
    assert start() == 0
    assert pretended.started == ORDER[2:]  # the interrupted one again, not the two before it
    assert "half" not in (half / "train_config.yaml").read_text()
    pretended.started = []
    assert start() == 0 and pretended.started == []


def test_a_failing_point_is_a_row_and_the_sweep_continues(pretended, start, tmp_path, capsys) -> None:
    pretended.ends = {"horovod-2": 1, "none-1-strong-2": None}
    assert start("--repeats", "3") == 1
    assert [name for name in pretended.started if name.startswith("horovod-2")] == ORDER[2:4]  # not a third repeat
    record = {row["name"]: row for row in json.loads((tmp_path / "out" / "sweep.json").read_text())["points"]}
    failed = record["horovod-2-strong-1"]
    assert failed["state"] == "failed" and failed["reason"].startswith("bad input (status 1; ")
    assert (tmp_path / "out" / "horovod-2-strong-1" / "log.txt").exists()
    assert "took longer than --timeout 3600 s" in record["none-1-strong-2"]["reason"]
    assert record["horovod-2-strong-3"]["reason"] == "not run: the 2 repeats before it failed"
    assert "5 done, 0 skipped, 4 failed" in capsys.readouterr().out
    pretended.ends, pretended.started = {}, []
    assert start("--repeats", "3") == 0  # fixed points are run again
    assert sorted(pretended.started) == ["horovod-2-strong-1", "horovod-2-strong-2", "horovod-2-strong-3", ORDER[-1]]


def test_bad_input_of_the_baseline_ends_the_sweep(pretended, start, capsys) -> None:
    pretended.ends = {"": 2}
    assert start() == 2
    assert pretended.started == ORDER[:1] and capsys.readouterr().err == "hvd_bert: bad input\n"


def test_a_point_with_unreadable_results_is_run_again(pretended, start, tmp_path) -> None:
    assert start("--repeats", "1") == 0
    (tmp_path / "out" / "none-1-strong-1" / "metrics.jsonl").write_text("{")
    pretended.started = []
    assert start("--repeats", "1") == 0 and pretended.started == ["none-1-strong-1"]


def test_a_strategy_that_cannot_run_here_is_a_row(pretended, start, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(launching.NEEDED, "deepspeed", ("no_such_package", "bash env/setup.sh --deepspeed"))
    assert start("--strategies", "none,deepspeed,dp") == 0
    assert pretended.started == ["none-1-strong-1", "none-1-strong-2"]
    rows = json.loads((tmp_path / "out" / "sweep.json").read_text())["points"]
    skipped = {(row["strategy"], row["reason"]) for row in rows if row["state"] == "skipped"}
    assert {strategy for strategy, _ in skipped} == {"deepspeed", "dp"}
    assert ("deepspeed", "no_such_package is not installed: run `bash env/setup.sh --deepspeed`") in skipped
    output = capsys.readouterr().out
    assert output.count("no_such_package is not installed") == 1 and "deepspeed-1-strong-1 and 3 more" in output


def test_a_missing_launcher_is_a_row(pretended, start, installed, tmp_path, capsys) -> None:
    installed.clear()
    assert start("--strategies", "none,ddp", "-H", "nohost:2", "--repeats", "1") == 0
    assert pretended.started == [] and set(states(tmp_path).values()) == {"skipped"}
    output, errors = capsys.readouterr()
    assert "none-1-strong-1 and 2 more: horovodrun is not on PATH: run `bash env/setup.sh`" in output
    assert "0 done, 3 skipped, 0 failed" in output and errors == ""


@pytest.mark.parametrize("threads", [None, "3"])
def test_ranks_on_other_hosts_have_the_same_threads(pretended, start, tmp_path, monkeypatch, threads) -> None:
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert start("--launcher", "mpirun", "-H", "a:1,b:1", "--repeats", "1") == 0
    for row in json.loads((tmp_path / "out" / "sweep.json").read_text())["points"]:
        command = row["command"]
        assert command[command.index("-x") + 1] == "OMP_NUM_THREADS" and command.index("-x") < command.index("-m")
    assert [environ["OMP_NUM_THREADS"] for environ in pretended.environs] == [threads or "1"] * 3


def test_only_write_errors_name_the_folder(pretended, start, tmp_path, capsys, monkeypatch) -> None:
    def full(partial: Path, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    pretended.ends = {"": FileNotFoundError(errno.ENOENT, "of another kind")}
    with pytest.raises(FileNotFoundError, match="of another kind"):
        start()
    monkeypatch.setattr(writing.os, "replace", full)
    assert start() == 2
    assert f"--out {tmp_path / 'out'} cannot be written: No space left on device." in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert start("--out", str(tmp_path / "file")) == 2
    assert (
        f"--out {tmp_path / 'file'} cannot be written: {tmp_path / 'file'} is not a folder." in capsys.readouterr().err
    )


def test_a_flag_of_one_strategy_with_a_baseline(pretended, start, tmp_path, capsys) -> None:
    assert start("--strategies", "none,horovod", "--repeats", "1", "--fp16_allreduce") == 0
    output = capsys.readouterr().out
    assert output.count("for horovod only: --fp16_allreduce\n") == 1 and "0 skipped" in output
    commands = {row["name"]: row["command"] for row in json.loads((tmp_path / "out/sweep.json").read_text())["points"]}
    assert {name for name, words in commands.items() if "--fp16_allreduce" in words} == {
        "horovod-1-strong-1", "horovod-2-strong-1"
    }  # fmt: skip
    # Another strategy may be added with its own flag. Flags of a strategy that has run must not change.
    assert start("--strategies", "ddp,horovod", "--repeats", "1") == 2
    assert "for horovod only was --fp16_allreduce and is (none)" in capsys.readouterr().err
    pretended.started = []
    assert start("--strategies", "none,ddp", "--repeats", "1") == 0
    assert pretended.started == ["ddp-1-strong-1", "ddp-2-strong-1"]


def test_a_sweep_can_grow_but_not_change(pretended, start, tmp_path, capsys) -> None:
    assert start("--strategies", "none", "--repeats", "1") == 0
    assert start("--scaling", "both") == 0
    assert len(pretended.started) == len(set(pretended.started)) == 12  # the finished point is not run again
    assert start("--strategies", "ddp", "--repeats", "1") == 0
    assert list(states(tmp_path).values()).count("done") == 14  # points that are not named now are kept
    for flags, words in (
        (["--steps", "31"], "--steps was 30 and is 31"),
        (["--epochs", "1"], "--steps was 30 and is not set; --epochs was not set and is 1.0"),
        (["--learning_rate", "1e-3"], "--lr_scaling=none --num_threads=1 and is"),
        (["--launcher", "mpirun"], "--launcher was auto, one host and is mpirun"),
    ):
        assert start(*flags) == 2
        assert words in capsys.readouterr().err


def test_out_with_other_files_is_refused(pretended, start, tmp_path, capsys) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    assert start() == 2 and "is not empty and has no sweep.json" in capsys.readouterr().err
    assert pretended.started == [] and (tmp_path / "out" / "thesis.tex").exists()


def test_one_sweep_at_a_time(pretended, start, capsys) -> None:
    seen = []
    pretended.ends = {"none-1-strong-1": Stopped("")}
    inner = pretended.__call__

    def begin_another(*arguments: object) -> int | None:
        seen.append(start())
        return inner(*arguments)  # type: ignore[arg-type]

    one_run.start_and_wait = begin_another  # pretended's fixture restores the real one
    assert start() == 75 and seen == [2]
    assert f"in use by another command (process {os.getpid()} on " in capsys.readouterr().err


def test_report_is_written_on_request(pretended, start, tmp_path, monkeypatch) -> None:
    from hvd_bert.tools.report import plots

    for name in ("scaling", "losses", "projected"):
        monkeypatch.setattr(plots, name, lambda *_: b"")
    assert start("--report", str(tmp_path / "report")) == 0
    assert "horovod" in (tmp_path / "report" / "report.csv").read_text()


# One run


# A launcher that does not forward signals, like the shell that horovodrun becomes. It prints its rank's process id.
LAUNCHER = "sleep 600 & echo $!; {}wait"


def ends(number: str) -> bool:
    """Whether a process that would run for minutes ends now. Its files are closed shortly before it ends."""
    try:
        process = os.pidfd_open(int(number))
    except ProcessLookupError:
        return True
    ready, _, _ = select.select([process], [], [], 10)
    os.close(process)
    return bool(ready)


def test_a_run_that_takes_too_long_is_terminated(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        assert start_and_wait(["sh", "-c", LAUNCHER.format("")], os.environ, log, timeout=0.5) is None
    assert ends((tmp_path / "log").read_text())


def test_a_launcher_that_cannot_be_started_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "launcher").write_text("no program")  # and is not executable
    for name, reason in (("launcher", "Permission denied"), ("nowhere", "No such file or directory")):
        program = tmp_path / name
        trained = one_run.train([str(program)], os.environ, tmp_path / "run", 60)
        assert (trained.run, trained.status) == (None, 127)
        assert trained.reason == f"{program} cannot be started: {reason}"


@pytest.mark.parametrize("group", ["", "setsid "], ids=["the launcher's group", "its own session"])
def test_ranks_of_a_launcher_that_was_killed_are_terminated(tmp_path: Path, group: str) -> None:
    with (tmp_path / "log").open("w") as log:
        assert start_and_wait(["sh", "-c", f"{group}sleep 600 & echo $!; kill -9 $$"], os.environ, log, 60) == -9
    assert not psutil.pid_exists(int((tmp_path / "log").read_text()))  # before the next run starts


def test_what_ran_before_a_run_is_not_terminated(tmp_path: Path) -> None:
    with started(["sleep", "600"]) as other, (tmp_path / "log").open("w") as log:
        assert start_and_wait(["sh", "-c", "sleep 600 & kill -9 $$"], os.environ, log, 60) == -9
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize("name", ["INT", "TERM", "USR1", "USR2"])
def test_a_signal_terminates_the_run_and_is_raised(tmp_path: Path, name: str) -> None:
    before = signal.getsignal(signal.SIGINT)
    with (tmp_path / "log").open("w") as log, pytest.raises(Stopped, match=f"SIG{name}"), signals():
        command = ["sh", "-c", LAUNCHER.format(f"kill -{name} {os.getpid()}; ")]
        start_and_wait(command, os.environ, log, 60)
    assert ends((tmp_path / "log").read_text())
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_during_a_destructor_stops_before_the_next_run(tmp_path: Path) -> None:
    class Interrupted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    with (tmp_path / "log").open("w") as log, signals():
        item = Interrupted()
        del item  # Python ignores the exception
        with pytest.raises(Stopped, match="SIGINT"):
            start_and_wait(["touch", str(tmp_path / "started")], os.environ, log, 60)
    assert not (tmp_path / "started").exists()


def test_a_signal_during_the_start_terminates_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if another thread could receive the signal."""
    begun = []

    def start(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = begin(*words, **options)
        if "preexec_fn" in options:
            begun.append(process)
            os.kill(os.getpid(), signal.SIGTERM)
            os.read(received, 1)  # one of the threads has it
        return process

    begin = subprocess.Popen
    received, wakeup = os.pipe2(os.O_NONBLOCK)
    os.set_blocking(received, True)
    before = signal.set_wakeup_fd(wakeup)
    monkeypatch.setattr(one_run.subprocess, "Popen", start)
    with ThreadPoolExecutor(1) as pool, (tmp_path / "log").open("w") as log:
        pool.submit((done := threading.Event()).wait, 60)
        with pytest.raises(Stopped, match="SIGTERM"), signals():
            start_and_wait(["sleep", "600"], os.environ, log, 60)
        done.set()
    signal.set_wakeup_fd(before)
    os.close(received)
    os.close(wakeup)
    assert begun[0].returncode == -signal.SIGTERM


def test_a_run_ends_if_its_sweep_is_killed() -> None:
    program = "import os, sys; from hvd_bert.tools.bench.one_run import start_and_wait as s; "
    program += f"s(['sh', '-c', {LAUNCHER.format('')!r}], os.environ, sys.stdout, 600)"
    with started([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        rank = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        ready, _, _ = select.select([rank], [], [], 30)
    assert ready, "the rank still runs"
    os.close(rank)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("[1,0]<stderr>:hvd_bert: rank 0 on a: no such file.\nPrimary job terminated\n", "rank 0 on a: no such file."),
        ("x\nrank 1 on a failed:\nTraceback\nKeyError: 3\n\nRuntimeError: horovodrun\n", "rank 1 on a: KeyError: 3"),
        ("Traceback\nModuleNotFoundError: No module\nthe end", "ModuleNotFoundError: No module"),
        ("$ python\nSegmentation fault\n\n", "Segmentation fault"),
    ],
)
def test_failure_in_a_failure(tmp_path: Path, log: str, reason: str) -> None:
    (tmp_path / "log.txt").write_text(log)
    assert failure_in(tmp_path / "log.txt") == reason
