"""The doctor's decisions, from made-up facts, and its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hvd_bert import machine
from hvd_bert.distributed.launch import Launcher, VariableError, WorldsOfOne
from hvd_bert.distributed.world import CollectiveError, RankInfo
from hvd_bert.errors import UserError
from hvd_bert.monitoring.usage import NvmlError
from hvd_bert.tools.doctor import __main__ as command
from hvd_bert.tools.doctor import checks, collective, diagnosis, probes
from hvd_bert.tools.doctor.checks import (
    cuda_line,
    driver_line,
    folder_line,
    horovod_lines,
    inputs_line,
    memory_line,
    mpi_line,
    nccl_line,
    packages_line,
    python_line,
    slurm_lines,
    torch_line,
)
from hvd_bert.tools.doctor.collective import Timing
from hvd_bert.tools.doctor.diagnosis import Rank, ranges, rank_lines, ranks_table
from hvd_bert.tools.doctor.probes import Gpus, HorovodBuild, MpiLibrary, ProbeError, Slurm, mpi_kinds, mpi_version
from hvd_bert.tools.doctor.report import FAILURE, OK, WARNING, Line, Report, isolated, merged

NO_DRIVER = NvmlError("NVML Shared Library Not Found")
TWO_GPUS = Gpus("570.86", "12.8", ("A100", "A100"))
BUILD = HorovodBuild("0.28.1", mpi=True, gloo=True, nccl=False, libraries=("/mpi/lib/libmpi.so.40",))
BROKEN = ProbeError("`python -c ...` was killed by signal 11")
LIBRARY = MpiLibrary("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4", ("/mpi/lib/libmpi.so.40",))
OPEN_MPI = ("/usr/bin/mpirun", "mpirun (Open MPI) 4.1.4\n\nReport bugs to ...")
MPICH = ("/opt/bin/mpirun", "HYDRA build details:\n    Version:    4.0.2\n    Release Date: ...")
SLURM = Slurm("slurm-wlm 22.05.8", ("pmi2", "pmix", "pmix_v4"))


# --- one host --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "status"), [((3, 9, 18), FAILURE), ((3, 10, 0), OK), ((3, 13, 1), OK)], ids=lambda value: str(value)
)
def test_python(version, status):
    assert python_line(version, "/bin/python").status == status


@pytest.mark.parametrize(("version", "status"), [("2.5.1+cu124", FAILURE), ("2.6.0", OK), ("2.13.0+cpu", OK)])
def test_torch(version, status):
    assert torch_line(version).status == status


@pytest.mark.parametrize(
    ("torch_cuda", "visible", "gpus", "hidden", "status", "words"),
    [
        (None, 0, NO_DRIVER, False, OK, "no GPU on this host"),
        ("12.8", 0, NO_DRIVER, False, OK, "no GPU on this host"),
        ("12.8", 2, TWO_GPUS, False, OK, "2 GPU(s): A100, A100"),
        ("12.8", 2, NO_DRIVER, False, OK, "2 GPU(s): names unknown"),
        (None, 0, TWO_GPUS, False, WARNING, "built for CPUs only"),
        ("12.8", 0, TWO_GPUS, True, WARNING, "CUDA_VISIBLE_DEVICES"),
        (
            "13.0",
            0,
            TWO_GPUS,
            False,
            FAILURE,
            "built for CUDA 13.0, cannot use them; the driver supports CUDA up to 12.8",
        ),
    ],
)
def test_cuda(torch_cuda, visible, gpus, hidden, status, words):
    line = cuda_line(torch_cuda, visible, gpus, hidden)
    assert (line.status, words in line.found) == (status, True), line
    assert bool(line.hint) or hidden or status == OK


@pytest.mark.parametrize(
    ("requirements", "status", "found"),
    [
        ("torch==2.13  # any\nnumpy==1; python_version < '3.11'\nno_such-one==1\n# other\n", FAILURE, ": no_such-one"),
        ("torch==2.13.0\nnvidia-ml-py==13\n", WARNING, "nvidia-ml-py"),
        ("torch==2.13.0\nmpi4py==4\nhorovod[pytorch]==0.28.1\n", OK, ""),
        (None, WARNING, "not checked"),
    ],
)
def test_packages(tmp_path, monkeypatch, requirements, status, found):
    monkeypatch.setattr(checks, "version_of", lambda name: "1" if name in ("torch", "numpy") else None)
    if requirements is not None:
        (tmp_path / "requirements.txt").write_text(requirements)
    line = packages_line(tmp_path / "requirements.txt")
    assert line.status == status and found in line.found


@pytest.mark.parametrize("module", ["torch", "yaml"])
def test_without_a_package_that_the_doctor_needs(module):
    program = (
        f"import sys; sys.modules['{module}'] = None; from hvd_bert.tools.doctor.__main__ import main; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", program, "--json"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, "")
    (line,) = json.loads(done.stdout)["checks"]
    assert (line["name"], line["status"]) == ("Packages", FAILURE) and module in line["found"]


def test_driver():
    assert "570.86, supports CUDA up to 12.8" in driver_line(TWO_GPUS).found
    assert "Library Not Found" in driver_line(NO_DRIVER).found


@pytest.mark.parametrize(
    ("build", "status"),
    [
        (BUILD, OK),
        (replace(BUILD, gloo=False), WARNING),
        (replace(BUILD, gloo=False, mpi=False), FAILURE),
        (BROKEN, FAILURE),
    ],
    ids=str,
)
def test_horovod(build, status):
    (line,) = horovod_lines(build)
    assert line.status == status
    assert (status == OK) == (line.hint == "")


TWO_NCCLS = replace(BUILD, nccl=True, libraries=("/a/libnccl.so.2", "/b/libnccl.so.2"))


@pytest.mark.parametrize(
    ("build", "gpus", "status"),
    [
        (BUILD, 0, OK),
        (BUILD, 2, FAILURE),
        (replace(BUILD, nccl=True), 2, OK),
        (TWO_NCCLS, 2, WARNING),
        (BROKEN, 2, WARNING),  # Horovod's own line is the failure
    ],
    ids=str,
)
def test_nccl(build, gpus, status):
    line = nccl_line(build, gpus, "2.28.9")
    assert line.status == status
    assert "--with-nccl" in line.hint or status != FAILURE


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (OPEN_MPI[1], ("Open MPI", "4.1.4")),
        (LIBRARY.version, ("Open MPI", "4.1.4")),
        ("mpirun (Open MPI) 5.0.5rc1", ("Open MPI", "5.0.5rc1")),
        (MPICH[1], ("MPICH", "4.0.2")),
        ("MPICH Version: 4.0.2 MPICH Release date: Thu Apr 7", ("MPICH", "4.0.2")),
        ("Intel(R) MPI Library 2021.9 for Linux* OS", ("Intel MPI", "2021.9")),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307", ("Intel MPI", "2021.9")),
        ("MVAPICH2 Version : 2.3.7 MVAPICH2 Release date", ("MVAPICH", "2.3.7")),
        ("something else 1.2", None),
    ],
)
def test_mpi_version(text, version):
    assert mpi_version(text) == version


OTHER_LIBRARY = replace(LIBRARY, libraries=("/other/libmpi.so.12",))


@pytest.mark.parametrize(
    ("build", "library", "mpirun", "by_srun", "status", "words"),
    [
        (BUILD, LIBRARY, OPEN_MPI, False, OK, "Open MPI 4.1.4, the same in"),
        (BUILD, LIBRARY, MPICH, False, FAILURE, "/opt/bin/mpirun is MPICH 4.0.2"),
        (BUILD, LIBRARY, MPICH, True, WARNING, "/opt/bin/mpirun is MPICH 4.0.2"),
        (BUILD, LIBRARY, (OPEN_MPI[0], "mpirun (Open MPI) 5.0.5"), False, FAILURE, "is Open MPI 5.0.5"),
        (BUILD, LIBRARY, None, False, WARNING, "mpirun is not on PATH"),
        (BUILD, LIBRARY, None, True, OK, "mpirun is not on PATH"),
        (BUILD, LIBRARY, ("/bin/mpirun", "unknown"), False, OK, "the same in"),
        (BUILD, OTHER_LIBRARY, OPEN_MPI, False, FAILURE, "two MPIs in one process"),
        (BUILD, BROKEN, OPEN_MPI, False, FAILURE, "mpi4py cannot be used"),
        (BROKEN, LIBRARY, OPEN_MPI, False, OK, "Open MPI 4.1.4"),
        (replace(BUILD, mpi=False), BROKEN, None, False, OK, "--gloo"),
    ],
)
def test_mpi(build, library, mpirun, by_srun, status, words):
    line = mpi_line(build, library, mpirun, by_srun)
    assert (line.status, words in line.found) == (status, True), line
    assert line.hint or status != FAILURE


@pytest.mark.parametrize(
    ("listed", "kinds"),
    [
        (
            "MPI plugin types are...\n\tcray_shasta\n\tnone\n\tpmi2\n\tpmix\n"
            "specific pmix plugin versions available: pmix_v4\n",
            ("cray_shasta", "pmi2", "pmix", "pmix_v4"),
        ),
        ("srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: openmpi\n", ("pmi2", "openmpi")),
        ("MPI plugin types are...\n\tnone\n", ()),
    ],
)
def test_mpi_kinds(listed, kinds):
    assert mpi_kinds(listed) == kinds


@pytest.mark.parametrize(
    ("slurm", "build", "statuses", "words"),
    [
        (None, BUILD, [OK, OK], "not needed"),
        (SLURM, BUILD, [OK, OK], "`srun --mpi=pmix`"),
        (replace(SLURM, mpi_kinds=("pmi2",)), BUILD, [OK, WARNING], "not supported"),
        (replace(SLURM, mpi_kinds=()), BUILD, [OK, WARNING], "neither"),
        (SLURM, replace(BUILD, mpi=False), [OK, OK], "horovodrun --gloo"),
        (ProbeError("`srun --mpi=list` did not finish"), BUILD, [WARNING, WARNING], "unknown"),
    ],
)
def test_slurm(slurm, build, statuses, words):
    lines = slurm_lines(slurm, build)
    assert [line.status for line in lines] == statuses
    assert words in lines[-1].found


def test_folder(tmp_path):
    good = folder_line("Windows", tmp_path / "not" / "yet", "hint", required=True)
    assert good.status == OK and "GiB free" in good.found
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    bad = folder_line("Windows", tmp_path / "file" / "folder", "name another", required=True)
    assert (bad.status, bad.hint) == (FAILURE, "name another")
    assert "cannot be written: Not a directory" in bad.found
    assert folder_line("Hub", tmp_path / "file" / "folder", "hint", required=False).status == WARNING


@pytest.mark.parametrize(("free", "required", "status"), [
    (checks.DISK_RECOMMENDED, True, OK),
    (checks.DISK_RECOMMENDED - 1, True, WARNING),
    (checks.DISK_REQUIRED - 1, True, FAILURE),
    (checks.DISK_REQUIRED - 1, False, WARNING),
])  # fmt: skip
def test_free_space(tmp_path, monkeypatch, free, required, status):
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    line = folder_line("Output", tmp_path, "name another", required=required)
    assert line.status == status
    assert ("name another" in line.hint) == (status != OK)


def test_memory():
    assert memory_line(8 * checks.GIB, 2).status == OK
    assert memory_line(8 * checks.GIB, 4).status == WARNING


def test_inputs():
    assert inputs_line([]).status == OK
    assert "squad" in inputs_line(["squad"]).found
    assert inputs_line(["squad"]).status == WARNING


# --- facts -----------------------------------------------------------------------------------------


def test_free_memory_is_the_minimum_of_host_and_job(tmp_path):
    assert 0 < machine.free_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    job = tmp_path / "job"
    task = job / "step" / "task"
    task.mkdir(parents=True)
    (task / "memory.max").write_text("max\n")
    (task / "memory.current").write_text("10\n")
    (job / "memory.max").write_text("1000\n")
    (job / "memory.current").write_text("400\n")
    for folder, cached in ((task, 0), (job, 100)):
        (folder / "memory.stat").write_text(f"anon 9\nactive_file {cached}\ninactive_file {cached}\n")
    assert machine._cgroup_free(task) == [800]  # the kernel drops cached files if memory is short


def test_failing_commands():
    with pytest.raises(ProbeError, match=r"`no-such-program` cannot be started: No such file"):
        probes.output_of(["no-such-program"])
    program = "import sys; print('first'); sys.exit('last')"
    with pytest.raises(ProbeError, match=r"exited with 1: last$"):
        probes.output_of([sys.executable, "-c", program])
    with pytest.raises(ProbeError, match=r"was killed by signal 9$"):
        probes.output_of([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    with pytest.raises(ProbeError, match=r"did not finish within 0 s"):
        probes.output_of([sys.executable, "-c", "import sys; sys.stdin.read(); import signal; signal.pause()"], 0.2)


# --- ranks -----------------------------------------------------------------------------------------

SAME = {"python": "3.11.7", "torch": "2.8.0"}


def world(*hosts: str, device: str = "cpu", cores: frozenset[int] = frozenset(range(8)), host_cores: int = 8):
    rank_infos = [RankInfo(number, host, number % 2, device, None, cores) for number, host in enumerate(hosts)]
    return [Rank(info, dict(SAME), host_cores) for info in rank_infos]


def statuses(found: list[Line]) -> dict[str, str]:
    return {line.name: line.status for line in found}


def test_ranks_that_fit():
    assert statuses(rank_lines(world("a", "a", "b", "b"), "mpi")) == {"World": OK, "Versions": OK}
    assert statuses(rank_lines(world("a"), "none")) == {"World": OK}


def test_differing_versions():
    found = world("a", "a", "b", "b")
    for rank in found[2:]:
        rank.versions["torch"] = "2.6.0"
    del found[3].versions["python"]
    (line,) = (line for line in rank_lines(found, "mpi") if line.name == "Versions")
    assert line.status == FAILURE
    assert "torch is 2.8.0 on rank(s) 0-1 and 2.6.0 on rank(s) 2-3" in line.found
    assert "python is 3.11.7 on rank(s) 0-2 and missing on rank(s) 3" in line.found
    assert "one environment" in line.hint
    shown = ranks_table(found).splitlines()
    assert shown[0].split() == ["host", "rank", "local", "rank", "device", "cores", "versions"]
    assert shown[3].split()[:5] == ["b", "2", "0", "cpu", "0-7"]
    assert shown[3].endswith("python 3.11.7, torch 2.6.0")


def test_equal_versions_are_listed_once():
    shown = ranks_table(world("a", "b"))
    assert shown.count("2.8.0") == 1
    assert shown.count("as all") == 2


def test_devices():
    assert "on CPUs" in rank_lines(world("a", "b"), "mpi")[0].found
    assert "each with a GPU" in rank_lines(world("a", "b", device="cuda:0"), "gloo")[0].found


@pytest.mark.parametrize(
    ("cores", "host_cores", "words"),
    [
        (frozenset({0}), 2, "2 ranks share 1 core(s) on a"),
        (frozenset({0, 1}), 2, None),
        (frozenset({3}), 64, "may use only one of 64 cores"),
    ],
)
def test_cores(cores, host_cores, words):
    found = [line for line in rank_lines(world("a", "a", cores=cores, host_cores=host_cores), "mpi")]
    crowded = [line for line in found if line.name == "Cores"]
    assert [line.status for line in crowded] == ([WARNING] if words else [])
    assert words is None or words in crowded[0].found


def test_ranges():
    assert ranges([3, 0, 1, 2, 8, 10, 11]) == "0-3,8,10-11"
    assert ranges(frozenset({5})) == "5"


# --- allreduce -------------------------------------------------------------------------------------


def test_bert_base(tmp_path):
    config = {"model_type": "bert", "vocab_size": 30522}  # the other defaults are BERT-base
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert collective.gradient_bytes(str(tmp_path)) == collective.BERT_BASE_BYTES


@pytest.mark.parametrize(("content", "words"), [
    (None, "cannot be loaded"),
    ("{", "cannot be loaded .config.json is not JSON"),
    ('{"model_type": "gpt2"}', "is a gpt2 model"),
])  # fmt: skip
def test_no_bert(tmp_path, content, words):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=words):
        collective.gradient_bytes(str(tmp_path))


def test_figures():
    timing = Timing("Horovod, MPI", 400_000_000, 4, (0.5, 0.6, 0.4, 2.0, 0.5))
    assert timing.median_s == 0.5
    assert timing.gb_per_s == pytest.approx(1.2)  # 2 * 3/4 * 0.4 GB / 0.5 s
    small = Timing("Horovod, MPI", 4, 4, (0.001, 0.002))
    shown = collective.allreduce_table([timing, small]).splitlines()
    assert (
        "400.0 MB" in shown[1] and "500 ms" in shown[1] and "400 ms to 2.00 s" in shown[1] and shown[1].endswith("1.20")
    )
    assert "4 bytes" in shown[2] and "1.5 ms" in shown[2]
    assert timing.as_dict()["seconds"] == timing.seconds


@pytest.mark.parametrize(
    ("own", "plain", "num_bytes", "status"),
    [
        (0.5, 0.4, 400_000_000, OK),
        (0.5, None, 400_000_000, OK),
        (0.9, 0.4, 400_000_000, WARNING),
        (0.09, 0.004, 1_000_000, OK),
    ],
)
def test_slow_allreduce(own, plain, num_bytes, status):
    timings = [Timing("Horovod", num_bytes, 4, (own,))]
    timings += [Timing("plain MPI", num_bytes, 4, (plain,))] if plain else []
    timings.append(Timing("Horovod", 4, 4, (0.5,)))
    assert collective.allreduce_line(timings).status == status


# --- report ----------------------------------------------------------------------------------------


def test_a_broken_check_is_a_failure_line():
    def broken():
        raise ZeroDivisionError("by zero")

    def refused():
        raise UserError("no disk")

    assert isolated("Disk", refused) == [Line("Disk", FAILURE, "no disk")]
    (line,) = isolated("Disk", broken)
    assert line.status == FAILURE
    assert "ZeroDivisionError: by zero" in line.found


def test_every_check_is_isolated(monkeypatch, tmp_path):
    def broken(*_):
        raise RuntimeError("broken")

    for name in ("horovod", "mpi4py", "mpirun", "slurm", "gpus", "cuda_hidden"):
        monkeypatch.setattr(probes, name, broken)
    for name in ("default_cache_dir", "free_memory"):
        monkeypatch.setattr(checks, name, broken)
    found = checks.host_lines("none", 1, tmp_path)
    failed = [line.name for line in found if line.status == FAILURE]
    assert failed == ["Driver", "CUDA", "Horovod", "NCCL", "MPI", "Slurm", "Caches", "Memory"]
    assert [line.name for line in found if line.status == OK][:3] == ["Python", "torch", "Packages"]
    assert found[-1].name == "Output" and found[-1].status == OK


def test_merged():
    python, full, roomy = Line("Python", OK, "3.11"), Line("Disk", FAILURE, "full"), Line("Disk", OK, "empty")
    assert merged([("a", [python, roomy]), ("b", [python, roomy])]) == [python, roomy]
    assert merged([("a", [python, roomy]), ("b", [full]), ("c", [roomy])]) == [
        replace(python, hosts=("a",)),
        replace(roomy, hosts=("a", "c")),
        replace(full, hosts=("b",)),
    ]
    assert "on b: full" in str(merged([("a", [roomy]), ("b", [full])])[1])


def test_lines_are_readable():
    line = str(Line("Windows", FAILURE, "word " * 40, "fix it"))
    assert all(len(row) <= 118 for row in line.splitlines())
    assert line.splitlines()[-1].strip() == "-> fix it"


@pytest.mark.parametrize(
    ("found", "status", "verdict"),
    [
        ([Line("a", OK, "")], 0, "Ready: a training would start here."),
        ([Line("a", OK, ""), Line("b", WARNING, "")], 0, "Ready: a training would start here (1 warning above)."),
        ([Line("b", WARNING, ""), Line("c", FAILURE, ""), Line("c", FAILURE, "x")], 2, "Not ready: c."),
    ],
)
def test_verdict(capsys, found, status, verdict):
    report = Report(as_json=False, shown=True)
    report.add(found)
    assert report.close() == status
    assert capsys.readouterr().out.splitlines()[-1] == verdict


def test_json(capsys):
    report = Report(as_json=True, shown=True)
    report.add([Line("a", FAILURE, "x", "y", ("h",))])
    report.print_text("text")
    report.data["ranks"] = []
    assert report.close() == 2
    (only,) = capsys.readouterr().out.splitlines()
    check = {"name": "a", "status": "failure", "found": "x", "hint": "y", "hosts": ["h"]}
    assert json.loads(only) == {"ready": False, "checks": [check], "ranks": []}


def test_other_ranks_are_silent(capsys):
    for as_json in (True, False):
        report = Report(as_json, shown=False)
        report.add([Line("a", FAILURE, "x")])
        assert report.close() == 2
    assert capsys.readouterr() == ("", "")


# --- command ---------------------------------------------------------------------------------------


@pytest.fixture
def few_checks(monkeypatch):
    monkeypatch.setattr(diagnosis.checks, "host_lines", lambda *_: [Line("Python", OK, "3.11")])


def refuse(monkeypatch, error: Exception) -> None:
    def join():
        raise error

    monkeypatch.setattr(diagnosis.HorovodWorld, "join", staticmethod(join))


@pytest.mark.parametrize(
    ("launcher", "error", "status", "out", "err"),
    [
        (Launcher("srun", 4, 0), WorldsOfOne("4 worlds of size 1"), 2, "World      4 worlds of size 1", ""),
        (Launcher("srun", 4, 3), WorldsOfOne("4 worlds of size 1"), 0, "", ""),
        (Launcher("srun", 4, 3, 1), VariableError("SLURM_NTASKS='x'"), 0, "", ""),
        (Launcher("srun", 4, 2, 0), VariableError("SLURM_NTASKS='x'"), 2, "", "hvd_bert: rank 2 on "),
        (Launcher("mpirun", 4, 3), UserError("no such interface"), 2, "", "hvd_bert: rank 3 on "),  # on this host
        (Launcher("mpirun", 4, 3), UserError("Horovod cannot be loaded"), 0, "", "hvd_bert: rank 3 on "),
        (Launcher("none", None, None), OSError("no socket"), 2, "OSError: no socket", ""),
        (Launcher("mpirun", 4, 3), OSError("no socket"), 2, "", "hvd_bert: rank 3 on "),
    ],
)
def test_no_world(monkeypatch, capsys, few_checks, launcher, error, status, out, err):
    refuse(monkeypatch, error)
    monkeypatch.setattr(probes, "horovod", lambda: BROKEN if "load" in str(error) else BUILD)
    report = Report(as_json=False, shown=launcher.rank in (None, 0))
    assert diagnosis.diagnose(command._parse([]), launcher, report) == status
    output, errors = capsys.readouterr()
    assert out in output and errors.startswith(err)
    assert bool(output) == bool(out)
    assert output.count("Python     3.11") == (1 if out else 0)
    assert "Not ready: World." in output or not out


class FakeWorld(SimpleNamespace):
    """A world of size 1 that records its end. `refusal`: raised when the device is set up."""

    def __init__(self, refusal: Exception | None) -> None:
        super().__init__(rank=0, size=1, local_rank=0, local_size=1, host="a", refusal=refusal, ended=[])

    def allgather(self, value):
        return [value]

    def broadcast(self, value):
        return value

    def set_up_device(self):
        if self.refusal:
            raise self.refusal

    def close(self):
        self.ended.append("closed")

    def abort(self, status):
        self.ended.append(status)
        raise SystemExit(status)


@pytest.mark.parametrize(
    ("error", "message", "ended"),
    [
        (CollectiveError("too few GPUs"), "World      too few GPUs", "closed"),
        (OSError("broken"), "World      rank 0 on a: OSError: broken", 2),
    ],
)
def test_refused_device(monkeypatch, capsys, few_checks, error, message, ended):
    fake = FakeWorld(error)
    monkeypatch.setattr(diagnosis.HorovodWorld, "join", staticmethod(lambda: fake))
    report = Report(as_json=False, shown=True)
    try:
        status = diagnosis.diagnose(command._parse([]), Launcher("mpirun", 1, 0), report)
    except SystemExit as left:
        status = left.code
    out = capsys.readouterr().out
    assert (status, fake.ended) == (2, [ended])
    assert message in out and "Python     3.11" in out and out.endswith("Not ready: World.\n")
    # A timer that is left running would end this process, and all tests, minutes later.
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers)


def test_ranks_that_never_join(monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(diagnosis.os, "_exit", ended.append)
    report = Report(as_json=False, shown=True)
    step_timeout = diagnosis.StepTimeout(report, 0.01)
    step_timeout.step("World", "the ranks do not find each other", "name the interface")
    assert step_timeout._timer is not None
    step_timeout._timer.join(10)
    assert ended == [2]
    out = capsys.readouterr().out
    assert "the ranks do not find each other: not finished after 0 s" in out
    assert "-> name the interface" in out
    assert diagnosis.StepTimeout(Report(as_json=False, shown=False), 1.0).timeout > 1.0  # rank 0 reports first


@pytest.mark.parametrize(
    "flags", [["--size", "0"], ["--size", "x"], ["--repeats", "0"], ["--timeout", "-1"], ["--what"]], ids=" ".join
)
@pytest.mark.parametrize("rank", [0, 1])
def test_bad_flags_are_reported_once(monkeypatch, capsys, flags, rank):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
    assert command.main(flags) == (2 if rank == 0 else 0)
    errors = capsys.readouterr().err
    assert errors.startswith("hvd_bert: ") if rank == 0 else errors == ""


def test_versions_of_this_process():
    found = diagnosis.versions("Open MPI 4.1.4")
    assert found["torch"] == torch.__version__
    assert found["MPI"] == "Open MPI 4.1.4"
    assert "MPI" not in diagnosis.versions("")


def test_host_lines_name_the_windows_cache(own_cache: Path):
    (line,) = (line for line in checks._caches() if line.name == "Windows")
    assert str(own_cache) in line.found
