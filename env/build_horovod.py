"""Builds Horovod 0.28.1, its last release, or --source for this Python and its torch, and installs it here.

env/build_horovod.sh runs it by the Python that --python names. It needs checks.py and the horovod_*.py files next to
it. With horovod_bf16.patch there, that Horovod can send bf16; with mpirun_process.py, its horovodrun passes signals on
to mpirun.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from horovod_commands import PIP, Log, fail, output, say, warn
from horovod_source import (
    BF16_PATCH,
    HERE,
    MPIRUN_PROCESS,
    RELEASE,
    Source,
    bf16_missing,
    copy_source,
    download_release,
    open_source,
    own_standard,
    patch_source,
)
from horovod_toolchain import Compiler, Nccl, Torch, choose_compiler, find_mpi, find_nccl, inspect_torch, link_nccl

RECIPE = 5  # raise it with a change of the build, so that older wheels in the cache are not used
# They stay installed, because Horovod needs them too: setuptools for the distutils that Python 3.12 lacks.
TOOLS = ("setuptools>=77", "packaging", "cloudpickle", "psutil", "pyyaml")
CMAKE = "cmake>=3.18"


def _short_hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


@dataclass(frozen=True)
class Plan:
    """What is built. The hash of all that distinguishes wheels is part of the version, so that `pip list` shows it."""

    torch: Torch
    compiler: Compiler
    source: Source
    mpi: str | None
    nccl: Nccl | None
    arch_flags: str

    @property
    def text(self) -> str:
        env = os.environ
        bf16 = "no" if bf16_missing() else _short_hash(BF16_PATCH)
        horovodrun = f"passes signals on, {_short_hash(MPIRUN_PROCESS)}" if MPIRUN_PROCESS.is_file() else "as it is"
        lines = (
            f"recipe {RECIPE}",
            f"Horovod {self.source.version} {self.source.sha256}",
            f"Python {sysconfig.get_config_var('SOABI')}, {'-'.join(platform.libc_ver())}, {platform.machine()}",
            f"torch {self.torch.version} ({self.torch.cuda and f'CUDA {self.torch.cuda}, '}{self.torch.git})",
            f"compiler {self.compiler.identity}, C++{self.compiler.standard}, {self.arch_flags or 'no -m flags'}",
            f"flags CXXFLAGS={env.get('CXXFLAGS', '')!r} LDFLAGS={env.get('LDFLAGS', '')!r}"
            f" HOROVOD_CPU_OPERATIONS={env.get('HOROVOD_CPU_OPERATIONS', '')!r}",
            f"MPI {self.mpi or 'none'}",
            f"NCCL {self.nccl.identity if self.nccl else 'none'}",
            "Gloo yes",
            f"bf16 {bf16}",
            f"horovodrun {horovodrun}",
        )
        return "\n".join(lines)

    @property
    def key(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @property
    def local_version(self) -> str:
        return f"torch{re.sub('[^A-Za-z0-9]', '.', self.torch.version)}.k{self.key}"

    @property
    def parts(self) -> list[str]:
        return [*(["MPI"] if self.mpi else []), *(["NCCL"] if self.nccl else [])]

    @property
    def title(self) -> str:
        return f"Horovod {self.source.version} for {', '.join([f'PyTorch {self.torch.version}', 'Gloo', *self.parts])}"


def make_plan(args: argparse.Namespace, work: Path) -> Plan:
    torch = inspect_torch()
    compiler = choose_compiler(args.cxx_std, torch)
    mpi, nccl = find_mpi(args.mpi), find_nccl(args.nccl, torch, args)
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    there = [f"-m{flag}" for flag in ("f16c", "avx", "fma") if re.search(rf"\b{flag}\b", cpuinfo)]
    arch_flags = os.environ.get("HOROVOD_BUILD_ARCH_FLAGS") or " ".join(there)
    return Plan(torch, compiler, open_source(args.source, work), mpi, nccl, arch_flags)


def make_compiler_wrapper(plan: Plan, own: int, work: Path) -> Path:
    """Horovod's CMake files set C++14 and drop any -std from CXXFLAGS. The last -std on the line wins, so a compiler
    wrapper that adds its own needs no change to these files; newer sources may have a standard that is new enough.

    -g0: 1 MB instead of 77 MB. nvcc calls the same compiler with its own standard, so its calls are not changed.
    """
    flags = " -g0" if own >= plan.compiler.standard else f" -std=c++{plan.compiler.standard} -g0"
    if plan.nccl:  # the loader finds torch's NCCL next to this package
        flags += r" -Wl,-rpath,\$ORIGIN/../../nvidia/nccl/lib"
    wrapper, command = work / "c++", plan.compiler.command
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in\n  *-D__CUDA* | *-D__NVCC* | *-DFATBINFILE*) exec {command} "$@" ;;\nesac\n'
        f'exec {command} "$@"{flags}\n'
    )
    wrapper.chmod(0o755)
    return wrapper


def count_jobs() -> int:
    """By cores and memory: one of torch's translation units takes up to 2 GiB."""
    free = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    by_memory = int(free[1]) // 2**21 if free else 1
    return max(1, min(len(os.sched_getaffinity(0)), by_memory))


