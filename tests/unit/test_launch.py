"""Variables of launchers and schedulers decide launcher, world, device, threads, job and requeue."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import pytest
from refusals import refused

from hvd_bert.distributed import devices, events, launch, mpi, signals, slurm
from hvd_bert.distributed.launch import Launcher, LaunchError, find_launcher
from hvd_bert.distributed.launchers import BY_TORCH, LAUNCHERS, Allocation, LauncherRow
from hvd_bert.distributed.world import World
from hvd_bert.tools.runs.launching import Launching, Machine, Point, host_slots
from hvd_bert.training import start

# The variables that each launcher sets for rank 3 of 4.
HOROVODRUN = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_CONTROLLER": "gloo"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
FLUX = {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4"}
PALS = {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"}
TORCHS = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a100-01", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
# Job scripts and their mpirun see the batch step's variables: task 0, although the job has 8 tasks.
BATCH_STEP = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "17"}
INSIDE_SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}
NESTED = HOROVODRUN | SRUN | {"HOROVOD_RANK": "0", "SLURM_PROCID": "0"}
MANY = HOROVODRUN | TORCHS | {"WORLD_SIZE": "8"}
TWO_BY_TWO = {"SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NUM_NODES": "2"}
THREADS = ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK")
NO_HOSTS = ("a..b", "a" * 64)


def found(environ):
    launcher = find_launcher({"PATH": "/bin", **environ})
    return launcher.name, launcher.size, launcher.rank


def checked(environ):
    return launch.checked_launcher(environ).name


def for_launcher(function, *more):
    """Turn a function of launcher and environment into a function of the environment alone."""
    return lambda environ: function(find_launcher(environ), environ, *more)


def nested_below(*programs):
    return for_launcher(launch.is_nested, lambda: programs)


def sees(size):
    return lambda environ: mpi.check_size(find_launcher(environ), size, environ)


def loads(library):
    return for_launcher(mpi.check_library, library)


def threads(environ):
    return devices.choose_threads(environ, share=8)


@pytest.mark.parametrize(
    ("decide", "environ", "expected"),
    [
        (found, HOROVODRUN | SRUN, ("horovodrun", 4, 3)),
        (found, TORCHRUN | SRUN, ("torchrun", 4, 3)),
        (found, TORCHS | SRUN, ("srun", 4, 3)),  # the job script exports torch's variables
        (found, TORCHS | INSIDE_SRUN, (BY_TORCH, 4, 3)),  # one srun step per node
        (found, TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, ("torchrun", 1, 0)),
        # mpirun in a batch job, and in a step of srun --mpi=pmi2
        (found, MPIRUN | BATCH_STEP, ("mpirun", 4, 3)),
        (found, MPIRUN | {"PMI_RANK": "0", "PMI_SIZE": "1"}, ("mpirun", 4, 3)),
        (found, {"MVP_COMM_WORLD_RANK": "3", "MVP_COMM_WORLD_SIZE": "4"}, ("mpirun", 4, 3)),  # MVAPICH 4
        (found, HYDRA, ("mpirun", 4, 3)),
        (found, {"JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "4"}, ("jsrun", 4, 3)),
        (found, FLUX | SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, ("flux", 4, 3)),  # srun started Flux
        (found, PALS, ("MPI", None, 3)),  # PALS does not set the world size
        (found, BATCH_STEP, ("none", None, None)),
        (found, {"HOROVOD_SIZE": "4", "HOROVOD_LOG_LEVEL": "info"}, ("none", None, None)),
        (found, TORCHS | {"RANK": "2", "WORLD_SIZE": "2"}, {"RANK=2", "WORLD_SIZE=2"}),
        (for_launcher(launch.other_sizes), MANY | {"OMPI_COMM_WORLD_SIZE": "1"}, {"WORLD_SIZE": "8"}),
        # The launcher, if no rule refuses the variables
        (checked, TORCHS | SRUN, "srun"),  # both have size 4
        (checked, {"WORLD_SIZE": "4"}, "none"),  # ignored with a warning: job scripts export it
        (checked, {"RANK": "0"}, "none"),
        # A world of one process, in a Slurm step that runs the daemons of all nodes
        (checked, SRUN | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, "mpirun"),
        (checked, SRUN | {"FLUX_JOB_SIZE": "1", "FLUX_TASK_RANK": "0"}, "flux"),
        # Whether each srun task starts its own launcher, and which process reports errors
        (nested_below("slurmstepd"), SRUN, False),
        (nested_below("sshd"), HOROVODRUN | SRUN, True),  # horovodrun exports its environment to all ranks
        (nested_below("horovodrun"), HOROVODRUN | INSIDE_SRUN, False),
        (nested_below("mpirun", "slurmstepd"), MPIRUN | SRUN, True),
        (nested_below("mpirun", "bash"), MPIRUN | SRUN | {"SLURM_PTY_PORT": "40001"}, False),  # srun --pty bash
        (nested_below("orted", "slurmstepd"), MPIRUN | SRUN, False),  # mpirun starts its daemons by srun
        (launch.speaks_first, NESTED, True),
        (launch.speaks_for_host, TORCHRUN | {"LOCAL_RANK": "0"}, True),
        (launch.speaks_for_host, TORCHRUN | {"LOCAL_RANK": "1"}, False),
        (launch.speaks_for_host, {"RANK": "1", "WORLD_SIZE": "2"}, True),  # started by hand, without a local rank
        (launch.speaks_first, NESTED | {"SLURM_PROCID": "1"}, False),
        (launch.speaks_first, NESTED | {"HOROVOD_RANK": "1"}, False),
        (launch.speaks_first, MPIRUN | {"OMPI_COMM_WORLD_RANK": "0", "SLURM_PROCID": "1"}, True),  # not nested
        (launch.speaks_first, HOROVODRUN | {"HOROVOD_RANK": "0", "SLURM_STEP_NUM_TASKS": "abc"}, True),
        (sees(1), PALS, {"PALS_RANKID", "--strategy none"}),
        # Invalid host names
        *((host_slots, name, {"-H", name}) for name in NO_HOSTS),
        # Number of requested tasks per job
        (slurm.requested_tasks, {}, 1),
        (slurm.requested_tasks, BATCH_STEP, 8),
        (slurm.requested_tasks, INSIDE_SRUN | {"SLURM_NTASKS": "2"} | TWO_BY_TWO, 4),  # `srun -n 2` in the job
        (slurm.requested_tasks, {"SLURM_NTASKS": "1"} | TWO_BY_TWO, 4),  # in the step of mpirun's daemons
        (slurm.requested_tasks, {"SLURM_JOB_NUM_NODES": "2"}, 2),  # sbatch --nodes=2 alone
        (slurm.requested_tasks, BATCH_STEP | {slurm.IN_SWEEP: "1"}, 1),
        (threads, {"OMP_NUM_THREADS": "3,1"}, 3),
        *((threads, dict.fromkeys(THREADS, odd), 8) for odd in ("many", "0", "-1", "²", "1000000")),
        (threads, {"SLURM_CPUS_PER_TASK": "4"}, 4),
        (threads, {"SLURM_CPUS_PER_TASK": "32"}, 8),
        (threads, {"OMP_NUM_THREADS": "16", "SLURM_CPUS_PER_TASK": "4"}, 16),
    ],
)
def test_decision(decide, environ, expected):
    """`expected`: the value returned, or a set of words that the error message contains."""
    with refused(*expected) if isinstance(expected, set) else nullcontext():
        assert decide(environ) == expected


@pytest.mark.parametrize(
    ("rule", "environ", "named"),
    [
        ("a launcher in each task", NESTED, ["srun's 4 tasks", "horovodrun", "4 ranks"]),
        ("no address", TORCHS | {"MASTER_ADDR": ""}, ["RANK=3", "WORLD_SIZE=4", "MASTER_ADDR"]),
        ("two worlds", TORCHS | SRUN | {"WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "4 tasks"]),
        ("a larger world", {"OMPI_COMM_WORLD_SIZE": "4"}, ["OMPI_COMM_WORLD_SIZE=4"]),
        ("a larger world", TORCHRUN | SRUN | {"RANK": "0", "WORLD_SIZE": "1"}, ["SLURM_STEP_NUM_TASKS=4"]),
        ("a rank alone", {"RANK": "0", "MASTER_ADDR": "a100-01"}, ["RANK=0", "WORLD_SIZE"]),
        ("a rank alone", {"RANK": "1"}, ["RANK=1", "WORLD_SIZE"]),
    ],
)
def test_rule_on_variables_that_make_no_world(rule, environ, named):
    launcher = find_launcher(environ)
    assert [name for name, each in launch.RULES.items() if each.when(launcher, environ)] == [rule]
    with refused(*named, error=launch.RULES[rule].error):
        launch.checked_launcher(environ)


def test_row_of_a_launcher(monkeypatch):
    """A launcher's row alone decides how ranks are found, watched and connected, and how the tools start them."""

    def command(start):
        return ["prterun", "-n", str(start.ranks), *start.extra, *start.train]

    row = LauncherRow((("PRTE_SIZE", "PRTE_RANK"),), by_mpi=True, is_watched=True, spans_job=True, command=command)
    monkeypatch.setitem(LAUNCHERS, "prterun", row)
    launcher = find_launcher({"PRTE_SIZE": "4", "PRTE_RANK": "3"})
    assert launcher == Launcher("prterun", 4, 3)
    assert not launcher.has_store
    watched = Queue()
    monkeypatch.setattr(signals, "_stop_when_cut", watched.put)
    for other in (find_launcher(SRUN), launcher):
        signals.watch_launcher(other.row.is_watched)
    assert watched.get(timeout=10) == os.getppid() and watched.empty()
    started, point = Launching("prterun", ("-v",), None, Machine(8, 1, Allocation(2, 2, 1))), Point("ddp", 4)
    assert started.command(point, ["--bf16"], {})[:4] == ["prterun", "-n", "4", "-v"]
    assert started.obstacle(point).startswith("2 ranks per node, but 1 GPUs")


