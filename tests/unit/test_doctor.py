"""The doctor's decisions from made-up facts, and its report."""

from __future__ import annotations

import math
import queue
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from refusals import refused

from hvd_bert.config.command_line import parse
from hvd_bert.distributed.launch import Launcher
from hvd_bert.distributed.world import CollectiveError
from hvd_bert.errors import UserError
from hvd_bert.tools.doctor import __main__ as command
from hvd_bert.tools.doctor import checks, collective, diagnosis, probes, prove
from hvd_bert.tools.doctor.__main__ import parse_proof
from hvd_bert.tools.doctor.lines import FAILURE, OK, WARNING, CheckResult, Report, failure, ok, warning
from hvd_bert.tools.doctor.probes import Gpus, HorovodBuild, Slurm
from hvd_bert.tools.doctor.ranks import Rank, add_ranks

NO_DRIVER = Gpus(error="NVML Shared Library Not Found")
TWO_GPUS = Gpus("570.86", "12.8", ("A100", "A100"))
BUILD = HorovodBuild("0.28.1", mpi=True, gloo=True)
BROKEN = HorovodBuild(error="`python -c ...` was killed by signal 11")
OPEN_MPI = ("/usr/bin/mpirun", "mpirun (Open MPI) 4.1.4\n\nReport bugs to ...")
MPICH = ("/opt/bin/mpirun", "HYDRA build details:\n    Version:    4.0.2\n    Release Date: ...")


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        (checks.python_line((3, 9, 18), "/bin/python"), FAILURE, "3.9.18, /bin/python"),
        (checks.torch_line("2.5.1+cu124"), FAILURE, "2.5.1+cu124"),
        (checks.memory_line(8 * checks.GIB, 4), WARNING, "4 rank(s)"),
        (checks.driver_line(TWO_GPUS), OK, "570.86, supports CUDA up to 12.8"),
        (checks.driver_line(NO_DRIVER), OK, "Library Not Found"),
        (checks.cuda_line(None, 0, NO_DRIVER, False), OK, "no GPU on this host"),
        (checks.cuda_line("12.8", 2, TWO_GPUS, False), OK, "2 GPU(s): A100, A100"),
        (checks.cuda_line(None, 0, TWO_GPUS, False), WARNING, "built for CPUs only"),
        (checks.cuda_line("12.8", 0, TWO_GPUS, True), WARNING, "CUDA_VISIBLE_DEVICES"),
        (checks.cuda_line("13.0", 0, TWO_GPUS, False), FAILURE, "CUDA 13.0, cannot use them; the driver supports"),
        (checks.horovod_line(BUILD), OK, "MPI, Gloo"),
        (checks.horovod_line(replace(BUILD, gloo=False)), WARNING, "without Gloo"),
        (checks.horovod_line(replace(BUILD, gloo=False, mpi=False)), FAILURE, "neither MPI nor Gloo"),
        (checks.nccl_lines(BUILD, 0, "2.28.9")[0], OK, "not needed"),
        (checks.nccl_lines(BUILD, 2, "2.28.9")[0], FAILURE, "without NCCL"),
        (checks.nccl_lines(replace(BUILD, nccl=True), 2, "2.28.9")[0], OK, "2.28.9"),
        (checks.slurm_lines(Slurm(absent="not found (no srun on PATH)"))[0], OK, "no srun on PATH"),
        (checks.slurm_lines(Slurm("slurm-wlm 22.05.8", ("pmi2", "pmix")))[1], OK, "`srun --mpi=pmix`"),
        (checks.slurm_lines(Slurm("slurm-wlm 22.05.8", ("pmi2",)))[1], WARNING, "not supported"),
        (checks.slurm_lines(Slurm(error="`srun --mpi=list` did not finish"))[0], WARNING, "did not finish"),
    ],
    ids=lambda value: value.name if isinstance(value, CheckResult) else None,
)
def test_checks_of_a_host(line: CheckResult, status: str, words: str) -> None:
    assert (line.status, words in line.found, bool(line.hint)) == (status, True, status != OK), line