def build_wheel(plan: Plan, jobs: int | None, work: Path, log: Log) -> Path:
    log.run(*PIP, "install", "-q", *TOOLS)
    source = copy_source(plan.source, work, log)
    own = own_standard(source)
    for note in patch_source(source, plan.compiler.standard, plan.nccl is not None, change=True):
        if plan.source.folder or note.startswith("no patch"):
            say(note)
    say(f"building {plan.title}, C++{plan.compiler.standard}; about 2 minutes on 2 cores; log: {log.path}")
    start = time.monotonic()
    env = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    if "HOROVOD_CPU_OPERATIONS" in os.environ:
        env["HOROVOD_CPU_OPERATIONS"] = os.environ["HOROVOD_CPU_OPERATIONS"]
    path = [sysconfig.get_path("scripts"), os.environ["PATH"]]
    if plan.nccl:
        env |= link_nccl(plan.nccl, work)
        path.insert(1, str(plan.nccl.cuda_home / "bin"))
    if not has_cmake():
        log.run(*PIP, "install", "-q", "--target", work / "tools", CMAKE)
        path.insert(0, str(work / "tools" / "bin"))
        env["PYTHONPATH"] = os.pathsep.join([str(work / "tools"), *filter(None, [env.get("PYTHONPATH")])])
    env |= {
        "PATH": os.pathsep.join(path),
        "CXX": str(make_compiler_wrapper(plan, own, work)),
        "MAKEFLAGS": f"-j{jobs or count_jobs()}",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # with it, cmake 4 builds Horovod's bundled Gloo
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if plan.mpi else "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_LOCAL_VERSION": plan.local_version,
    }
    if plan.arch_flags:
        env["HOROVOD_BUILD_ARCH_FLAGS"] = plan.arch_flags
    options = ("--no-deps", "--no-build-isolation", "--no-cache-dir")
    log.run(*PIP, "wheel", "-v", *options, "-w", work / "wheel", source, env=env)
    say(f"built in {time.monotonic() - start:.0f} s")
    return next((work / "wheel").glob("horovod-*.whl"))


def has_cmake() -> bool:
    version = re.search(r"cmake version (\d+)\.(\d+)", output("cmake", "--version"))
    return version is not None and (int(version[1]), int(version[2])) >= (3, 18)


def install(wheel: Path, parts: list[str], log: Log, advice: str) -> None:
    log.run(*PIP, "install", "-q", *TOOLS)
    log.run(*PIP, "install", "-q", "--no-deps", "--force-reinstall", wheel)
    check(wheel.name, parts, advice)


def check(name: str, parts: list[str], advice: str) -> None:
    """A build does not report a missing part."""
    done = subprocess.run([sys.executable, HERE / "checks.py", "horovod", *parts], capture_output=True, text=True)
    if done.returncode != 0:
        fail(f"{name} is installed, but does not work:", *(done.stdout + done.stderr).splitlines(), advice)


def is_installed(plan: Plan) -> bool:
    """Whether this Python's own packages have that build: with --torch-in-place, another Python's are found, too."""
    folder = Path(sysconfig.get_path("platlib"))
    return (folder / f"horovod-{plan.source.version}+{plan.local_version}.dist-info").is_dir()


def build_and_install(args: argparse.Namespace, plan: Plan, cache: Path, work: Path) -> None:
    advice = "To build it again: --rebuild"
    if not args.rebuild and is_installed(plan):
        check("Horovod", plan.parts, advice)
        say(f"already installed: {plan.title}")
        return
    with (cache / f"{plan.key}.lock").open("w") as lock:
        lock_file(lock)
        log = Log(cache / f"{plan.key}.log", plan.text + "\n")
        wheel = next(cache.glob(f"horovod-*+{plan.local_version}-*.whl"), None)
        if wheel is None or args.rebuild:
            built = build_wheel(plan, args.jobs, work, log)
            wheel = built.rename(cache / built.name)  # at once, so that another run never finds half of it
        else:
            say(f"the wheel is in the cache: {wheel}")
        install(wheel, plan.parts, log, advice)
    say(f"installed: {plan.title}")


