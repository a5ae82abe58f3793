"""Open MPI 5 and MPICH: their launchers start one world and stop it with a checkpoint; a wrong launcher is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import other_mpis
import pytest
import signalled
from commands import losses, printed, small_run
from launch import TRAIN, Outcome, run
from other_mpis import Mpi

from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_STOPPED

pytestmark = pytest.mark.integration
BUILT = [pytest.mark.campaign, pytest.mark.timeout(2 * other_mpis.BUILD_S)]
FLAGS = small_run(2, "out", "--no_do_eval")[len(TRAIN) - 2 :]  # without the path of Python
ENDLESS = [*TRAIN[1:], "--config", "sample", "--max_steps", "1000000", "--no_do_eval", "--save_steps", "0"]


@pytest.fixture(scope="module", params=[other_mpis.open_mpi, pytest.param(other_mpis.mpich, marks=BUILT)])
def mpi(request: pytest.FixtureRequest) -> Mpi:
    return request.param()


@pytest.mark.parametrize(("strategy", "controller"), [("horovod", "mpi"), ("ddp", "torch.distributed")])
def test_two_ranks_are_one_world(
    mpi: Mpi, horovodruns: list[float], tmp_path: Path, strategy: str, controller: str
) -> None:
    mpi.run(mpi.starts(*FLAGS, "--strategy", strategy), tmp_path).expect(0)
    results = json.loads((tmp_path / "out" / "train_results.json").read_text())
    assert (results["world_size"], results["controller"]) == (2, controller)
    assert losses(tmp_path / "out") == pytest.approx(horovodruns, abs=1e-5)


def test_ranks_save_when_their_launcher_is_stopped(mpi: Mpi, tmp_path: Path) -> None:
    words = mpi.starts(*ENDLESS, "--output_dir", "out")
    stopped = mpi.run([sys.executable, signalled.__file__, mpi.stop, *words], tmp_path).expect(EXIT_STOPPED)
    saved = (tmp_path / "out" / "latest").read_text().strip()
    assert printed(stopped).count("hvd_bert: Stopped by") == printed(stopped).count(f"saved in out/{saved}") == 1


def refused_once(outcome: Outcome, *named: str) -> None:
    output = printed(outcome.expect(EXIT_BAD_INPUT))
    assert output.count("hvd_bert: ") == 1 and "Traceback" not in output and "MPI_Init" not in output, outcome
    assert all(name in output for name in named), outcome


def test_mpiexec_of_mpich_is_refused_by_open_mpi(tmp_path: Path) -> None:
    other_mpis.needs_open_mpi_4()
    mpiexec = other_mpis.installed(other_mpis.MPICH).program("mpiexec")
    refused_once(run([mpiexec, "-n", "2", sys.executable, *FLAGS], tmp_path), "mpirun started 2", "world of 1")
    assert not (tmp_path / "out").exists()


@pytest.mark.campaign
@pytest.mark.timeout(2 * other_mpis.BUILD_S)
def test_mpirun_of_open_mpi_is_refused_by_mpich(tmp_path: Path) -> None:
    mpirun, mpich = other_mpis.needs_open_mpi_4(), other_mpis.mpich()
    refused_once(
        mpich.run([mpirun, "-n", "2", mpich.program("python"), *FLAGS], tmp_path), "mpirun of Open MPI", "MPICH"
    )
    assert not (tmp_path / "out").exists()
