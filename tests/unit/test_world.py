"""The world: who launched this process, which device and threads it gets, and how all agree on an error."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hvd_bert import world as module
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_OK, UserError
from hvd_bert.world import (
    AgreedError,
    Launcher,
    Place,
    World,
    check_devices,
    check_pmi,
    check_size,
    choose_device,
    choose_threads,
    find_job,
    find_launcher,
    run_as_rank,
    share_cores,
)

# What the launchers leave in the environment of rank 3 of 4.
HOROVODRUN = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_CONTROLLER": "gloo"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MVAPICH = {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4"}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4"}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
# A job script, and mpirun inside it, see variables of the batch step: one task of a job of many.
BATCH_STEP = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "17"}
INSIDE_SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (HOROVODRUN, ("horovodrun", 4, 3)),
        (HOROVODRUN | INSIDE_SRUN, ("horovodrun", 4, 3)),
        (MPIRUN, ("mpirun", 4, 3)),
        (MPIRUN | BATCH_STEP, ("mpirun", 4, 3)),
        (MPIRUN | INSIDE_SRUN, ("mpirun", 4, 3)),
        (MVAPICH, ("mpirun", 4, 3)),
        (HYDRA, ("mpirun", 4, 3)),
        (SRUN, ("srun", 4, 3)),
        (BATCH_STEP, ("none", None, None)),
        ({}, ("none", None, None)),
        ({"HOROVOD_SIZE": "4", "HOROVOD_LOG_LEVEL": "info"}, ("none", None, None)),
    ],
    ids=lambda value: "+".join(value)[:60] if isinstance(value, dict) else "",
)
def test_find_launcher(environ, expected):
    assert find_launcher({"PATH": "/bin", **environ}) == Launcher(*expected)


@pytest.mark.parametrize(
    ("launcher", "size"),
    [(Launcher("none", None, None), 1), (Launcher("srun", 1, 0), 1), (Launcher("mpirun", 4, 3), 4)],
    ids=str,
)
def test_size_that_fits(launcher, size):
    check_size(launcher, size)


@pytest.mark.parametrize(
    ("launcher", "size", "mend"),
    [
        (Launcher("srun", 4, 0), 1, "srun --mpi=pmix"),
        (Launcher("mpirun", 4, 0), 1, "env/setup.sh"),
        (Launcher("horovodrun", 2, 0), 4, "env/setup.sh"),
    ],
    ids=str,
)
def test_size_that_does_not_fit(launcher, size, mend):
    with pytest.raises(UserError) as refused:
        check_size(launcher, size)
    message = str(refused.value)
    assert message.startswith(f"{launcher.name} started {launcher.size} processes, but Horovod sees a world of {size}")
    assert mend in message


@pytest.mark.parametrize("given", ["PMIX_RANK", "PMI_FD", "PMI2_FD"])
def test_srun_with_pmi(given):
    check_pmi(Launcher("srun", 4, 0), {given: "1"}, "Open MPI v4.1.4")


@pytest.mark.parametrize(
    ("launcher", "mpi"),
    [
        (Launcher("srun", 1, 0), "Open MPI v4.1.4"),
        (Launcher("mpirun", 4, 0), "Open MPI v4.1.4"),
        (Launcher("srun", 4, 0), "MPICH Version: 4.1"),
    ],
    ids=str,
)
def test_no_pmi_needed(launcher, mpi):
    check_pmi(launcher, SRUN, mpi)


def test_srun_without_pmi():
    with pytest.raises(UserError, match=r"srun started 4 processes without PMIx: .*`srun --mpi=pmix`"):
        check_pmi(Launcher("srun", 4, 0), SRUN, "Open MPI v4.1.4, package: Debian OpenMPI")


# --- devices and threads ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (0, ["cpu", "cpu", "cpu"]),
        (1, ["cuda:0", "cuda:0", "cuda:0"]),  # each its own; if it is the same one, check_devices says so
        (3, ["cuda:0", "cuda:1", "cuda:2"]),
        (8, ["cuda:0", "cuda:1", "cuda:2"]),
    ],
)
def test_choose_device(visible, devices):
    assert [choose_device(visible, rank, len(devices)) for rank in range(len(devices))] == devices


def test_too_few_devices():
    assert choose_device(2, 1, 4) == "cuda:1"
    with pytest.raises(UserError, match=r"4 ranks on this host, but only 2 GPUs are visible.*at most 2 ranks per host"):
        choose_device(2, 2, 4)


def places(*devices: tuple[str, str | None]) -> list[Place]:
    cores = frozenset({0})
    return [Place(rank, host, 0, "device", gpu, cores) for rank, (host, gpu) in enumerate(devices)]


@pytest.mark.parametrize(
    "given",
    [
        [("a", None), ("a", None)],  # CPUs are shared
        [("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-3")],
        [("a", "GPU-1"), ("b", "GPU-1")],
    ],
    ids=str,
)
def test_devices_of_their_own(given):
    check_devices(places(*given))


def test_shared_device():
    with pytest.raises(UserError, match=r"3 ranks on b would share one GPU \(GPU-2\)"):
        check_devices(places(("a", "GPU-2"), ("b", "GPU-2"), ("b", "GPU-1"), ("b", "GPU-2"), ("b", "GPU-2")))


@pytest.mark.parametrize(
    ("allocated", "threads"),
    [
        ([range(8)], [8]),
        ([range(8)] * 4, [2] * 4),  # not bound: shared
        ([range(0, 4), range(4, 8)], [4, 4]),  # bound by the launcher
        ([range(2)] * 4, [1] * 4),  # never 0
        ([range(7)] * 2, [3, 3]),
        ([range(0, 4), range(0, 4), range(4, 10)], [2, 2, 6]),
    ],
    ids=str,
)
def test_share_cores(allocated, threads):
    sets = [frozenset(cores) for cores in allocated]
    assert [share_cores(mine, sets) for mine in sets] == threads


# --- agreeing --------------------------------------------------------------------------------------


def make_world(rank: int = 0, size: int = 1) -> World:
    """A world whose collectives are not there; `size` > 1: see `heard`."""
    numbers = {"rank": rank, "size": size, "local_rank": rank, "local_size": size, "cross_rank": 0, "cross_size": 1}
    hvd = SimpleNamespace(**{name: lambda value=value: value for name, value in numbers.items()}, shutdown=lambda: None)
    return World(hvd, "none", None)


def heard(world: World, messages: list[str | None]) -> World:
    """Let the world's other ranks say `messages` in `together`; this rank says its own."""

    def allgather(mine):
        return [mine if rank == world.rank else said for rank, said in enumerate(messages)]

    world.allgather = allgather  # type: ignore[method-assign]
    return world


