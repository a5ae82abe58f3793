"""Decisions from the launcher's and the scheduler's variables: world, device, threads, job."""

from __future__ import annotations

from tables import each, refused

from hvd_bert.distributed.launch import (
    Launcher,
    LaunchError,
    check_pmi,
    check_size,
    find_job,
    find_launcher,
    slurm_nodes,
    slurm_port,
)
from hvd_bert.distributed.world import RankInfo, check_devices, choose_device, choose_threads, share_cores

# Variables that the launchers set for rank 3 of 4.
HOROVODRUN = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_CONTROLLER": "gloo"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MVAPICH = {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4"}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
TORCHRUN |= {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
TORCHRUN |= {"MASTER_ADDR": "a100-01", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
# A job script, and mpirun inside it, see variables of the batch step: one task of a job of many.
BATCH_STEP = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "17"}
INSIDE_SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}


@each(
    ("environ", "expected"),
    [
        (HOROVODRUN, ("horovodrun", 4, 3)),
        (TORCHRUN, ("torchrun", 4, 3)),
        (TORCHRUN | SRUN | INSIDE_SRUN, ("torchrun", 4, 3)),
        ({"RANK": "0", "WORLD_SIZE": "4"}, ("none", None, None)),  # some job scripts set them for themselves
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
)
def test_find_launcher(environ, expected):
    assert find_launcher({"PATH": "/bin", **environ}) == Launcher(*expected)


def test_local_rank():
    for environ in (
        *(HOROVODRUN, MPIRUN, TORCHRUN, SRUN | {"SLURM_LOCALID": "1"}),
        *(MVAPICH | {"MV2_COMM_WORLD_LOCAL_RANK": "1"}, HYDRA | {"MPI_LOCALRANKID": "1"}),
    ):
        assert find_launcher(environ).local_rank == 1


@each(
    ("launcher", "size", "hint"),
    [
        (Launcher("none", None, None), 1, None),
        (Launcher("srun", 1, 0), 1, None),
        (Launcher("mpirun", 4, 3), 4, None),
        (Launcher("srun", 4, 0), 1, "srun --mpi=pmix"),
        (Launcher("mpirun", 4, 0), 1, "env/setup.sh"),
        (Launcher("horovodrun", 2, 0), 4, "env/setup.sh"),
    ],
)
def test_horovods_size_is_the_launchers(launcher, size, hint):
    if hint is None:
        check_size(launcher, size)
    else:
        with refused(f"{launcher.name} started {launcher.size}", f"world of {size}", hint):
            check_size(launcher, size)


@each(
    ("launcher", "environ", "mpi"),
    [
        *((Launcher("srun", 4, 0), {given: "1"}, "Open MPI v4.1.4") for given in ("PMIX_RANK", "PMI_FD", "PMI2_FD")),
        (Launcher("srun", 1, 0), SRUN, "Open MPI v4.1.4"),
        (Launcher("mpirun", 4, 0), SRUN, "Open MPI v4.1.4"),
        (Launcher("srun", 4, 0), SRUN, "MPICH Version: 4.1"),
    ],
)
def test_pmi_is_there_or_not_needed(launcher, environ, mpi):
    check_pmi(launcher, environ, mpi)


def test_srun_without_pmi():
    with refused("`srun --mpi=pmix`"):
        check_pmi(Launcher("srun", 4, 0), SRUN, "Open MPI v4.1.4, package: Debian OpenMPI")


# --- devices and threads ---------------------------------------------------------------------------


@each(
    ("visible", "devices"),
    [
        (0, ["cpu", "cpu", "cpu"]),
        (1, ["cuda:0", "cuda:0", "cuda:0"]),  # each its own; check_devices refuses a shared one
        (3, ["cuda:0", "cuda:1", "cuda:2"]),
        (8, ["cuda:0", "cuda:1", "cuda:2"]),
    ],
)
def test_choose_device(visible, devices):
    assert [choose_device(visible, rank, len(devices)) for rank in range(len(devices))] == devices


def test_too_few_devices():
    assert choose_device(2, 1, 4) == "cuda:1"
    with refused("4 ranks", "2 GPUs"):
        choose_device(2, 2, 4)


def rank_infos(*devices: tuple[str, str | None]) -> list[RankInfo]:
    cores = frozenset({0})
    return [RankInfo(rank, host, 0, "device", gpu, cores) for rank, (host, gpu) in enumerate(devices)]


def test_ranks_may_share_cpus_but_no_gpu():
    check_devices(rank_infos(("a", None), ("a", None)))
    check_devices(rank_infos(("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1")))
    with refused("3 ranks on b", "GPU-2"):
        check_devices(rank_infos(("a", "GPU-2"), ("b", "GPU-2"), ("b", "GPU-1"), ("b", "GPU-2"), ("b", "GPU-2")))


@each(
    ("allocated", "threads"),
    [
        ([range(8)], [8]),
        ([range(8)] * 4, [2] * 4),  # not bound: shared
        ([range(0, 4), range(4, 8)], [4, 4]),  # bound by the launcher
        ([range(2)] * 4, [1] * 4),  # never 0
        ([range(7)] * 2, [3, 3]),
        ([range(0, 4), range(0, 4), range(4, 10)], [2, 2, 6]),
    ],
)
def test_share_cores(allocated, threads):
    sets = [frozenset(cores) for cores in allocated]
    assert [share_cores(mine, sets) for mine in sets] == threads


@each(
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
)
def test_threads_of_a_rank(environ, threads):
    assert choose_threads(environ, share=8) == threads


def test_job():
    variables = {"SLURM_JOB_ID": "18", "SLURM_JOB_NAME": "hvd_bert", "SLURM_JOB_PARTITION": "gpu"}
    variables |= {"SLURM_JOB_NODELIST": "a100-[01-02]", "SLURM_NTASKS": "4"}
    job = {"id": "18", "name": "hvd_bert", "partition": "gpu", "nodes": "a100-[01-02]"}
    assert find_job(variables) == job
    of_array = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "0"}
    assert find_job(variables | of_array) == job | {"array": "17_0"}
    assert find_job({"PATH": "/bin"}) is None


def test_each_step_has_a_port():
    step = {"SLURM_JOB_ID": "1234567", "SLURM_STEP_ID": "0"}
    assert 10_000 <= slurm_port(step) < 30_000
    assert slurm_port(step | {"SLURM_STEP_ID": "1"}) != slurm_port(step), "another step of the job, another port"
    with refused("SLURM_JOB_ID='x'", error=LaunchError):
        slurm_port(step | {"SLURM_JOB_ID": "x"})


def test_slurm_tasks_without_nodes_have_nowhere_to_meet():
    assert slurm_nodes({"SLURM_STEP_NODELIST": "b", "SLURM_JOB_NODELIST": "[a-b]"}) == "b"
    with refused("SLURM_STEP_NODELIST"):
        slurm_nodes({})
