"""Launchers' variables that are no numbers, that cannot be true, or that show a job started wrongly."""

from __future__ import annotations

from tables import each, refused
from test_launch import BATCH_STEP, HOROVODRUN, HYDRA, INSIDE_SRUN, MPIRUN, MVAPICH, SRUN, TORCHRUN

from hvd_bert.distributed.launch import (
    Launcher,
    LaunchError,
    check_horovod,
    check_nesting,
    extend_gloo_timeout,
    find_allocation,
    find_launcher,
    gloo_timeout_s,
    is_nested,
    requested_tasks,
    speaks_first,
)

NUMBERS = {
    "horovodrun": "HOROVOD_SIZE HOROVOD_RANK HOROVOD_LOCAL_RANK",
    "mpirun": "OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_RANK",
    "MVAPICH's": "MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_RANK",
    "MPICH's": "PMI_SIZE PMI_RANK",
    "torchrun": "WORLD_SIZE RANK LOCAL_WORLD_SIZE LOCAL_RANK GROUP_WORLD_SIZE GROUP_RANK MASTER_PORT",
    "srun": "SLURM_STEP_NUM_TASKS SLURM_PROCID SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_NNODES",
}
WITHOUT_ADDRESS = {name: value for name, value in TORCHRUN.items() if name != "MASTER_ADDR"}
SET_BY = dict(zip(NUMBERS, (HOROVODRUN, MPIRUN, MVAPICH, HYDRA, TORCHRUN, SRUN), strict=True))


@each("value", ["abc", "", "-1", "1.5", "٣", "9" * 5000])
@each(("launcher", "name"), [(by, name) for by, names in NUMBERS.items() for name in names.split()])
def test_variable_that_is_no_number(launcher, name, value):
    environ = SET_BY[launcher] | {name: value}
    with refused(name, value[:40], error=LaunchError):
        find_launcher(environ)
        requested_tasks(environ)
        find_allocation(environ | {"SLURM_JOB_ID": "17"})


@each(
    ("environ", "named"),
    [
        ({"HOROVOD_RANK": "7", "HOROVOD_SIZE": "1"}, ["HOROVOD_RANK=7", "HOROVOD_SIZE=1"]),
        (HOROVODRUN | {"HOROVOD_LOCAL_SIZE": "1"}, ["HOROVOD_LOCAL_RANK=1", "HOROVOD_LOCAL_SIZE=1"]),
        (SRUN | {"SLURM_PROCID": "4"}, ["SLURM_PROCID=4", "SLURM_STEP_NUM_TASKS=4"]),
        (TORCHRUN | {"GROUP_RANK": "2"}, ["GROUP_RANK=2", "GROUP_WORLD_SIZE=2"]),
        (TORCHRUN | {"MASTER_PORT": "65536"}, ["MASTER_PORT='65536'", "from 1 to 65535"]),
        ({"TORCHELASTIC_RUN_ID": "none"}, ["TORCHELASTIC_RUN_ID", "WORLD_SIZE"]),
        (WITHOUT_ADDRESS, ["TORCHELASTIC_RUN_ID", "MASTER_ADDR"]),
    ],
)
def test_variables_that_cannot_be_true(environ, named):
    with refused(*named, error=LaunchError):
        find_launcher(environ)
    assert speaks_first(environ), "its rank is unknown, so that this process reports it"


@each(
    ("environ", "named"),
    [
        ({"HOROVOD_CONTROLLER": "nonsense"}, ["HOROVOD_CONTROLLER='nonsense'", "mpi or gloo"]),
        ({"HOROVOD_CONTROLLER": ""}, ["HOROVOD_CONTROLLER=''", "mpi or gloo"]),
        ({"HOROVOD_CPU_OPERATIONS": "nccl"}, ["HOROVOD_CPU_OPERATIONS='nccl'", "mpi or gloo or ccl"]),
        ({"HOROVOD_GLOO_TIMEOUT_SECONDS": "0"}, ["HOROVOD_GLOO_TIMEOUT_SECONDS='0'", "from 1"]),
        (HOROVODRUN, ["HOROVOD_SIZE=4", "HOROVOD_GLOO_RENDEZVOUS_ADDR"]),
        (HOROVODRUN | {"HOROVOD_GLOO_RENDEZVOUS_PORT": "x"}, ["HOROVOD_GLOO_RENDEZVOUS_PORT='x'"]),
        # Horovod would misread these.
        *(
            ({name: value}, [f"{name}={value!r}"])
            for name, values in {
                "HOROVOD_CACHE_CAPACITY": ["-1", "1e3", "4294967295"],
                "HOROVOD_FUSION_THRESHOLD": ["-1", "64MB"],
                "HOROVOD_CYCLE_TIME": ["-1", "nan", "inf", "1e5", "100000", "fast", "٣", ""],
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ["-1", "10m"],
                "HOROVOD_AUTOTUNE": ["true"],
            }.items()
            for value in values
        ),
    ],
)
def test_horovods_variables_that_would_abort_it_or_that_it_would_misread(environ, named):
    with refused(*named, error=LaunchError):
        check_horovod(find_launcher(environ), environ)


