"""Sweeps: plans, commands, and points that fail, cannot run or are done. No ranks are started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from made_runs import PretendedRuns, make_run
from refusals import check_refusal, refused

from hvd_bert.config import strategies as known
from hvd_bert.config.command_line import parse
from hvd_bert.config.settings import Config
from hvd_bert.distributed import slurm
from hvd_bert.distributed.launchers import Allocation
from hvd_bert.tools.bench import sweep
from hvd_bert.tools.bench.points import SweepPlan, SweepPoint, check_flags
from hvd_bert.tools.runs import launching, one_run
from hvd_bert.tools.runs.launching import Launching, Machine, Point, find_allocation
from hvd_bert.tools.runs.one_run import Stopped

TWO_CORES = Machine(cores=2, gpus=0, allocation=None)
FOUR_GPUS = Machine(cores=64, gpus=4, allocation=None)


def plan_of(*words: str) -> SweepPlan:
    plan = SweepPlan(threads=1)
    words = ("--strategies=none,horovod,ddp", "--ranks=1,2,4", *words)
    plan.flags = sweep.make_parser().parse_known_args(words, plan)[1]
    return plan


def planned(*words: str) -> dict[SweepPoint, Config]:
    """Plan a sweep with the given flags. Returns its points in order, each with its training's settings."""
    plan = plan_of(*words)
    config, _ = check_flags(plan)
    accumulation = config.train.gradient_accumulation_steps
    return {each: parse(plan.trainer_flags(each, accumulation, Path("out"))) for each in plan.points(config)}


