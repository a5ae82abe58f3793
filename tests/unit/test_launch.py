"""Decisions from the launcher's and the scheduler's variables: world, device, threads, job, requeue."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from refusals import refused

from hvd_bert.distributed import events, slurm
from hvd_bert.distributed.devices import (
    RankInfo,
    check_devices,
    choose_device,
    choose_threads,
    physical_id,
    share_cores,
)
from hvd_bert.distributed.horovodrun import host_slots
from hvd_bert.distributed.launch import (
    Launcher,
    LaunchError,
    checked_launcher,
    extend_gloo_timeout,
    find_launcher,
    horovodrun_address,
    ignored,
    is_nested,
    note_on_one_process,
    platform_name,
    speaks_first,
)
from hvd_bert.distributed.mpi import check_mpi, check_pmi, check_size
from hvd_bert.distributed.slurm import check_tasks, requested_tasks
from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError
from hvd_bert.training import start

# Variables that the launchers set for rank 3 of 4.
HOROVODRUN = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_CONTROLLER": "gloo"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MVAPICH = {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4"}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
MVAPICH_4 = {"MVP_COMM_WORLD_RANK": "3", "MVP_COMM_WORLD_SIZE": "4"}
JSRUN = {"JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "4"}
FLUX = {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4"}
PALS = {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"}
TORCHS = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a100-01", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
# A job script, and mpirun inside it, see variables of the batch step: one task of a job of many.
BATCH_STEP = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "17"}
GLOO_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
INSIDE_SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (HOROVODRUN | SRUN, ("horovodrun", 4, 3)),
        (TORCHRUN | SRUN, ("torchrun", 4, 3)),
        (TORCHS | SRUN, ("srun", 4, 3)),  # a job script exports them for its ranks
        (TORCHS | INSIDE_SRUN, ("torch's variables", 4, 3)),  # one step per node
        (SRUN | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, ("mpirun", 1, 0)),  # mpirun's daemons
        (MPIRUN | BATCH_STEP, ("mpirun", 4, 3)),
        (MPIRUN | {"PMI_RANK": "0", "PMI_SIZE": "1"}, ("mpirun", 4, 3)),  # in a step of srun --mpi=pmi2
        (MVAPICH, ("mpirun", 4, 3)),
        (MVAPICH_4, ("mpirun", 4, 3)),
        (HYDRA, ("mpirun", 4, 3)),
        (JSRUN, ("jsrun", 4, 3)),
        (FLUX | SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, ("flux", 4, 3)),  # brokers by srun
        (PALS, ("MPI", None, 3)),  # it tells no size
        *(({rank: "3"}, ("MPI", None, 3)) for rank in ("PMI_ID", "ALPS_APP_PE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")),
        (BATCH_STEP, ("none", None, None)),
        ({"HOROVOD_SIZE": "4", "HOROVOD_LOG_LEVEL": "info"}, ("none", None, None)),
    ],
)
def test_find_launcher(environ, expected):
    assert find_launcher({"PATH": "/bin", **environ}) == Launcher(*expected)


# Variables that tell of several processes, but not how they find each other -> what the refusal names.
LOST = {
    "RANK MASTER_ADDR": ({"RANK": "0", "MASTER_ADDR": "a100-01"}, ["RANK=0", "WORLD_SIZE"]),
    "RANK above 0": ({"RANK": "1"}, ["RANK=1", "WORLD_SIZE"]),
    "an empty MASTER_ADDR": (TORCHS | {"MASTER_ADDR": ""}, ["RANK=3", "MASTER_ADDR"]),
    "rank 2 of 2": (TORCHS | {"RANK": "2", "WORLD_SIZE": "2"}, ["RANK=2", "WORLD_SIZE=2"]),
    "processes per pod": (TORCHS | {"PET_NPROC_PER_NODE": "2"}, ["PET_NPROC_PER_NODE=2", "torchrun"]),
    "torchrun's options": ({"PET_NNODES": "1:2", "PET_NPROC_PER_NODE": "auto"}, ["PET_NNODES=1:2", "torchrun"]),
    "TensorFlow's": ({"TF_CONFIG": '{"cluster": {"chief": ["a:1"], "worker": ["b:1"]}}'}, ["TF_CONFIG="]),
    "SageMaker's": ({"SM_HOSTS": '["algo-1", "algo-2"]'}, ["SM_HOSTS="]),
    "submitit's": ({"SUBMITIT_LOCAL_NTASKS": "2", "SUBMITIT_LOCAL_GLOBALID": "0"}, ["SUBMITIT_LOCAL_NTASKS=2"]),
    "Vertex AI's": ({"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a"], "workerpool1": ["b"]}}'}, ["CLUSTER_SPEC="]),
    "SkyPilot's": ({"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "0"}, ["SKYPILOT_NUM_NODES=2"]),
    "torch's in each task of srun": (TORCHS | SRUN | {"WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "4 tasks"]),
    "a size alone": ({"OMPI_COMM_WORLD_SIZE": "4"}, ["OMPI_COMM_WORLD_SIZE=4"]),
}


@pytest.mark.parametrize("case", LOST)
def test_processes_that_would_each_train_alone_are_refused(case):
    environ, named = LOST[case]
    with refused(*named):
        checked_launcher(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {"WORLD_SIZE": "4"},  # job scripts export it: a line says that it is ignored
        {"RANK": "0", "WORLD_SIZE": "1", "PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"},
        {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}', "SM_HOSTS": '["algo-1"]'},
        {"TF_CONFIG": "[" * 100_000},
        {"TF_CONFIG": '"chief"', "SM_HOSTS": "7 hosts", "CLUSTER_SPEC": '{"cluster": 3}', "RANK": ""},
    ],
)
def test_one_process_is_not_refused(environ):
    assert checked_launcher(environ).size in (None, 1)


def test_what_is_ignored_and_which_platform_started_the_ranks():
    environ = HOROVODRUN | TORCHS | {"WORLD_SIZE": "8", "OMPI_COMM_WORLD_SIZE": "1", "SM_HOSTS": '["algo-1"]'}
    assert ignored(find_launcher(environ), environ) == ["WORLD_SIZE"]
    assert checked_launcher(TORCHS | SRUN).name == "srun", "torch's variables are of the same ranks"
    kubeflow = TORCHS | {"PET_NNODES": "4"}
    assert platform_name(find_launcher(kubeflow), kubeflow) == "Kubeflow (torch's variables)"
    assert platform_name(find_launcher(HOROVODRUN | kubeflow), HOROVODRUN | kubeflow) == "horovodrun"


@pytest.mark.parametrize(("name", "hint"), [("srun", "srun --mpi=pmix"), ("horovodrun", "env/setup.sh")])
def test_horovods_size_is_the_launchers(name, hint):
    check_size(Launcher(name, 4, 0), 4, {})
    with refused(f"{name} started 4", "world of 1", hint):
        check_size(Launcher(name, 4, 0), 1, {})


@pytest.mark.parametrize("name", ["a..b", "a" * 64])
@pytest.mark.parametrize(
    ("source", "read"),
    [
        ("-H", host_slots),
        ("SLURM_STEP_NODELIST", slurm.expand_hosts),
        (GLOO_ADDRESS, lambda name: horovodrun_address({GLOO_ADDRESS: name, "HOROVOD_GLOO_RENDEZVOUS_PORT": "1"})),
    ],
)
def test_name_that_no_host_can_have(source, read, name):
    with refused(source, name):
        read(name)


def test_launcher_of_mpi_without_its_size():
    check_size(Launcher("MPI", None, 3), 4, PALS)
    with refused("PALS_RANKID", "--strategy none"):
        check_size(Launcher("MPI", None, 0), 1, PALS)


def test_srun_without_pmi_where_it_is_needed():
    check_pmi(Launcher("srun", 4, 0), {"PMI2_RANK": "1"}, "Open MPI v4.1.4")
    check_pmi(Launcher("srun", 1, 0), SRUN, "Open MPI v4.1.4")
    check_pmi(Launcher("srun", 4, 0), SRUN, "MPICH Version: 4.1")
    with refused("`srun --mpi=pmix`"):
        check_pmi(Launcher("srun", 4, 0), SRUN, "Open MPI v4.1.4, package: Debian OpenMPI")


# By `accelerate launch`
ONE_OF_ONE = {"ACCELERATE_USE_CPU": "True", "ACCELERATE_MIXED_PRECISION": "no"}  # --cpu
ONE_OF_TWO = ONE_OF_ONE | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # --cpu --num_processes 2


@pytest.mark.parametrize(
    ("environ", "named"), [(ONE_OF_TWO, ["--multi_gpu", "torchrun"]), ({"WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "RANK"])]
)
def test_note_on_a_process_that_is_alone_by_mistake(environ, named):
    note = note_on_one_process(find_launcher(environ), environ)
    assert note is not None and all(name in note for name in named)
    for other in (ONE_OF_ONE, TORCHRUN, {"WORLD_SIZE": "1"}):
        assert note_on_one_process(find_launcher(other), other) is None


# The first lines of what the libraries print
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11"
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25 20:45:26 UTC 2026\n"
INTEL = "Intel(R) MPI Library 2021.14 for Linux* OS\n"
SLURM_PMI = {"PMI_RANK": "3", "PMI_SIZE": "4"}  # srun --mpi=pmi2, which any MPI may support


@pytest.mark.parametrize(
    ("environ", "mpi", "named"),
    [
        (MPIRUN, MPICH, ("mpirun of Open MPI", "MPICH Version: 5.0.2")),
        (MPIRUN, INTEL, ("mpirun of Open MPI", "Intel(R) MPI Library 2021.14")),
        (HYDRA, OPEN_MPI, ("mpirun of MPICH", "Open MPI v5.0.11")),
    ],
)
def test_mpirun_of_another_mpi(environ, mpi, named):
    for fitting in ((MPIRUN, OPEN_MPI), (HYDRA, INTEL), (SLURM_PMI | SRUN, OPEN_MPI)):
        check_mpi(*fitting)
    with refused(*named, "env/setup.sh", error=LaunchError):
        check_mpi(environ, mpi)


def test_choose_device():
    assert choose_device(0, 2, 4) == "cpu"
    assert choose_device(1, 2, 4) == "cuda:0"  # each its own; check_devices refuses a shared one
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


def test_mig_instances_of_one_gpu_are_refused():
    name = "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    first, second, other = (
        physical_id(SimpleNamespace(name=name, uuid=uuid, pci_domain_id=0, pci_bus_id=bus, pci_device_id=0))
        for uuid, bus in (("MIG-1", 7), ("MIG-2", 7), ("MIG-3", 0xAF))
    )
    check_devices(rank_infos(("a", first), ("a", other), ("b", second)))
    with refused("2 ranks on a", "0000:07:00", "MIG"):
        check_devices(rank_infos(("a", first), ("a", second)))
    whole = SimpleNamespace(name="NVIDIA A100-SXM4-40GB", uuid="GPU-1", pci_bus_id=7)
    assert physical_id(whole) == "GPU-1"


@pytest.mark.parametrize(
    ("allocated", "limit", "threads"),
    [
        ([range(2)] * 4, None, [1] * 4),  # never 0
        ([range(0, 4), range(0, 4), range(4, 10)], None, [2, 2, 6]),  # bound by the launcher
        ([range(64)] * 2, 100.0, [32, 32]),
        ([range(64)] * 2, 9.0, [4, 4]),  # of a container
    ],
)
def test_share_cores(allocated, limit, threads):
    sets = [frozenset(cores) for cores in allocated]
    assert [share_cores(mine, sets, limit) for mine in sets] == threads


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({"OMP_NUM_THREADS": "3,1"}, 3),
        *(({"OMP_NUM_THREADS": odd, "SLURM_CPUS_PER_TASK": odd}, 8) for odd in ("many", "0", "-1", "²", "1000000")),
        ({"SLURM_CPUS_PER_TASK": "4"}, 4),
        ({"SLURM_CPUS_PER_TASK": "32"}, 8),
        ({"OMP_NUM_THREADS": "16", "SLURM_CPUS_PER_TASK": "4"}, 16),
    ],
)
def test_threads_of_a_rank(environ, threads):
    assert choose_threads(environ, share=8) == threads


OF_SLURM = ["SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES"]


@pytest.mark.parametrize("value", ["abc", "", "-1", "1.5", "٣", "9" * 5000])
@pytest.mark.parametrize(
    ("environ", "name"),
    [(HOROVODRUN, "HOROVOD_SIZE"), (TORCHRUN, "RANK"), (PALS, "PALS_RANKID"), *((SRUN, name) for name in OF_SLURM)],
)
def test_variable_that_is_no_number(environ, name, value):
    with refused(name, value[:40]):
        find_launcher(environ | {name: value})
        requested_tasks(environ | {name: value})


@pytest.mark.parametrize(
    ("environ", "programs", "nested"),
    [
        (SRUN, ["slurmstepd"], False),
        (HOROVODRUN | SRUN, ["sshd"], True),  # horovodrun exports its environment to all ranks
        (HOROVODRUN | INSIDE_SRUN, ["horovodrun"], False),
        (MPIRUN | SRUN, ["mpirun", "slurmstepd"], True),
        (MPIRUN | SRUN | {"SLURM_PTY_PORT": "40001"}, ["mpirun", "bash", "slurmstepd"], False),  # srun --pty bash
        (MPIRUN | SRUN, ["orted", "slurmstepd"], False),  # Slurm's variables are those of mpirun's daemon
    ],
)
def test_launcher_in_each_task_of_srun(environ, programs, nested):
    assert is_nested(find_launcher(environ), environ, lambda: programs) is nested


def test_launchers_in_tasks_of_srun_report_it_once():
    first = HOROVODRUN | SRUN | {"HOROVOD_RANK": "0", "SLURM_PROCID": "0"}
    with refused("srun", "horovodrun", "4 ranks", error=LaunchError):
        checked_launcher(first)
    assert speaks_first(first)
    assert not speaks_first(first | {"SLURM_PROCID": "1"})
    assert not speaks_first(first | {"HOROVOD_RANK": "1"})
    assert speaks_first(MPIRUN | {"OMPI_COMM_WORLD_RANK": "0", "SLURM_PROCID": "1"}), "not nested"
    assert speaks_first(HOROVODRUN | {"HOROVOD_RANK": "0", "SLURM_STEP_NUM_TASKS": "abc"}), "reported when joining"


@pytest.mark.parametrize(
    ("environ", "requested"),
    [
        ({}, 1),
        (BATCH_STEP, 8),
        # `srun -n 2` in a job of 2 nodes with --ntasks-per-node=2
        (INSIDE_SRUN | {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NUM_NODES": "2"}, 4),
        # a rank of mpirun on another node: the step of mpirun's daemons
        ({"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_NUM_NODES": "2"}, 2),
        ({"SLURM_NNODES": "2"}, 2),  # sbatch --nodes=2 alone
        (BATCH_STEP | {"HVD_BERT_IN_SWEEP": "1"}, 1),
    ],
)
def test_tasks_that_the_job_requested(environ, requested):
    assert requested_tasks(environ) == requested


def test_process_without_launcher_in_a_job_of_several_tasks():
    with refused("8 tasks", "srun", "--strategy none", error=LaunchError):
        check_tasks(find_launcher(BATCH_STEP), BATCH_STEP)


@pytest.mark.parametrize(
    ("size", "environ", "seconds"),
    [
        (7, {}, None),  # Horovod's own
        (32, {}, "128"),
        (64, {"HOROVOD_GLOO_TIMEOUT_SECONDS": "20"}, "20"),
        (64, {"HOROVOD_ELASTIC": "1"}, None),
    ],
)
def test_large_worlds_have_longer_to_start_over_gloo(size, environ, seconds):
    extend_gloo_timeout(Launcher("horovodrun", size, 0), environ)
    assert environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS") == seconds


JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "mine"}
ARRAY = JOB | {"SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "3"}
SHOWN = """JobId=12 JobName=mine
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:01 TimeLimit=1-00:00:00 TimeMin=N/A
   Comment=TimeLimit=UNLIMITED Requeue=0