@pytest.mark.parametrize(
    ("mpirun", "by_srun", "status", "words"),
    [
        (OPEN_MPI, False, OK, "Open MPI 4.1.4, the same in"),
        (MPICH, False, FAILURE, "/opt/bin/mpirun is MPICH 4.0.2"),
        (MPICH, True, WARNING, "/opt/bin/mpirun is MPICH 4.0.2"),
        (None, False, WARNING, "mpirun is not on PATH"),
        (None, True, OK, "mpirun is not on PATH"),
    ],
)
def test_check_of_mpi(monkeypatch, mpirun, by_srun, status, words):
    monkeypatch.setattr(probes, "mpi4py", lambda: "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4")
    monkeypatch.setattr(probes, "mpirun", lambda: mpirun)
    line = checks.mpi_line(BUILD, by_srun)
    assert (line.status, words in line.found, bool(line.hint)) == (status, True, status != OK), line
    monkeypatch.setattr(probes, "mpi4py", Mock(side_effect=UserError("broken")))
    assert checks.mpi_line(BUILD, by_srun).status == FAILURE
    assert checks.mpi_line(replace(BUILD, mpi=False), by_srun).status == OK


@pytest.mark.parametrize(
    "installed, status, found", [("0.28.1", FAILURE, "signal 11"), (None, WARNING, "not installed")]
)
def test_other_strategies_are_named_without_horovod(monkeypatch, installed, status, found):
    monkeypatch.setattr(checks, "package_version", lambda name: installed)
    line = checks.horovod_line(BROKEN)
    assert line.status == status and found in line.found and "--strategy ddp under torchrun" in line.hint


def test_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "package_version", lambda name: "1" if name in ("torch", "numpy") else None)
    file = tmp_path / "requirements.txt"
    assert checks.packages_line(file).status == WARNING  # without the file, versions cannot be checked
    for more, status in (("", OK), ("no_such-one==1\n# other\n", FAILURE)):
        file.write_text(f"torch==2.13  # any\nmpi4py==4\nhorovod[pytorch]==0.28.1\n{more}")
        line = checks.packages_line(file)
        assert (line.status, line.found.endswith(": no_such-one")) == (status, status == FAILURE)


def test_versions_and_kinds_of_mpi():
    assert probes.mpi_version("Intel(R) MPI Library 2021.9 for Linux* OS") == ("Intel MPI", "2021.9")
    assert probes.mpi_version("MVAPICH2 Version : 2.3.7 MVAPICH2 Release date") == ("MVAPICH", "2.3.7")
    assert probes.mpi_version("something else 1.2") is None
    listed = "MPI plugin types are...\n\tcray_shasta\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: pmix_v4"
    assert probes.mpi_kinds(listed) == ("cray_shasta", "pmi2", "pmix", "pmix_v4")
    assert probes.mpi_kinds("srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: openmpi\n") == ("pmi2", "openmpi")