def by(choice: str, machine: Machine = TWO_CORES, hosts: str = "", *words: str) -> Launching:
    return Launching(choice, words, hosts or None, machine)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Fake the installed launchers and packages. Returns their names, from which a test may remove some."""
    there = {"horovodrun", "mpirun", "srun", "horovod", "deepspeed"}
    monkeypatch.setattr(launching, "program_path", lambda name: f"/bin/{name}" if name in there else None)
    monkeypatch.setattr(known, "find_spec", lambda name: name if name in there else None)
    return there


def test_points_of_a_strategy() -> None:
    batch = ("--per_device_train_batch_size=6", "--gradient_accumulation_steps=2")
    strong, weak = {"ddp-1-strong-1": (16, 8, 1), "ddp-4-strong-1": (16, 2, 4)}, {"ddp-1-weak-1": (12, 6, 1)}
    for words, expected in (  # name: (global batch, micro-batch per GPU, processes)
        (("ddp", "--ranks=4,1", "--scaling=both", *batch), strong | weak | {"ddp-4-weak-1": (48, 6, 4)}),
        (("dp",), {"dp-2-strong-1": (16, 8, 1), "dp-4-strong-1": (16, 4, 1)}),
        (("none,none",), {"none-1-strong-1": (16, 16, 1)}),
    ):
        given = {each: config.train for each, config in planned("--repeats=1", "--strategies", *words).items()}
        batches = [(each.global_batch, train.per_device_train_batch_size) for each, train in given.items()]
        found = [(each.name, (*sizes, each.processes)) for each, sizes in zip(given, batches, strict=True)]
        assert found == [*expected.items()]
        assert {train.lr_scaling for train in given.values()} == {"none"}  # equal rates make losses comparable


def test_a_run_per_seed_and_world_size_for_a_number_of_epochs(tmp_path: Path) -> None:
    # --epochs overrides max_steps.
    (file := tmp_path / "mine.yaml").write_text("max_steps: 7\nseed: 5\nglobal_batch: 24\n")
    points = planned(f"--config={file}", "--strategies=horovod", "--ranks=1,2", "--epochs=2.5", "--seeds=7,3")
    order = [(1, 7), (2, 7), (2, 3), (1, 3)]
    assert [each.name for each in points] == [f"horovod-{ranks}-strong-{seed}" for ranks, seed in order]
    last, train = [*points][-1], [*points.values()][-1].train
    assert (train.seed, train.num_train_epochs, train.max_steps) == (3, 2.5, -1)
    assert train.windows_per_step(1) == last.global_batch


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--global_batch=18", ["--global_batch 18", "4 ranks", "a multiple of 4"]),
        ("--gradient_accumulation_steps=3", ["1 or 2 or 4 ranks", "3 micro-batches per step"]),
        ("--strategies=none,mine", ["--strategies", "mine", "fsdp"]),
        ("--strategies=dp --ranks=1", ["--strategies dp", "--ranks"]),
        ("--strategy=ddp", ["--strategy"]),
        ("--seed=2 --seeds=1,2", ["--seed", "--seeds"]),
        ("--per_device_train_batch_size=4", ["--per_device_train_batch_size", "--global_batch"]),
        ("--train_file=nowhere.json", ["--train_file nowhere.json"]),
        ("--max_step=3", ["--max_step"]),
        ("--num_groups=-1 --strategies=none", ["--num_groups -1"]),  # even if no strategy uses the flag
        ("--zero-stage=1", ["--zero_stage", "Add deepspeed to --strategies"]),
        ("--fp16_allreduce --bf16_allreduce", ["--fp16_allreduce", "--bf16_allreduce"]),
        ("--resume-from-checkpoint=latest", ["--resume_from_checkpoint", "from scratch"]),
        ("--timeline-file=t.json", ["--timeline_file", "distort"]),
    ],
)
def test_invalid_plan(words: str, named: list[str]) -> None:
    with refused(*named):
        planned(*words.split())


def test_a_flag_of_one_strategy_is_passed_to_that_strategy_only(tmp_path: Path) -> None:
    (file := tmp_path / "mine.yaml").write_text("zero_stage: 1\nfp16_allreduce: true\n")
    for flags, fp16 in (
        (("--zero-stage", "2", "--bf16", "--zero_stage", "1", "--fp16_allreduce"), True),
        (("--config", str(file)), True),
        (("--config", str(file), "--fp16_allreduce=false"), False),
    ):
        given = planned(*flags, "--strategies=none,horovod,deepspeed", "--ranks=1", "--repeats=1").values()
        passed = [(config.parallel.zero_stage, config.parallel.fp16_allreduce) for config in given]
        assert passed == [(2, False), (2, fp16), (1, False)]
    _, left_out = check_flags(plan_of("--fp16", "--strategies=none,deepspeed"))  # deepspeed refuses --fp16
    assert left_out.keys() == {"deepspeed"} and "--fp16" in left_out["deepspeed"]


PYTHON = Path(sys.executable).name


def test_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # writable; without a home, horovodrun gets --disable-cache
    hosts, job = "a100-01:2,a100-02:2", Machine(cores=64, gpus=2, allocation=Allocation(2, 2, 32))
    gloo, slurm = by("horovodrun", TWO_CORES, hosts, "--gloo"), by("auto", job)
    srun = "srun --mpi=pmix --kill-on-bad-exit=1 --wait=60"
    for launch, strategy, ranks, expected in (
        (by("mpirun"), "ddp", 4, f"mpirun -np 4 -H localhost:4 --bind-to none {PYTHON}"),
        (gloo, "none", 1, f"horovodrun -np 1 -H {hosts} --gloo {PYTHON}"),  # baseline: same hosts
        (slurm, "none", 1, f"{srun} --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=32 {PYTHON}"),
        (slurm, "horovod", 4, f"{srun} --nodes=2 --ntasks=4 --ntasks-per-node=2 --cpus-per-task=32 {PYTHON}"),
    ):
        words = [Path(word).name for word in launch.command(Point(strategy, ranks), ["--bf16"], {})]
        assert " ".join(words) == f"{expected} -m hvd_bert.train --bf16"
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    assert "--disable-cache" in by("auto").command(Point("horovod", 2), [], {})
    environ = {"OMP_NUM_THREADS": "1", "HVD_BERT_INTERFACE": "lo", "USER": "me"}
    exported = by("mpirun").command(Point("ddp", 2), [], environ)
    assert "-x OMP_NUM_THREADS -x HVD_BERT_INTERFACE " in " ".join(exported) and "USER" not in exported


def test_allocation_of_a_job() -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "3(x2)"}
    assert find_allocation(job) == Allocation(2, 3, None)
    assert find_allocation(job | {"SLURM_NTASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "8"}) == Allocation(2, 2, 8)
    assert find_allocation({"SLURM_NNODES": "2"}) is None


def test_one_process_sees_the_gpus_of_its_point() -> None:
    seen = by("auto", FOUR_GPUS).environment(Point("dp", 2), {"CUDA_VISIBLE_DEVICES": "3,1,0,2"})
    assert seen["CUDA_VISIBLE_DEVICES"] == "3,1"


def test_invalid_launcher(installed: set[str]) -> None:
    for launch in (by("mpirun"), *(by(choice, TWO_CORES, "a:2") for choice in ("auto", "horovodrun", "mpirun"))):
        launch.check()
    installed.remove("mpirun")
    for launch, *named in (
        (by("torchrun", TWO_CORES, "a:2"), "-H", "--launcher torchrun"),
        (by("auto", TWO_CORES, "", "--gloo"), "--launcher_flag"),
        (by("srun"), "--launcher srun", "Slurm"),
        (by("mpirun"), "mpirun", "PATH"),
    ):
        with refused(*named):
            launch.check()


def test_obstacles(installed: set[str]) -> None:
    installed.remove("horovodrun")
    job = Machine(8, 1, Allocation(2, 2, 1))
    for launch, where, words in (
        (by("auto"), Point("ddp", 4), ""),  # sharing cores is slow but possible
        (by("auto", FOUR_GPUS), Point("ddp", 8), "8 ranks, but 4 GPUs"),
        (by("auto", FOUR_GPUS), Point("dp", 4), ""),
        (by("none"), Point("ddp", 2), "--launcher none starts one process only"),
        (by("mpirun", TWO_CORES, "a:1,b"), Point("horovod", 4), "4 ranks, but -H a:1,b has 2 slots"),
        (by("auto", job), Point("ddp", 8), "the Slurm job has 4 tasks"),
        *((by(choice, job), Point("ddp", 4), "2 ranks per node, but 1 GPUs") for choice in ("auto", "mpirun")),
        (by("mpirun", Machine(8, 2, job.allocation)), Point("ddp", 4), ""),
        (by("mpirun", job, "a:1"), Point("ddp", 2), "2 ranks, but -H a:1 has 1 slots"),  # -H takes precedence
        # If a launcher is not installed, only the points that need it cannot run.
        (by("auto"), Point("horovod", 2), "horovodrun is not on PATH: run `bash env/setup.sh`"),
        (by("auto", TWO_CORES, "a:2"), Point("none", 1), "horovodrun"),
    ):
        found = launch.obstacle(where)
        assert words in found and bool(words) == bool(found)
    assert [by(choice, job).spans_job for choice in ("auto", "srun", "mpirun", "horovodrun")] == [True] * 3 + [False]
    assert not by("auto").spans_job and not by("auto", job, "a:1").spans_job


def test_ranks_that_share_cores_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    by("auto").warn_of_shared_cores([Point("ddp", 2)], 1)
    by("auto", FOUR_GPUS).warn_of_shared_cores([Point("ddp", 4)], 99)
    assert capsys.readouterr().err == ""
    by("auto").warn_of_shared_cores([Point("ddp", 2)], 2)
    assert "warning: 2 ranks of 2 threads share 2 cores" in capsys.readouterr().err


class Sweeps(PretendedRuns):
    """Runs small sweeps in the folder `out` without starting ranks."""

    def __init__(self, out: Path) -> None:
        super().__init__(lambda folder, command, environ: folder.name, self._made)
        self.out = out

    @staticmethod
    def _made(folder: Path, given: dict[str, str], name: str) -> Path:
        ranks = int(name.split("-")[1])
        return make_run(folder, given["strategy"], ranks, batch=int(given["per_device_train_batch_size"]) * ranks)

    def start(self, *flags: str) -> int:
        """Clear `started` and run a sweep. Returns the exit status."""
        self.started = []
        defaults = {"--strategies": "none,horovod", "--ranks": "1,2", "--repeats": "2", "--out": str(self.out)}
        return sweep.main([*(f"{name}={value}" for name, value in defaults.items() if name not in flags), *flags])

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """The points of sweep.json by name."""
        return {row["name"]: row for row in json.loads((self.out / "sweep.json").read_text())["points"]}

    def names(self, state: str) -> list[str]:
        """Return the names of the points in this state."""
        return [name for name, row in self.rows.items() if row["state"] == state]


@pytest.fixture
def sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweeps:
    made = Sweeps(tmp_path / "out")
    monkeypatch.setattr(one_run, "start_and_wait", made)
    monkeypatch.setattr(Machine, "here", lambda environ: TWO_CORES)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return made


ORDER = [f"{name}-1" for name in ("none-1-strong", "horovod-1-strong", "horovod-2-strong")]
ORDER += [f"{name[:-2]}-2" for name in reversed(ORDER)]


def test_all_points_are_run_and_recorded(sweeps: Sweeps, tmp_path, monkeypatch, capsys) -> None:
    others: list[int] = []
    # A second sweep in the same folder is refused.
    sweeps.during = lambda folder, given: others.append(sweep.main(["--out", str(sweeps.out)]))
    assert sweeps.start() == 0
    assert sweeps.started == ORDER == [*sweeps.rows] == sweeps.names("done")
    output, errors = capsys.readouterr()
    assert set(others) == {2} and f"process {os.getpid()} on " in errors
    last, by_hand = sweeps.rows["none-1-strong-2"], f"hvd-bert report {sweeps.out}"
    assert last["windows_per_s"] == pytest.approx(10) and "--num_threads=1" in last["command"]
    weights = {path.parent.name for path in sweeps.out.glob("*/model.safetensors")}
    assert weights == {*ORDER[:3]}  # only models of the first repeat are retained
    assert "[6/6] none, 1 rank, strong, repeat 2: 10.0 windows/s" in output and by_hand in output
    failed = subprocess.CompletedProcess([], 2)  # the report fails
    monkeypatch.setattr(sweep.subprocess, "run", lambda *args, **options: failed)
    assert sweeps.start("--report", str(tmp_path / "report")) == 1
    assert sweeps.started == [] and by_hand in capsys.readouterr().out


def test_a_requeue_needs_a_point_that_is_done(sweeps: Sweeps, monkeypatch) -> None:
    monkeypatch.setattr(slurm, "requeue", requeue := Mock(return_value=""))
    for signal, *flags in (("SIGUSR1",), ("SIGUSR1", "--requeue", "no"), ("SIGINT",)):
        sweeps.ends = {ORDER[2]: Stopped(signal)}
        assert sweeps.start(*flags) == 75
    sweeps.ends = {ORDER[2]: 1, ORDER[3]: Stopped("SIGUSR1")}
    assert sweeps.start() == 75
    asked = [call.args[1:3] for call in requeue.call_args_list]
    assert asked == [("auto", "2 of 6 points"), ("no", ""), ("auto", "")]


def test_a_failing_point_is_a_row_and_the_sweep_continues(sweeps: Sweeps, tmp_path, capsys) -> None:
    sweeps.ends = {"horovod-2": 1, "none-1-strong-2": None}
    assert sweeps.start("--repeats", "3") == 1
    assert [name for name in sweeps.started if name.startswith("horovod-2")] == ORDER[2:4]  # repeat 3 is skipped
    failed = sweeps.rows["horovod-2-strong-1"]
    assert failed["state"] == "failed" and failed["reason"].startswith("bad input (status 1; ")
    assert (sweeps.out / "horovod-2-strong-1" / "run.log").exists()
    assert "--timeout 3600 s" in sweeps.rows["none-1-strong-2"]["reason"]
    assert sweeps.rows["horovod-2-strong-3"]["reason"].startswith("not run")
    sweeps.ends = {}
    assert sweeps.start("--repeats", "3") == 0  # failed points run again
    assert sorted(sweeps.started) == ["horovod-2-strong-1", "horovod-2-strong-2", "horovod-2-strong-3", ORDER[-1]]
    (sweeps.out / ORDER[0] / "metrics.jsonl").write_text("{")  # unreadable results: the point runs again
    assert sweeps.start("--repeats", "3") == 0 and sweeps.started == ORDER[:1]
    sweeps.ends = {"": 2}  # if the baseline's input is bad, so is every point's
    assert sweeps.start("--out", str(tmp_path / "other")) == 2
    assert sweeps.started == ORDER[:1] and capsys.readouterr().err == "hvd_bert: bad input\n"


def test_points_that_cannot_run_here_are_rows_and_a_failure(sweeps: Sweeps, installed: set[str], capsys) -> None:
    installed.remove("deepspeed")
    assert sweeps.start("--strategies", "none,deepspeed,dp") == 1
    assert sweeps.started == ["none-1-strong-1", "none-1-strong-2"]
    skipped = {row["strategy"]: row["reason"] for row in sweeps.rows.values() if row["state"] == "skipped"}
    assert skipped.keys() == {"deepspeed", "dp"} and "2 GPUs" in skipped["dp"]
    output = capsys.readouterr().out
    assert output.count("deepspeed is not installed") == 1 and "deepspeed-1-strong-1 and 3 more" in output
    assert sweeps.start("--strategies", "none") == 0  # points that only an earlier plan skipped are no failure


def test_a_sweep_can_grow_but_not_change(sweeps: Sweeps, capsys) -> None:
    assert sweeps.start("--strategies", "none", "--repeats", "1") == 0
    assert sweeps.start("--scaling", "both") == 0
    assert len(sweeps.started) == 11  # finished points are not run again
    assert sweeps.start("--strategies", "deepspeed", "--zero_stage", "1", "--repeats", "1") == 0
    assert len(sweeps.names("done")) == 14  # points of earlier plans remain
    for flags, named in (
        (["--epochs", "1"], ["--steps was 30", "--epochs was not set and is 1.0"]),
        (["--launcher", "mpirun"], ["auto, one host", "mpirun"]),
        (["--bf16"], ["--bf16"]),
        (["--fp16_allreduce"], ["horovod", "(none)", "--fp16_allreduce"]),
    ):
        assert sweeps.start(*flags) == 2
        check_refusal(capsys.readouterr().err.rstrip(), *named)