def lock_file(file: Any) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another run is building the same wheel: waiting for it")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        warn(f"{file.name}: this file system does not support locks: continuing without one")


def parse() -> argparse.Namespace:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            fail(f"{message} (see --help)")

    parser = Parser(
        prog="build_horovod.sh",
        allow_abbrev=False,
        description=f"Builds Horovod {RELEASE} against the torch installed in a Python, and installs it into that"
        " Python. The wheel is cached: the next environment with the same torch, MPI, CUDA and compiler takes seconds.",
        epilog="CXX, CXXFLAGS, LDFLAGS and HOROVOD_CPU_OPERATIONS are used, and are part of the cache key.",
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvd_bert" / "wheels"
    parser.add_argument("--python", metavar="PY", help="the Python that has torch (default: python3)")
    parser.add_argument("--rebuild", action="store_true", help="build even if the cache has the wheel")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be built")
    parser.add_argument("--cache", type=Path, default=cache, metavar="DIR", help="wheels (default: %(default)s)")
    for name, part, condition in (("mpi", "MPI", "mpicxx is found"), ("nccl", "NCCL", "torch has CUDA, nvcc is found")):
        parser.add_argument(f"--with-{name}", dest=name, action="store_true", help=f"fail if {part} can't be built in")
        text = f"build without {part} (default: with {part} if {condition})"
        parser.add_argument(f"--without-{name}", dest=name, action="store_false", help=text)
        parser.set_defaults(**{name: None})
    for name, metavar, text in (
        ("--cuda-home", "DIR", "folder of the CUDA toolkit (default: $CUDA_HOME, else nvcc's toolkit)"),
        ("--nccl-home", "DIR", "folder with include/nccl.h and lib/libnccl.so* (default: torch's NCCL)"),
        ("--cuda-arch", "LIST", "GPU architectures, such as 80,90 (default: those that torch and nvcc support)"),
        ("--source", "PATH", "another Horovod: a tree with its submodules, which is copied, or a tar archive of one"),
    ):
        parser.add_argument(name, metavar=metavar, default="", help=text)
    for name, text in (
        ("--cxx-std", "C++ standard (default: the one in torch's CMake files)"),
        ("--jobs", "number of parallel compilers (default: by cores and memory)"),
    ):
        parser.add_argument(name, metavar="N", type=int, help=text)
    for name, text in (
        ("--wheel", "install this wheel of an earlier build if it works here, build nothing"),
        ("--download", "only download the source and the tools to this folder, for a build without a network"),
    ):
        parser.add_argument(name, metavar="PATH", type=Path, help=text)
    return parser.parse_args()


def main() -> None:
    args = parse()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))  # removes the temporary folder
    if not args.dry_run:
        args.cache.mkdir(parents=True, exist_ok=True)
    cache = args.cache.resolve()
    with tempfile.TemporaryDirectory(prefix=".build.", dir=None if args.dry_run else cache) as folder:
        work = Path(folder)
        if args.download:
            args.download.mkdir(parents=True, exist_ok=True)
            log = Log(args.download / "horovod.log")
            log.run(*PIP, "install", "-q", *TOOLS)  # pip asks setuptools for the name of a source
            log.run(*PIP, "download", "-q", "-d", args.download, "pip", *TOOLS, CMAKE)
            download_release(args.download, log)
        elif args.wheel:
            parts = [part for part, wanted in (("MPI", args.mpi), ("NCCL", args.nccl)) if wanted]
            log = Log(cache / "wheel.log")
            install(args.wheel, parts, log, "To build Horovod here instead, remove this wheel, and rerun.")
            say(f"installed, not built: {args.wheel.name}")
        elif args.dry_run:
            plan = make_plan(args, work)
            print(f"{plan.text}\nkey {plan.key}")
            if plan.source.folder:
                for note in patch_source(plan.source.folder, plan.compiler.standard, bool(plan.nccl), change=False):
                    say(note)
        else:
            build_and_install(args, make_plan(args, work), cache, work)


if __name__ == "__main__":
    main()