# The start of each MPI library's version text
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11"
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25 20:45:26 UTC 2026\n"
INTEL = "Intel(R) MPI Library 2021.14 for Linux* OS\n"


@pytest.mark.parametrize(
    ("check", "environ", "named"),
    [
        (for_launcher(slurm.check_tasks), BATCH_STEP, ["8 tasks", "srun", "--strategy none"]),
        (sees(4), SRUN, []),
        (sees(1), SRUN, ["srun started 4", "world of 1", "srun --mpi=pmix", "--strategy ddp"]),
        (sees(1), HOROVODRUN, ["horovodrun started 4", "world of 1", "env/setup.sh"]),
        (sees(4), PALS, []),
        (loads(OPEN_MPI), MPIRUN, []),
        (loads(MPICH), SRUN, []),
        (loads(OPEN_MPI), INSIDE_SRUN, []),
        (loads(OPEN_MPI), SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"}, []),  # --mpi=pmi2: works with any MPI
        (loads(OPEN_MPI), SRUN, ["`srun --mpi=pmix`"]),
        (loads(INTEL), MPIRUN, ["mpirun of Open MPI", "Intel(R) MPI Library 2021.14", "env/setup.sh"]),
    ],
)
def test_mistakes_that_all_processes_find(check, environ, named):
    with refused(*named, error=LaunchError) if named else nullcontext():
        check(environ)


OF_SLURM = ["SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_NUM_NODES"]


@pytest.mark.parametrize("value", ["abc", "", "-1", "1.5", "٣", "9" * 5000])
@pytest.mark.parametrize(
    ("environ", "name"),
    [(HOROVODRUN, "HOROVOD_SIZE"), (TORCHRUN, "RANK"), (PALS, "PALS_RANKID"), *((SRUN, name) for name in OF_SLURM)],
)
def test_variable_that_is_no_number(environ, name, value):
    with refused(name, value[:40]):
        find_launcher(environ | {name: value})
        slurm.requested_tasks(environ | {name: value})


def test_warning_of_a_process_that_is_alone_by_mistake():
    warning = for_launcher(launch.world_size_warning)
    assert "WORLD_SIZE=4" in warning({"WORLD_SIZE": "4"})
    assert not any(map(warning, ({"WORLD_SIZE": "1"}, {"WORLD_SIZE": ""}, TORCHRUN)))


def test_choose_device():
    assert devices.choose_device(0, 2, 4) == "cpu"
    assert devices.choose_device(1, 2, 4) == "cuda:0"  # each rank sees its own GPU; check_devices refuses shared GPUs
    assert devices.choose_device(2, 1, 4) == "cuda:1"
    with refused("4 ranks", "2 GPUs"):
        devices.choose_device(2, 2, 4)


def rank_infos(*found: tuple[str, str | None]) -> list[devices.RankInfo]:
    cores = frozenset({0})
    return [devices.RankInfo(rank, host, 0, "device", gpu, cores) for rank, (host, gpu) in enumerate(found)]


def test_ranks_may_share_cpus_but_no_gpu():
    devices.check_devices(rank_infos(("a", None), ("a", None)))
    devices.check_devices(rank_infos(("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1")))
    with refused("3 ranks on b", "GPU-2"):
        devices.check_devices(rank_infos(("a", "GPU-2"), *[("b", "GPU-2")] * 3, ("b", "GPU-1")))


def test_mig_instances_have_the_address_of_their_gpu():
    name, address = "NVIDIA A100-SXM4-40GB", {"pci_domain_id": 0, "pci_device_id": 0}
    gpus = [("MIG 3g.20gb", "MIG-1", 7), ("MIG 3g.20gb", "MIG-2", 7), ("MIG 3g.20gb", "MIG-3", 0xAF), ("", "GPU-1", 7)]
    first, second, other, whole = (
        devices.physical_id(SimpleNamespace(name=f"{name} {mig}", uuid=uuid, pci_bus_id=bus, **address))
        for mig, uuid, bus in gpus
    )
    assert first == second == "PCI 0000:07:00" != other and whole == "GPU-1"


@pytest.mark.parametrize(
    ("allocated", "limit", "threads"),
    [
        ([range(2)] * 4, None, [1] * 4),  # at least 1 thread
        ([range(0, 4), range(0, 4), range(4, 10)], None, [2, 2, 6]),  # the launcher binds ranks to cores
        ([range(64)] * 2, 100.0, [32, 32]),
        ([range(64)] * 2, 9.0, [4, 4]),  # a container's CPU limit
    ],
)
def test_share_cores(allocated, limit, threads):
    sets = [frozenset(cores) for cores in allocated]
    assert [devices.share_cores(mine, sets, limit) for mine in sets] == threads


@pytest.mark.parametrize(
    ("size", "environ", "seconds"),
    [(7, {}, None), (32, {}, "128"), (64, {launch.GLOO_TIMEOUT: "20"}, "20"), (64, {"HOROVOD_ELASTIC": "1"}, None)],
)
def test_large_worlds_get_more_time_to_start_over_gloo(size, environ, seconds):
    launch.extend_gloo_timeout(Launcher("horovodrun", size, 0), environ)
    assert environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS") == seconds


JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "mine"}
ARRAY = JOB | {"SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "3"}
SHOWN = """JobId=12 JobName=mine
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:01 TimeLimit=1-00:00:00 TimeMin=N/A
   Comment=TimeLimit=UNLIMITED Requeue=0
"""


def test_a_job_is_recorded_with_its_requests():
    variables = {"SLURM_NTASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "16", "SLURM_MEM_PER_NODE": "65536"}
    requests = {"tasks_per_node": "2", "cpus_per_task": "16", "memory_per_node": "65536"}
    assert slurm.find_job(JOB | variables) == {"id": "12", "name": "mine"} | requests


@pytest.fixture
def scontrol(monkeypatch, tmp_path):
    """Return `write(script)`, which makes a shell script named scontrol the only program on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def write(script: str) -> None:
        (tmp_path / "scontrol").write_bytes(f"#!/bin/sh\n{script}\n".encode("latin-1"))
        (tmp_path / "scontrol").chmod(0o755)

    return write


def shows(*change: str) -> str:
    return f"echo '{SHOWN.replace(*change)}'"


@pytest.mark.parametrize(
    ("script", "given", "reason"),
    [
        (shows("BatchFlag=1", "BatchFlag=0"), {}, "it is interactive"),
        (shows("RUNNING", "CANCELLED"), {}, "Slurm is ending it (CANCELLED)"),
        (shows("Requeue=1", "Requeue=0"), {}, "it does not allow it (sbatch --requeue does)"),
        (shows("1-00:00:00", "UNLIMITED"), {}, "it has no time limit"),
        (shows("", ""), {"mode": "no"}, "--requeue no"),
        (shows("", ""), {"progress": ""}, "this attempt made no progress, so request more time"),
        (shows("", ""), {"environ": JOB | {slurm.IN_SWEEP: "1"}}, ""),  # the sweep requeues the job
        ("echo 'requeue is disabled\nfor job 12, café' >&2; exit 1", {}, "requeue is disabled for job 12, caf\ufffd"),
        ("while :; do :; done", {}, "did not answer in 2.0 s"),
        ("", {}, "did not print its state"),
        ("kill -9 $$", {}, "did not print its state"),
    ],
)
def test_job_is_not_requeued(monkeypatch, scontrol, script, given, reason):
    monkeypatch.setattr(slurm, "_COMMAND_S", 2.0)
    scontrol(script)
    why = slurm.requeue(**{"environ": JOB, "mode": "auto", "progress": "step 8", "announce": print} | given)
    assert why == "" if not reason else why.startswith("Slurm job 12 is not requeued: ") and why.endswith(f"{reason}.")


def test_hosts_by_scontrol(scontrol):
    assert slurm.expand_hosts("n1,n2") == ["n1", "n2"]
    with refused("gpu[1-2]", socket.gethostname(), "scontrol show", "No such file", "torchrun"):
        slurm.expand_hosts("gpu[1-2]")
    scontrol("kill -9 $$")
    with refused("gpu[1-2]", "printed nothing"):
        slurm.expand_hosts("gpu[1-2]")
    scontrol("echo gpu1; echo gpu2")
    assert slurm.expand_hosts("gpu[1-2]") == ["gpu1", "gpu2"]


@pytest.mark.parametrize("field", ["JobName=", "Comment="])
@pytest.mark.parametrize(("environ", "name"), [(JOB, "12"), (ARRAY, "10_3")])
def test_job_is_requeued(scontrol, tmp_path, environ, name, field):
    """Requeue a job even if its name or comment contains text like other fields."""
    shown, log = SHOWN.replace(field, f"{field}café JobState=CANCELLED Requeue=0 "), tmp_path / "log"
    scontrol(f'echo "$*" >>{log}; if [ "$1" = show ]; then echo "{shown}"; fi')

    def announce(line):
        log.write_text(f"{log.read_text()}{line}\n")

    assert slurm.requeue(environ, "auto", "step 8", announce) is None
    announced = f"Slurm job {name} has a time limit: requeueing it after step 8."
    assert log.read_text().splitlines() == [f"show job {name}", announced, f"requeue {name}"]


def test_runs_of_a_requeued_program_are_found_in_their_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "FOLDERS_BEGUN", begun := set[Path]())
    for name, value in (JOB | {"SLURM_RESTART_COUNT": "1"}).items():
        monkeypatch.setenv(name, value)
    for name, job in (("1", "11"), ("2", "12"), ("3", "12")):
        Path("runs", name).mkdir(parents=True)
        events.begin(Path("runs", name), True, {"job": {"id": job}})
        events.end()
    with Path("runs", "2", events.NAME).open("ab") as file:
        file.write(b'[1]\n\xff\n{"event": "start", "job": {"id": "12"')  # damaged lines and a truncated line
    found = []
    for _ in range(3):
        found.append(start.earlier_attempt(None, World()))
        begun.add(Path(str(found[-1])))
    assert found == ["runs/2", "runs/3", None]
    assert start.earlier_attempt("runs/1", World()) is None
