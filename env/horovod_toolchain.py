"""What build_horovod.py builds for and with: torch, the compiler, MPI, NCCL and CUDA."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from horovod_commands import fail, output, warn

INSTALL_COMPILER = (
    "Debian or Ubuntu: apt-get install g++ make    RHEL or Rocky: dnf install gcc-c++ make    cluster: module load gcc"
)


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