"""


def test_a_job_is_recorded_with_what_it_requested():
    asked = {"SLURM_NTASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "16", "SLURM_MEM_PER_NODE": "65536"}
    requests = {"tasks_per_node": "2", "cpus_per_task": "16", "memory_per_node": "65536"}
    assert slurm.find_job(JOB | asked) == {"id": "12", "name": "mine"} | requests


def test_job_of_an_array_is_requeued(monkeypatch):
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(slurm, "_scontrol", lambda *words: calls.append(words) or SHOWN)
    assert slurm.requeue(ARRAY, "auto", "step 8", lambda text: calls.append((text,))) is None
    announced = "Slurm job 10_3 has a time limit: requeueing it after step 8."
    assert calls == [("show", "job", "10_3"), (announced,), ("requeue", "10_3")]


@pytest.mark.parametrize(
    ("environ", "mode", "progress", "shown", "reason"),
    [
        (JOB, "auto", "step 8", ("BatchFlag=1", "BatchFlag=0"), "it is interactive"),
        (JOB, "auto", "step 8", ("RUNNING", "CANCELLED"), "Slurm is ending it (CANCELLED)"),
        (JOB, "auto", "step 8", ("Requeue=1", "Requeue=0"), "it does not allow it (sbatch --requeue does)"),
        (JOB, "auto", "step 8", ("1-00:00:00", "UNLIMITED"), "it has no time limit"),
        (JOB, "no", "step 8", ("", ""), "--requeue no"),
        (JOB, "auto", "", ("", ""), "this attempt made no progress, so request more time"),
        (JOB | {slurm.IN_SWEEP: "1"}, "auto", "step 8", ("", ""), None),  # the sweep requeues
    ],
)
def test_job_is_not_requeued(monkeypatch, environ, mode, progress, shown, reason):
    monkeypatch.setattr(slurm, "_scontrol", lambda *words: {"show": SHOWN.replace(*shown)}[words[0]])
    why = f"Slurm job 12 is not requeued: {reason}." if reason else ""
    assert slurm.requeue(environ, mode, progress, print) == why


@pytest.fixture
def scontrol(monkeypatch, tmp_path):
    """scontrol(script) -> the only program on PATH, as a shell script."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def write(script: str) -> None:
        (tmp_path / "scontrol").write_bytes(f"#!/bin/sh\n{script}\n".encode("latin-1"))
        (tmp_path / "scontrol").chmod(0o755)

    return write


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "echo 'requeue is disabled\nfor job 12, café' >&2; exit 1",
            "requeue is disabled for job 12, caf\ufffd",
        ),
        ("while :; do :; done", "did not answer in 0.5 s"),
        ("", "did not print its state"),
        ("kill -9 $$", "did not print its state"),
    ],
)
def test_scontrol_fails(monkeypatch, scontrol, script, reason):
    monkeypatch.setattr(slurm, "_COMMAND_S", 0.5)
    with pytest.raises(UserError, match=r"`scontrol requeue` failed: .*No such file"):
        slurm._scontrol("requeue", "12")
    scontrol(script)
    why_not = slurm.requeue(JOB, "auto", "step 8", print)
    assert why_not.startswith("Slurm job 12 is not requeued: `scontrol show") and why_not.endswith(f"{reason}.")
    with refused("gpu[1-2]", "scontrol show"):
        slurm.expand_hosts("gpu[1-2]")