def test_folders(tmp_path, monkeypatch):
    recommended, required = checks.DISK_RECOMMENDED, checks.DISK_REQUIRED
    for free, status in ((recommended, OK), (recommended - 1, WARNING), (required - 1, FAILURE)):
        monkeypatch.setattr(checks.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        line = checks.folder_line("Windows", tmp_path / "not" / "yet", "name another")
        assert line.status == status and ("name another" in line.hint) == (status != OK) and "GiB free" in line.found
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert checks.folder_line("Windows", tmp_path / "file" / "folder", "name another").status == FAILURE


def test_failing_commands():
    for words, message in (
        (["no-such-program"], "No such file"),
        (["sh", "-c", "echo last; exit 1"], "with 1: last$"),
        (["sleep", "60"], "did not finish within 1 s"),
    ):
        with pytest.raises(UserError, match=message):
            probes.run_command(words, 1.0)


RANK = Rank(0, "a", 0, "cpu", None, frozenset(range(8)), {"python": "3.11", "torch": "2.8"}, 8, interface="ib0")
ON_GPU = replace(RANK, device="cuda:0", gpus=("A100",))
OTHERS = [replace(RANK, versions={"python": "3.11", "torch": "2.6"}), replace(RANK, versions={"python": "3.12"})]


@pytest.mark.parametrize(
    ("ranks", "statuses", "words"),
    [
        ([ON_GPU, ON_GPU], {}, "each with a GPU"),
        ([ON_GPU, replace(ON_GPU, gpus=("V100",))], {"GPUs": WARNING}, "model is A100 on rank 0 and V100 on rank 1"),
        ([replace(RANK, cores=frozenset({0}), host_cores=2)] * 2, {"Cores": WARNING}, "2 ranks share 1 core(s) on a"),
        ([replace(RANK, cores=frozenset({3}), host_cores=64)] * 2, {"Cores": WARNING}, "may use only one of 64 cores"),
        ([RANK, RANK, *OTHERS], {"Versions": FAILURE}, "2.8 on ranks 0, 1 and 2.6 on rank 2 and missing on rank 3"),
    ],
)
def test_differences_between_ranks(ranks, statuses, words, capsys):
    report = Report(as_json=False, shown=True)
    add_ranks([replace(rank, rank=number) for number, rank in enumerate(ranks)], report, "mpi")
    assert {line.name: line.status for line in report.results} == {"World": OK, "Versions": OK} | statuses
    assert any(words in line.found for line in report.results)
    table = capsys.readouterr().out
    assert ranks[0].gpu in table and " ib0 " in table and "python 3.11, torch 2.8" in table
    assert ("as all" in table) == ("Versions" not in statuses)


def test_bandwidth():
    timing = collective.timing("Horovod, MPI", 400_000_000, 4, (0.5, 0.6, 0.4, 2.0, 0.5))
    assert (timing["median_s"], timing["gb_per_s"]) == (0.5, pytest.approx(1.2))  # ring of 4: 2 * 3/4 * 0.4 GB / 0.5 s


def test_every_check_is_isolated(monkeypatch, tmp_path):
    broken = {"horovod": probes, "slurm": probes, "gpus": probes, "default_cache_dir": checks, "free_memory": checks}
    for name, module in broken.items():
        monkeypatch.setattr(module, name, Mock(side_effect=RuntimeError("broken")))
    (tmp_path / "full").touch()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "full"))  # no files can be written there
    found = checks.host_lines("none", 1, tmp_path)
    failed = [line.name for line in found if line.status == FAILURE]
    assert failed == ["Driver", "CUDA", "Horovod", "NCCL", "MPI", "Slurm", "Windows", "TMPDIR", "Memory"]
    assert str(tmp_path / "full") in found[-3].found and "export TMPDIR=" in found[-3].hint
    assert [line.name for line in found if line.status == OK][:3] == ["Python", "torch", "Packages"]
    assert (found[-1].name, found[-1].status) == ("Output", OK)


LONG = failure("c", "word " * 40, "fix it", ("h",))
ODD = warning("b", "\x1b]0;owned\a")
START = "\n\n  1 process:\n    python train.py\n"


@pytest.mark.parametrize(
    ("verbose", "found", "status", "first", "last"),
    [
        (True, [ok("a", "b"), ODD], 0, "  ok       a", f"Ready: it starts (1 warning above).{START}"),
        (True, [ODD, LONG], 2, "  warning  b", "\n\nNot ready: c (1 warning above).\n"),
        (False, [ok("World", "a")], 0, "Ready: it starts (--verbose lists all 1 check).", START),
        (False, [ODD, LONG], 2, "Not ready: c (1 warning; --verbose", "  2. warning  b          \\x1b]0;owned\\x07\n"),
    ],
)
def test_report(capsys, verbose, found, status, first, last):
    """Check start, end and status of the report. It escapes control characters, which another host may have sent."""
    for shown in (True, False):  # only rank 0 prints its report
        report = Report(as_json=False, shown=shown, verbose=verbose)
        report.starts = {"1 process": "python train.py"}
        report.add(*found)
        report.print_details("torch \x9b2J")  # such as the table of ranks
        assert report.close("Ready: it starts") == status
        out = capsys.readouterr().out
        assert not shown or (out.startswith(first) and out.endswith(last)), out
        assert bool(out) == shown and all(len(line) <= 118 for line in out.splitlines())
        assert not {"\x1b", "\a", "\x9b"} & {*out}