def test_world_of_one_needs_no_collective():
    world = make_world()
    assert world.allgather("x") == ["x"]
    assert world.broadcast("x") == "x"
    values = torch.tensor([1.0, 2.0])
    assert torch.equal(world.sum(values), values)
    with world.together():
        pass
    with pytest.raises(AgreedError, match=r"^no such file$"), world.together():
        raise UserError("no such file")


def test_error_of_one_rank_becomes_an_error_of_all():
    world = heard(make_world(rank=0, size=3), [None, "disk is full", None])
    with pytest.raises(AgreedError, match=r"^rank 1 on its host: disk is full$") as agreed, world.together():
        pass
    assert agreed.value.rank == 1


def test_error_of_all_ranks_is_said_by_the_first():
    world = heard(make_world(rank=2, size=3), ["bad flag"] * 3)
    with pytest.raises(AgreedError, match=r"^bad flag$") as agreed, world.together():
        raise UserError("bad flag")
    assert agreed.value.rank == 0


def test_defects_are_no_user_errors():
    with pytest.raises(ZeroDivisionError), make_world().together():
        _ = 1 / 0


def test_job():
    variables = {"SLURM_JOB_ID": "18", "SLURM_JOB_NAME": "hvd_bert", "SLURM_JOB_PARTITION": "gpu"}
    variables |= {"SLURM_JOB_NODELIST": "a100-[01-02]", "SLURM_NTASKS": "4"}
    job = {"id": "18", "name": "hvd_bert", "partition": "gpu", "nodes": "a100-[01-02]"}
    assert find_job(variables) == job
    of_array = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "0"}
    assert find_job(variables | of_array) == job | {"array": "17_0"}
    assert find_job({"PATH": "/bin"}) is None


