"""Start commands on 1 to 4 ranks for tests. A command that hangs is killed, and fails the test with its output."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import by_variables
import pytest
from fork_server import start as fork_server
from processes import started

REPOSITORY = Path(__file__).resolve().parents[2]
SAMPLE = REPOSITORY / "hvd_bert" / "sample"
SAMPLE_DEV = SAMPLE / "dev-v1.1.json.gz"
TRAIN = [sys.executable, "-m", "hvd_bert.train"]
# Far more than the 10 to 40 s that a launch takes on two cores. test_worlds.py doubles this limit: its checks on four
# ranks took 107 s alone on a Zen 3 without AVX-512, and 251 s alongside other tests.
TIMEOUT_S = float(os.environ.get("HVD_BERT_TEST_TIMEOUT_S", "190"))
# Prefixes of environment variables to remove. Launchers would read variables of a surrounding job. In a test's process,
# hvd_bert.model.cpu.linear may set the first two, and the fork server would not serve the changed environment.
_FOREIGN = (
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY LRU_CACHE_CAPACITY OMPI_ PMIX_ PMI_ SLURM_ HOROVOD_ MV2_ MVP_ JSM_ FLUX_ PALS_"
    " ALPS_ TORCHELASTIC_ PET_ MASTER_ RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE HF_HUB_CACHE HF_DATASETS_CACHE"
)


@dataclass(frozen=True, repr=False)
class Outcome:
    """The result of a command. `output`: stdout and stderr. `hung`: whether it was killed at the time limit."""

    command: list[str]
    status: int
    output: str
    seconds: float
    hung: bool

    def __repr__(self) -> str:  # pytest shows this text
        end = f"HUNG, killed after {self.seconds:.0f} s" if self.hung else f"status {self.status}, {self.seconds:.0f} s"
        return f"{' '.join(self.command)}\n-> {end}; output:\n{self.output[-12000:]}"

    def expect(self, status: int) -> Outcome:
        """Fail the test with the command's output, unless the command ended by itself with `status`."""
        if self.hung or self.status != status:
            pytest.fail(f"expected status {status}\n{self}", pytrace=False)
        return self


@functools.cache
def hub_folder() -> Path:
    """Return the $HF_HOME of all commands of this session. It is empty unless the fixture hub_home fills it."""
    folder = tempfile.mkdtemp(prefix="hvd_hub_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def environment() -> dict[str, str]:
    """Return the environment of all commands: one thread, hub offline, and no variables of a surrounding job."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(tuple(_FOREIGN.split()))}
    environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    # One folder for all commands, because the fork server does not serve commands with another HF_HOME.
    environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(hub_folder())}
    environ |= {"PYTHONPATH": str(REPOSITORY)}
    # By default, Horovod's threads meet every millisecond, which takes a fifth of the time on two cores.
    environ |= {"HOROVOD_CYCLE_TIME": "5"}
    if os.geteuid() == 0:
        environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return environ


@functools.cache
def programs() -> Path:
    """Return the folder of the `python`, `horovodrun`, `torchrun` and `hvd-bert` that use the fork server."""
    return fork_server.programs(environment())


def served(word: str) -> str:
    """Replace a Python program of this environment by the fork server's; return other words unchanged."""
    path = Path(word)
    ours = word == sys.executable or path.parent == Path(sys.executable).parent
    return str(programs() / path.name) if ours and path.name in fork_server.NAMES else word


def run(
    command: Iterable[str | Path],
    cwd: Path,
    *,
    env: Mapping[str, str | None] | None = None,
    timeout: float = TIMEOUT_S,
    cold: bool = False,
) -> Outcome:
    """Run a command to its end, or kill it with all its descendants after `timeout` seconds.

    `env`: additional variables; None removes a variable. `cold`: start Python, instead of a fork of the fork server.
    """
    words = [str(word) for word in command]
    environ = environment()
    if not cold:
        environ["PATH"] = f"{programs()}:{environ['PATH']}"
        words = [served(word) for word in words]
    for name, value in (env or {}).items():
        environ.pop(name, None)
        if value is not None:
            environ[name] = value
    start, hung = time.monotonic(), False
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with tempfile.TemporaryFile() as log:
        try:
            with started(
                words, limit_s=timeout, cwd=cwd, env=environ, stdout=log, start_new_session=True, **streams
            ) as process:
                pass
        except subprocess.TimeoutExpired:
            hung = True
        seconds = time.monotonic() - start
        log.seek(0)
        output = log.read().decode("utf-8", errors="replace")
    return Outcome(words, process.returncode, output, seconds, hung)


@functools.cache
def built() -> frozenset[str]:
    """Return the controllers that this Horovod was built with: "mpi", "gloo"."""
    import horovod.torch as hvd

    return frozenset(name for name in ("mpi", "gloo") if getattr(hvd, f"{name}_built")())


def launcher(size: int, by: str) -> list[str]:
    """Return the words to put before a command to start it on `size` ranks. Skips the test without the launcher.

    `by`: "mpi" or "gloo" for horovodrun; "mpirun", "torchrun", "deepspeed", "accelerate"; "torch" for by_variables.py,
    or "JSM", "FLUX", "PMIX" for by_variables.py under mpirun; "none" for one process without a launcher.
    """
    if by == "none":
        assert size == 1
        return []
    if by == "torchrun":
        torchrun = str(Path(sys.executable).with_name("torchrun"))
        return [torchrun, "--standalone", f"--nproc-per-node={size}", "--no-python"]
    if by in ("deepspeed", "accelerate"):
        program = Path(sys.executable).with_name(by)
        if not program.exists():
            pytest.skip(f"{by} is not installed (env/setup.sh --dev --deepspeed)")
        flags = {"deepspeed": "--num_gpus {} --master_port {} --no_local_rank --no_python"}
        flags |= {"accelerate": "launch --multi_gpu --num_processes {} --main_process_port {} --no_python"}
        return [str(program), *flags[by].format(size, by_variables.free_port()).split()]
    if by == "torch":
        return [sys.executable, by_variables.__file__, by, str(size)]
    if by in by_variables.MPI_VARIABLES:
        return [*launcher(size, "mpirun"), sys.executable, by_variables.__file__, by]
    controller = "mpi" if by == "mpirun" else by
    if controller not in built():
        pytest.skip(f"this Horovod was built without {controller}")
    if controller == "mpi" and shutil.which("mpirun") is None:
        pytest.skip("mpirun is not in PATH")
    if by == "mpirun":
        return ["mpirun", "-np", str(size), "--oversubscribe", "--bind-to", "none"]
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    return [horovodrun, "-np", str(size), f"--{by}", "-H", f"localhost:{size}"]
