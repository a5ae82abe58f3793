"""Horovod's source for build_horovod.py: the release or another one, and the patches that it needs."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_commands import PIP, Log, fail

RELEASE = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
HERE = Path(__file__).resolve().parent
BF16_PATCH = HERE / "horovod_bf16.patch"
MPIRUN_PROCESS = HERE / "mpirun_process.py"


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


# Purpose, file, its line, the new text. Without NCCL, a CUDA torch, or just an nvcc on PATH, would pull CUDA in.
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

# When a rank is lost, Horovod's thread ends all operations and, with its locks held, releases their tensors. For a
# tensor that only Python owns, torch 2.13 takes Python's lock. If the main thread has it and waits for a lock of
# Horovod, neither continues, and no signal handler runs. In the patched Horovod another thread releases the tensors.
WITHOUT_DEADLOCK = (
    (
        "threads for the next patch",
        "horovod/common/tensor_queue.h",
        "#include <queue>",
        "#include <queue>\n#include <thread>",
    ),
    (
        "no deadlock after the loss of a rank",
        "horovod/common/tensor_queue.cc",
        "  tensor_table_.clear();",
        "  if (!tensor_table_.empty())"
        " std::thread([tensors = std::move(tensor_table_)] {}).detach(), tensor_table_.clear();",
    ),
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
    replacements = [*(() if nccl else WITHOUT_NCCL), WITHOUT_CFFI, *WITHOUT_DEADLOCK]
    if MPIRUN_PROCESS.is_file():
        replacements.append(PASSES_SIGNALS)
    else:
        notes.append(f"no patch: {PASSES_SIGNALS[0]}: {MPIRUN_PROCESS} is missing")
    for purpose, name, old, new in replacements:
        file = folder / name
        lines = file.read_text(encoding="utf-8").split("\n") if file.is_file() else []
        if f"\n{new}\n" in "\n".join(lines):
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