def test_places_for_the_log(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    world = make_world(size=3)
    world.places = tuple(places(("b", None), ("a", None), ("b", None)))
    threads = f"{torch.get_num_threads()} thread(s) per rank"
    assert world.describe() == [f"b: rank 0 device, rank 2 device; {threads}", f"a: rank 1 device; {threads}"]
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert world.describe()[0].startswith("Slurm job id 17")


def test_hosts_in_rank_order():
    world = make_world()
    world.places = tuple(places(("b", None), ("b", None), ("a", None), ("b", None)))
    assert world.hosts == ["b", "a"]


def leave(monkeypatch: pytest.MonkeyPatch, world: World, entry) -> int | str | None:
    monkeypatch.setattr(module.World, "join", staticmethod(lambda: world))
    monkeypatch.setattr(world, "take_place", lambda: None)
    monkeypatch.setattr(module.os, "_exit", lambda status: (_ for _ in ()).throw(SystemExit(f"aborted {status}")))
    with pytest.raises(SystemExit) as left:
        run_as_rank(entry)
    return left.value.code


def raising(error: BaseException):
    def entry(world: World) -> None:
        raise error

    return entry


@pytest.mark.parametrize(
    ("entry", "status", "said"),
    [
        (lambda world: None, EXIT_OK, ""),
        (raising(AgreedError("no such file")), EXIT_BAD_INPUT, "hvd_bert: no such file\n"),
        (raising(AgreedError("diverged", status=EXIT_FAILURE)), EXIT_FAILURE, "hvd_bert: diverged\n"),
        (raising(AgreedError("rank 1 says it", rank=1)), EXIT_BAD_INPUT, ""),
    ],
    ids=["done", "bad input", "failure", "another rank speaks"],
)
def test_ranks_that_agree_leave_in_order(monkeypatch, capsys, entry, status, said):
    assert leave(monkeypatch, make_world(), entry) == status
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UserError("only here"), EXIT_BAD_INPUT, "hvd_bert: rank 0 on {host}: only here\n"),
        (KeyError("defect"), EXIT_FAILURE, "rank 0 on {host} failed:\nTraceback"),
        (KeyboardInterrupt(), EXIT_FAILURE, ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rank_that_fails_alone_ends_all(monkeypatch, capsys, error, status, said):
    world = make_world()
    assert leave(monkeypatch, world, raising(error)) == f"aborted {status}"
    assert capsys.readouterr().err.startswith(said.format(host=world.host))


@pytest.mark.parametrize(("rank", "status"), [(None, EXIT_BAD_INPUT), (0, EXIT_BAD_INPUT), (3, EXIT_OK)])
def test_no_world_to_join_is_said_by_the_first(monkeypatch, capsys, rank, status):
    def start():
        raise module.WorldsOfOne("no world")

    for _, *names in module._LAUNCHERS:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    if rank is not None:
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setattr(module.World, "join", staticmethod(start))
    with pytest.raises(SystemExit) as left:
        run_as_rank(lambda world: None)
    assert left.value.code == status
    assert capsys.readouterr().err == ("hvd_bert: no world\n" if status else "")


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({}, 8),
        ({"OMP_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "3,1"}, 3),
        ({"OMP_NUM_THREADS": "many"}, 8),
        ({"SLURM_CPUS_PER_TASK": "4"}, 4),
        ({"SLURM_CPUS_PER_TASK": "32"}, 8),
        ({"OMP_NUM_THREADS": "16", "SLURM_CPUS_PER_TASK": "4"}, 16),
    ],
    ids=str,
)
def test_threads_of_a_rank(environ, threads):
    assert choose_threads(environ, share=8) == threads