def diagnose(monkeypatch, join, launcher: Launcher) -> int:
    """Run a diagnosis whose only host check passes. Returns the exit status."""
    monkeypatch.setattr(diagnosis.checks, "host_lines", lambda *_: [ok("Python", "3.11")])
    monkeypatch.setattr(diagnosis.HorovodWorld, "join", staticmethod(join))
    report = Report(as_json=False, shown=launcher.rank in (None, 0))
    return diagnosis.diagnose(command.make_parser().parse_args([]), launcher, report)


@pytest.mark.parametrize(
    ("launcher", "error", "status", "out", "err"),
    [
        (Launcher("mpirun", 4, 3), UserError("no such interface"), 2, "", "hvd_bert: rank 3 on "),  # error of one host
        (Launcher("mpirun", 4, 3), UserError("Horovod cannot be loaded"), 0, "", "hvd_bert: rank 3 on "),
        (Launcher("none", None, None), OSError("no socket"), 2, "Not ready: World.", ""),
        # Without ranks, a broken Horovod is not loaded.
        (Launcher("none", None, None), AssertionError("loading it may crash"), 0, "Ready: ", ""),
    ],
)
def test_world_that_cannot_be_joined(monkeypatch, capsys, launcher, error, status, out, err):
    monkeypatch.setattr(probes, "horovod", lambda: BROKEN if "load" in str(error) else BUILD)
    assert diagnose(monkeypatch, Mock(side_effect=error), launcher) == status
    output, errors = capsys.readouterr()
    assert out in output and errors.startswith(err) and bool(output) == bool(out) == ("Python     3.11" in output)
    assert ("OSError: no socket" in output) == isinstance(error, OSError)


def test_refused_device(monkeypatch, capsys):
    world = Mock(rank=0, size=1, local_rank=0, host="a", abort=sys.exit, broadcast=int)
    world.allgather = lambda value: [value]
    world.set_up_device = Mock(side_effect=CollectiveError("too few GPUs"))
    assert diagnose(monkeypatch, lambda: world, Launcher("mpirun", 1, 0)) == 2
    assert "World      too few GPUs" in capsys.readouterr().out
    world.set_up_device = Mock(side_effect=OSError("broken"))
    with pytest.raises(SystemExit):  # aborts all ranks
        diagnose(monkeypatch, lambda: world, Launcher("mpirun", 1, 0))
    out = capsys.readouterr().out
    assert "World      rank 0 on a: OSError: broken" in out and out.endswith("Not ready: World.\n")


@pytest.mark.parametrize(("shown", "seconds"), [(True, 0), (False, 1)])  # rank 0 times out first, so that it reports
def test_ranks_that_never_join(monkeypatch, shown, seconds):
    statuses: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(diagnosis.os, "_exit", statuses.put)
    monkeypatch.setattr(diagnosis, "OTHERS_LATER_S", 1.0)
    report = Report(as_json=False, shown=shown)
    with diagnosis.limited(report, 0.01, "World", "no ranks", "name the interface"):
        assert statuses.get(timeout=10) == 2
    assert report.results == [failure("World", f"no ranks: not finished after {seconds} s", "name the interface")]


def test_proof_fails_beyond_its_bound_and_without_a_comparison():
    unused: Any = object()
    cases = ((1.0, 1.0, OK), (1.1, 1.0, FAILURE), (math.nan, 1.0, FAILURE), (1.0, math.nan, FAILURE))
    for error, bound, expected in cases:
        proof = prove.Proof(unused, unused, parse([]), SimpleNamespace(rank=0))  # type: ignore[arg-type]
        proof.steps.append({"errors": {}})
        proof._bounded("Gradients", "weight", torch.tensor(error), torch.tensor(bound))
        status = {result.name: result.status for result in proof.results()}
        assert (status["Gradients"], status["Updates"]) == (expected, FAILURE), (error, bound)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--output_dir=mine --max_steps=9", "--max_steps, --output_dir"),
        ("--no_do_train", "--no_do_train"),  # the negated spelling
        ("--elastic --num-train-epochs=2", "--elastic, --num_train_epochs"),
        ("--load_best_model_at_end", "--load_best_model_at_end"),
        ("--siz 5 --slots=2", "--size, --slots"),  # these flags apply to the doctor's checks
    ],
)
def test_flags_that_a_proof_refuses(words: str, named: str) -> None:
    with refused("--prove", named):
        parse_proof(["--prove", *words.split()])
