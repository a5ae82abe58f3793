"""Builds Horovod 0.28.1, its last release, or --source for this Python and its torch, and installs it here.

env/build_horovod.sh runs it by the Python that --python names. It needs checks.py next to it. With horovod_bf16.patch
there, that Horovod can send bf16; with mpirun_process.py, its horovodrun passes signals on to mpirun.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

RELEASE = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
RECIPE = 4  # raise it with a change of the build, so that older wheels in the cache are not used
HERE = Path(__file__).resolve().parent
BF16_PATCH = HERE / "horovod_bf16.patch"
MPIRUN_PROCESS = HERE / "mpirun_process.py"
# They stay installed, because Horovod needs them too: setuptools for the distutils that Python 3.12 lacks.
TOOLS = ("setuptools>=77", "packaging", "cloudpickle", "psutil", "pyyaml")
CMAKE = "cmake>=3.18"
PIP = (sys.executable, "-m", "pip")
INSTALL_COMPILER = (
    "Debian or Ubuntu: apt-get install g++ make    RHEL or Rocky: dnf install gcc-c++ make    cluster: module load gcc"
)


def say(text: str) -> None:
    print(f"build_horovod: {text}", flush=True)


def warn(text: str) -> None:
    print(f"build_horovod: warning: {text}", file=sys.stderr, flush=True)


def fail(problem: str, *advice: str) -> NoReturn:
    sys.stdout.flush()
    sys.exit("\n  ".join([f"build_horovod: error: {problem}", *advice]))


def output(*command: str | Path) -> str:
    """What a program prints, or '' if it fails or is not there."""
    try:
        return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


@dataclass(frozen=True)
class Torch:
    version: str
    git: str
    cuda: str  # '' of a build without CUDA
    standard: int | None  # of C++
    arches: tuple[str, ...]
    nccl: Path | None


def inspect_torch() -> Torch:
    try:
        import torch
    except Exception as error:
        fail(
            f"{sys.executable} can't be built for: no torch that works ({error})",
            f"Install torch there first: {sys.executable} -m pip install torch==2.13.0",
        )
    folder = Path(torch.__file__).parent
    arch_flags = getattr(torch._C, "_cuda_getArchFlags", lambda: "")() or ""
    nccl = folder.parent / "nvidia" / "nccl"
    return Torch(
        version=torch.__version__,
        git=str(torch.version.git_version),
        cuda=torch.version.cuda or "",
        standard=cxx_standard(folder),
        arches=tuple(re.findall(r"\bsm_(\d+)\b", arch_flags)),
        nccl=nccl if nccl.is_dir() else None,
    )


def cxx_standard(torch_folder: Path) -> int | None:
    """The C++ standard that torch's headers need: in its CMake files, or in older ones in its build of extensions."""
    for name, pattern in (
        ("share/cmake/Torch/TorchConfig.cmake", r"CXX_STANDARD (\d\d)"),
        ("utils/cpp_extension.py", r"-std=c\+\+(\d\d)"),
    ):
        file = torch_folder / name
        standards = [int(number) for number in re.findall(pattern, file.read_text())] if file.is_file() else []
        if standards:
            return max(standards)
    return None


@dataclass(frozen=True)
class Compiler:
    command: str
    standard: int
    identity: str


def choose_compiler(standard: int | None, torch: Torch) -> Compiler:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        fail(
            f"Python's headers are missing ({header})",
            "Debian or Ubuntu: apt-get install python3-dev    RHEL or Rocky: dnf install python3-devel",
        )
    command = os.environ.get("CXX") or "g++"
    words = shlex.split(command)  # CXX may contain options, as for make
    for program in (words[0], "make"):
        if shutil.which(program) is None:
            fail(f"{program} is missing, with which Horovod is built", INSTALL_COMPILER)
    standard = standard or torch.standard
    if standard is None:
        fail(
            f"the C++ standard of torch {torch.version} is unknown",
            "Set it: --cxx-std 17 (torch 2.1+) or --cxx-std 20",
        )
    version = output(*words, "--version").partition("\n")[0]
    identity = f"{version} {output(*words, '-dumpmachine').strip()}"
    check = [*words, f"-std=c++{standard}", "-fsyntax-only", "-x", "c++", os.devnull]
    if subprocess.run(check, capture_output=True, check=False).returncode != 0:
        fail(
            f"this compiler does not support C++{standard}, which torch {torch.version} needs: {identity}",
            "Use a newer one (g++ 11 or later supports C++20) by CXX=/path/to/g++, 'module load gcc/12' or"
            " 'dnf install gcc-toolset-12',",
            "or an older torch (2.8 needs C++17 only).",
        )
    return Compiler(command, standard, identity)