def test_horovods_variables_that_it_accepts():
    served = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1234"}
    numbers = {"HOROVOD_CACHE_CAPACITY": "0", "HOROVOD_FUSION_THRESHOLD": "134217728", "HOROVOD_CYCLE_TIME": "3.5"}
    for environ in ({}, {"HOROVOD_CONTROLLER": "MPI", "HOROVOD_CPU_OPERATIONS": "ccl"}, HOROVODRUN | served, numbers):
        check_horovod(find_launcher(environ), environ)
    assert gloo_timeout_s({}) == 30 and gloo_timeout_s({"HOROVOD_GLOO_TIMEOUT_SECONDS": "300"}) == 300


@each(
    ("environ", "programs", "nested"),
    [
        (SRUN, ["slurmstepd"], False),
        (HOROVODRUN | SRUN, ["sshd"], True),  # horovodrun exports its environment to all ranks
        (HOROVODRUN | INSIDE_SRUN, ["horovodrun"], False),
        (HOROVODRUN | BATCH_STEP, ["horovodrun"], False),
        (MPIRUN | SRUN, ["mpirun", "slurmstepd"], True),
        (MPIRUN | SRUN | {"SLURM_PTY_PORT": "40001"}, ["mpirun", "bash", "slurmstepd"], False),  # srun --pty bash
        (MPIRUN | SRUN, ["orted", "slurmstepd"], False),  # Slurm's variables are those of mpirun's daemon
        (TORCHRUN | SRUN, ["torchrun", "slurmstepd"], False),
    ],
)
def test_launcher_in_each_task_of_srun(environ, programs, nested):
    assert is_nested(find_launcher(environ), environ, lambda: programs) is nested


def test_launchers_in_tasks_of_srun_report_it_once():
    first = HOROVODRUN | SRUN | {"HOROVOD_RANK": "0", "SLURM_PROCID": "0"}
    with refused("srun", "horovodrun", "4 ranks", error=LaunchError):
        check_nesting(find_launcher(first), first)
    assert speaks_first(first)
    assert not speaks_first(first | {"SLURM_PROCID": "1"})
    assert not speaks_first(first | {"HOROVOD_RANK": "1"})
    assert speaks_first(MPIRUN | {"OMPI_COMM_WORLD_RANK": "0", "SLURM_PROCID": "1"}), "not nested"
    assert speaks_first(HOROVODRUN | {"HOROVOD_RANK": "0", "SLURM_STEP_NUM_TASKS": "abc"}), "reported when joining"


@each(
    ("environ", "requested"),
    [
        ({}, 1),
        (SRUN, 4),
        (BATCH_STEP, 8),
        # `srun -n 2` in a job of 2 nodes with --ntasks-per-node=2
        (INSIDE_SRUN | {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NUM_NODES": "2"}, 4),
        # a rank of mpirun on another node: the step of mpirun's daemons
        ({"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_NUM_NODES": "2"}, 2),
        (BATCH_STEP | {"HVD_BERT_IN_SWEEP": "1"}, 1),
    ],
)
def test_tasks_that_the_job_requested(environ, requested):
    assert requested_tasks(environ) == requested


@each(
    ("size", "environ", "seconds"),
    [
        (None, {}, None),
        (7, {}, None),  # Horovod's own
        (32, {}, "128"),
        (64, {"HOROVOD_GLOO_TIMEOUT_SECONDS": "20"}, "20"),
        (64, {"HOROVOD_ELASTIC": "1"}, None),
    ],
)
def test_large_worlds_have_longer_to_start_over_gloo(size, environ, seconds):
    extend_gloo_timeout(Launcher("horovodrun", size, 0), environ)
    assert environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS") == seconds