def test_hosts_by_scontrol(scontrol):
    scontrol("echo gpu1; echo gpu2")
    assert slurm.expand_hosts("gpu[1-2]") == ["gpu1", "gpu2"]
    scontrol("echo café")
    with refused("SLURM_STEP_NODELIST", "caf"):
        slurm.expand_hosts("gpu[1-2]")


@pytest.mark.parametrize("field", ["JobName=", "Comment="])
@pytest.mark.parametrize("text", ["café", "x JobState=CANCELLED Requeue=0"])
def test_texts_of_a_job_do_not_keep_it_from_its_requeue(scontrol, tmp_path, field, text):
    shown = SHOWN.replace(field, f"{field}{text} ")
    scontrol(f'[ "$1 $2" = "show job" ] && echo "{shown}" || echo "$*" >>{tmp_path}/called')
    assert slurm.requeue(JOB, "auto", "step 8", print) is None
    assert (tmp_path / "called").read_text() == "requeue 12\n"


def test_runs_of_a_requeued_program_are_found_in_their_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "FOLDERS_BEGUN", begun := set[Path]())
    for name, value in (JOB | {"SLURM_RESTART_COUNT": "1"}).items():
        monkeypatch.setenv(name, value)
    for name, job in (("1", "11"), ("2", "12"), ("3", "12")):
        Path("runs", name).mkdir(parents=True)
        events.begin(Path("runs", name), True, {"job": {"id": job}})
        events.end()
    found = []
    for _ in range(3):
        found.append(start.earlier_attempt(None, World()))
        begun.add(Path(str(found[-1])))
    assert found == ["runs/2", "runs/3", None]
    assert start.earlier_attempt("runs/1", World()) is None