def mpirun_version(text: str) -> str:
    """Name and version of the MPI that mpirun belongs to. MPICH's mpirun prints its version on the second line."""
    lines = [line for line in text.splitlines() if not line.startswith("HYDRA")]
    return re.sub(r"^ *Version: *", "MPICH ", lines[0]) if lines else ""


def find_mpi(wanted: bool | None) -> str | None:
    """What distinguishes the MPI of mpicxx; None to build without."""
    if wanted is False:
        return None
    if shutil.which("mpicxx") is None:
        if wanted:
            fail(
                "MPI was requested, but mpicxx is not on PATH",
                "Debian or Ubuntu: apt-get install libopenmpi-dev openmpi-bin    a cluster: module load openmpi",
            )
        return None
    version = output("mpicxx", "--showme:version").strip() or mpirun_version(output("mpirun", "--version"))
    return f"{output('mpicxx', '-show').strip()} | {version}"


@dataclass(frozen=True)
class Nccl:
    cuda_home: Path
    home: Path
    library: Path
    arches: str
    identity: str


def find_cuda_home(given: str) -> Path | None:
    """The toolkit's folder. nvcc may be a link or a script elsewhere, so nvcc itself is queried."""
    home = given or os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if not home and shutil.which("nvcc"):
        dry_run = subprocess.run(
            ["nvcc", "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False
        )
        found = re.search(r"^#\$ TOP=(.*)$", dry_run.stdout + dry_run.stderr, re.MULTILINE)
        home = found and found[1]
    folder = Path(home or "/usr/local/cuda").resolve()
    return folder if os.access(folder / "bin" / "nvcc", os.X_OK) else None


def find_nccl(wanted: bool | None, torch: Torch, args: argparse.Namespace) -> Nccl | None:
    """NCCL and the CUDA toolkit for torch; None to build without."""
    if wanted is False:
        return None
    if not torch.cuda:
        if wanted:
            fail(f"NCCL was requested, but torch {torch.version} is not a CUDA build")
        return None
    major = torch.cuda.split(".")[0]
    load = f"Load a CUDA {major} toolkit (module load cuda/{torch.cuda}) or set CUDA_HOME to one"
    cuda_home = find_cuda_home(args.cuda_home)
    if cuda_home is None:
        if wanted:
            fail("NCCL was requested, but no nvcc was found", f"{load}.")
        warn(f"torch {torch.version} is a CUDA build, but nvcc was not found: Horovod is built without NCCL and")
        warn(f"can't train on GPUs. For GPUs: {load}, and rerun this script.")
        return None
    nvcc = cuda_home / "bin" / "nvcc"
    release = re.search(r"release ([0-9.]+)", output(nvcc, "--version"))
    version = release[1] if release else "unknown"
    if version.split(".")[0] != major:
        fail(
            f"torch {torch.version} is for CUDA {torch.cuda}, but nvcc in {cuda_home} is {version}:"
            " the major versions must be equal",
            f"{load},",
            f"or install a torch for CUDA {version.split('.')[0]}, or build without GPUs: --without-nccl.",
        )
    home = Path(args.nccl_home or os.environ.get("HOROVOD_NCCL_HOME") or torch.nccl or "/usr")
    header = home / "include" / "nccl.h"
    if not header.is_file():
        fail(f"no NCCL headers: '{header}'", "Set the folder: --nccl-home DIR")
    libraries = sorted(path for lib in ("lib", "lib64") for path in (home / lib).glob("libnccl.so*"))
    if not libraries:
        fail(f"no libnccl.so* in {home / 'lib'}", "Set the folder: --nccl-home DIR")
    supported = output(nvcc, "--list-gpu-code").split()
    arches = args.cuda_arch or os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST") or common_arches(torch.arches, supported)
    code = re.search(r"^#define NCCL_VERSION_CODE +(\d+)", header.read_text(errors="replace"), re.MULTILINE)
    identity = f"NCCL {code[1] if code else 'unknown'} CUDA {version} sm {arches}"
    return Nccl(cuda_home, home, libraries[-1], arches, identity)


def common_arches(torch_arches: tuple[str, ...], nvcc_arches: list[str]) -> str:
    """The architectures that torch was built for and this nvcc supports; 80,90 if there are none."""
    return ",".join(arch for arch in torch_arches if f"sm_{arch}" in nvcc_arches) or "80,90"


@dataclass(frozen=True)
class Source:
    folder: Path | None  # None of the release, which is downloaded when it is needed
    version: str
    sha256: str


def open_source(given: str, work: Path) -> Source:
    """The release, or the tree or archive of --source. An archive is unpacked."""
    if not given:
        return Source(None, RELEASE, SDIST_SHA256)
    path, folder = Path(given), work / "unpacked"
    if path.is_dir():
        folder, sha256 = path, hash_tree(path)
    elif path.is_file():
        folder.mkdir()
        if subprocess.run(unpack(path, folder), capture_output=True, check=False).returncode != 0:
            fail(f"--source {given}: not a tar archive")
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    else:
        fail(f"--source {given}: no such file or folder")
    init = folder / "horovod" / "__init__.py"
    version = re.search(r"^__version__ = '(.*)'$", init.read_text(), re.MULTILINE) if init.is_file() else None
    if version is None:
        fail(f"--source {given}: no Horovod source (horovod/__init__.py has no __version__)")
    if not (folder / "third_party" / "gloo" / "CMakeLists.txt").is_file():
        fail(
            f"--source {given}: third_party/gloo is empty. GitHub's own archives lack the submodules",
            "Use a clone: git clone --recursive https://github.com/horovod/horovod, then"
            " git checkout --recurse-submodules COMMIT",
        )
    return Source(folder, version[1], sha256)


def unpack(archive: Path, folder: Path) -> list[str]:
    return ["tar", "-xf", str(archive), "-C", str(folder), "--strip-components=1"]


def ignored_files(folder: Path) -> Any:
    return lambda parent, names: {".git"} | ({"build"} if Path(parent) == folder else set())


def hash_tree(folder: Path) -> str:
    ignored = ignored_files(folder)
    total = hashlib.sha256()
    for parent, folders, names in os.walk(folder):
        skip = ignored(parent, names)
        folders[:] = sorted(set(folders) - skip)
        for path in sorted(Path(parent, name) for name in set(names) - skip):
            content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
            total.update(f"{path.relative_to(folder)} {hashlib.sha256(content).hexdigest()}\n".encode())
    return total.hexdigest()


# Purpose, file, its line, the new line. Without NCCL, a CUDA torch, or just an nvcc on PATH, would pull CUDA in.
WITHOUT_NCCL = (
    (
        "torch without CUDA",
        "cmake/Modules/FindPytorch.cmake",
        'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)',
        "set(Pytorch_CUDA FALSE)",
    ),
    ("nvcc left out", "CMakeLists.txt", "    enable_language(CUDA)", '    message(STATUS "CUDA is left out")'),
)
WITHOUT_CFFI = (
    "cffi, which Horovod does not use, is not required",
    "setup.py",
    "    require_list.append('cffi>=1.4.0')",
    "    pass  # cffi is not used",
)
# Over MPI, horovodrun becomes a shell that waits for mpirun. A signal ends that shell only, and the ranks continue. The
# patched horovodrun waits for mpirun itself, and passes signals on.
PASSES_SIGNALS = (
    "horovodrun passes signals on",
    "horovod/runner/mpi_run.py",
    "        os.execve('/bin/sh', ['/bin/sh', '-c', mpirun_command], env)",
    "        from horovod.runner.mpirun_process import run; sys.exit(run(mpirun_command, env))",
)


def own_standard(folder: Path) -> int:
    """Gloo has the standard of the first file. With another one than the rest, it does not link."""
    found = []
    for name in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        file = folder / name
        text = file.read_text() if file.is_file() else ""
        numbers = re.findall(r"^ *set\(CMAKE_CXX_STANDARD (\d+)\)", text, re.MULTILINE)
        found.append(max(map(int, numbers), default=0))
    return min(found)


def patch_source(folder: Path, standard: int, nccl: bool, change: bool) -> list[str]:
    """Apply the patches that the source still needs, or only look if not `change`. Returns what was done to which.

    The C++ standard needs no change to the source: see `make_compiler_wrapper`.
    """
    own = own_standard(folder)
    notes = [
        f"no patch: C++{standard}: already there" if own >= standard else f"patch: C++{standard} instead of C++{own}"
    ]
    replacements = [*(() if nccl else WITHOUT_NCCL), WITHOUT_CFFI]
    if MPIRUN_PROCESS.is_file():
        replacements.append(PASSES_SIGNALS)
    else:
        notes.append(f"no patch: {PASSES_SIGNALS[0]}: {MPIRUN_PROCESS} is missing")
    for purpose, name, old, new in replacements:
        file = folder / name
        lines = file.read_text(encoding="utf-8").split("\n") if file.is_file() else []
        if new in lines:
            notes.append(f"no patch: {purpose}: already there")
        elif old not in lines:
            notes.append(f"no patch: {purpose}: {file.name} of this source has no line '{old.strip()}'")
        else:
            notes.append(f"patch: {purpose}")
            if change:
                file.write_text("\n".join(new if line == old else line for line in lines), encoding="utf-8")
                if file.name == "mpi_run.py":
                    shutil.copy(MPIRUN_PROCESS, file.parent)
    notes.append(apply_bf16(folder, change))
    return notes


def bf16_missing() -> str:
    """Why Horovod is built without bf16, or ''."""
    if not BF16_PATCH.is_file():
        return f"{BF16_PATCH} is missing"
    return "" if shutil.which("patch") else "the program 'patch' is missing"


def apply_bf16(folder: Path, change: bool) -> str:
    problem = bf16_missing()
    if not problem:
        command = ["patch", "-d", str(folder), "-p1", "-s", "-f", "--fuzz=0", "-i", str(BF16_PATCH)]
        if subprocess.run([*command, "--dry-run"], capture_output=True, check=False).returncode != 0:
            problem = f"{BF16_PATCH.name} does not fit this source"
        elif change:
            subprocess.run(command, check=True)
    return f"no patch: bf16 in allreduce: {problem}" if problem else "patch: bf16 in allreduce"


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
        bf16 = "no" if bf16_missing() else hashlib.sha256(BF16_PATCH.read_bytes()).hexdigest()[:16]
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
            f"horovodrun {'passes signals on' if MPIRUN_PROCESS.is_file() else 'as it is'}",
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


class Log:
    """The output of commands. A failed one ends the program with the last lines and the first errors."""

    def __init__(self, path: Path, head: str = "") -> None:
        self.path = path
        path.write_text(head)

    def run(self, *command: str | Path, env: dict[str, str] | None = None, stdin: str = "") -> None:
        words = [str(word) for word in command]
        with self.path.open("a") as file:
            done = subprocess.run(words, env=env, input=stdin, text=True, stdout=file, stderr=file, check=False)
        if done.returncode == 0:
            return
        lines = self.path.read_text(errors="replace").splitlines()
        errors = [number for number, line in enumerate(lines) if re.search("CMake Error|[Ee]rror: |fatal", line)]
        print(*lines[-20:], sep="\n", file=sys.stderr)
        print("The first errors in the log:", file=sys.stderr)
        for number in errors[:5]:
            print(*lines[number : number + 4], sep="\n", file=sys.stderr)
        fail(f"this command failed, and above are the last lines and the first errors of {self.path}:", " ".join(words))


def download_release(folder: Path, log: Log) -> Path:
    wanted = f"horovod=={RELEASE} --hash=sha256:{SDIST_SHA256}"
    options = ("--no-deps", "--no-build-isolation", "--no-binary", ":all:")
    log.run(*PIP, "download", "-q", *options, "-d", folder, "-r", "/dev/stdin", stdin=wanted)
    return folder / f"horovod-{RELEASE}.tar.gz"


def copy_source(source: Source, work: Path, log: Log) -> Path:
    """A copy that may be changed."""
    copy = work / "source"
    if source.folder:
        shutil.copytree(source.folder, copy, symlinks=True, ignore=ignored_files(source.folder))
    else:
        copy.mkdir()
        log.run(*unpack(download_release(work, log), copy))
    return copy


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


def link_nccl(nccl: Nccl, work: Path) -> dict[str, str]:
    """The variables for a build with NCCL. pip's NCCL has no libnccl.so, for which the linker looks."""
    (work / "nccl" / "lib").mkdir(parents=True)
    (work / "nccl" / "include").symlink_to(nccl.home / "include")
    for name in ("libnccl.so", "libnccl.so.2"):
        (work / "nccl" / "lib" / name).symlink_to(nccl.library)
    return {
        "CUDA_HOME": str(nccl.cuda_home),
        "HOROVOD_CUDA_HOME": str(nccl.cuda_home),
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_HOME": str(work / "nccl"),
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_BUILD_CUDA_CC_LIST": nccl.arches,
    }


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
