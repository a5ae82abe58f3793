"""Checks of torch, Horovod and packages by the Python of an environment, for env/setup.sh and env/build_horovod.sh.

    python checks.py place                  prints the line of a .pth file that gives another Python this one's packages
    python checks.py torch REQUIREMENT      checks that torch computes, is new enough and satisfies this
    python checks.py torch_version          prints torch's own version, with its build, such as 2.13.0+cu130
    python checks.py horovod [PART...]      checks that the installed Horovod has PyTorch, Gloo and these: MPI, NCCL
    python checks.py one_mpi                checks that Horovod and mpi4py load the same libmpi
    python checks.py installed CLONE FILE...    checks that CLONE's package and the files' requirements are installed
    python checks.py missing FOLDER REQUIREMENT... --requirement=FILE...
                                            prints the packages that are neither installed nor in the folder

A failed check prints why and exits with status 1.
"""

from __future__ import annotations

import importlib.metadata as metadata
import importlib.util
import re
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

OLDEST_TORCH = (2, 6)  # transformers 5 ignores older ones


def place() -> None:
    """Print a line that adds the folder of torch and all `*-packages` folders, with the .pth files in them."""
    import torch

    torch_place = str(Path(torch.__file__).parents[1])
    folders = [path for path in sys.path if path == torch_place or path.endswith("-packages")]
    print("import site;", *(f"site.addsitedir({path!a});" for path in folders))


def torch(requirement: str) -> None:
    import torch

    torch.ones(2).sum().item()
    if not _satisfying(read_requirements([requirement])[0]):
        sys.exit(f"torch {torch.__version__} is not {requirement}")
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        sys.exit(f"torch {torch.__version__} is too old: transformers needs 2.6 or later. Select one: --torch VERSION")


def torch_version() -> None:
    print(own_torch_version())


def own_torch_version() -> str:
    """Read `torch.__version__` without importing torch, which takes seconds. PyPI's metadata lack its build."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    found = re.search(r"^__version__ = '(.+)'$", file.read_text(), re.MULTILINE) if file and file.is_file() else None
    if not found:
        sys.exit("torch is not installed")
    return found[1]


def horovod(*parts: str) -> None:
    """A build does not report a missing part, so this checks both of Horovod's own lists."""
    program = Path(sysconfig.get_path("scripts")) / "horovodrun"
    done = subprocess.run([program, "--check-build"], capture_output=True, text=True, check=False)
    report = done.stdout + done.stderr
    if done.returncode != 0:
        sys.exit(f"horovodrun --check-build failed:\n{report}")
    import horovod.torch as hvd

    built = {"PyTorch": True, "Gloo": hvd.gloo_built(), "MPI": hvd.mpi_built(), "NCCL": hvd.nccl_built()}
    missing = [part for part in ("PyTorch", "Gloo", *parts) if not built[part] or f"[X] {part}" not in report]
    if missing:
        sys.exit(f"Horovod was built without {', '.join(missing)}:\n{report}")


def one_mpi() -> None:
    """mpi4py's wheel loads the first libmpi that it finds. Two different ones crash a process."""
    import mpi4py

    mpi4py.rc.initialize = False
    import horovod.torch  # noqa: F401
    from mpi4py import MPI  # noqa: F401

    maps = Path("/proc/self/maps").read_text().splitlines()
    libraries = {line.split()[-1] for line in maps if "/libmpi.so" in line or "/libmpich" in line}
    print("MPI libraries in use:", *sorted(libraries))
    if len(libraries) != 1:
        sys.exit("Horovod and mpi4py do not load the same libmpi")


def installed(clone: str, *lists: str) -> None:
    """Reads metadata only, which takes a moment. Does not look at what the requirements need in turn."""
    package = importlib.util.find_spec("hvd_bert")
    if package is None or not package.origin or Path(package.origin).parents[1] != Path(clone):
        sys.exit("this package is not installed")
    if not (Path(sysconfig.get_path("scripts")) / "hvd-bert").exists():
        sys.exit("hvd-bert is not installed")
    torch_part = "torch" + re.sub(r"[^A-Za-z0-9]", ".", own_torch_version()) + ".k"
    if not metadata.version("horovod").partition("+")[2].startswith(torch_part):
        sys.exit("Horovod is not built for this torch")
    for name in ("pip", "horovod", "transformers"):
        if importlib.util.find_spec(name) is None:
            sys.exit(f"{name} is not installed")
    for requirement in read_requirements(f"--requirement={file}" for file in lists):
        if (not requirement.marker or requirement.marker.evaluate()) and not _satisfying(requirement):
            sys.exit(f"{requirement} is not installed")


def missing(folder: str, *words: str) -> None:
    print(*sorted(find_missing(Path(folder), *words)), sep="\n")


def find_missing(folder: Path, *words: str) -> set[str]:
    """The requirements, also those of requirements, that neither this Python nor the folder of wheels satisfies.

    pip would stop at the first of them.
    """
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.utils import canonicalize_name

    files, seen, found = files_by_package(folder), set(), set()
    queue = [(requirement, "") for requirement in read_requirements(words)]
    for requirement, needed_by in queue:  # grows in the loop
        extras = [{"extra": extra} for extra in ("", *requirement.extras)]
        if requirement.marker and not needed_by and not requirement.marker.evaluate():
            continue
        name = canonicalize_name(requirement.name)
        there, versions = _distribution(name), files.get(name, {})
        fitting = [version for version in versions if requirement.specifier.contains(version, prereleases=True)]
        if requirement.url or _satisfying(requirement):
            needs = (there.requires or []) if there else []
        elif fitting:
            needs = requires(versions[max(fitting)])
        else:
            why = [f"needed by {needed_by}"] if needed_by else []
            why += [f"{there.version} is installed"] if there else []
            why += [f"{version} is in the folder" for version in sorted(versions)]
            found.add(f"{name}{requirement.specifier}" + (f" ({'; '.join(why)})" if why else ""))
            continue
        for need in map(Requirement, needs):
            applies = not need.marker or any(need.marker.evaluate(extra) for extra in extras)
            if applies and (str(need), name) not in seen:
                seen.add((str(need), name))
                queue.append((need, name))
    return found


def files_by_package(folder: Path) -> dict[str, dict[Any, Path]]:
    """Name -> version -> file, of the wheels for this Python and machine and of source archives."""
    from pip._vendor.packaging.tags import sys_tags
    from pip._vendor.packaging.utils import parse_sdist_filename, parse_wheel_filename

    supported = frozenset(sys_tags())
    found: dict[str, dict[Any, Path]] = {}
    for path in folder.iterdir():
        try:
            if path.suffix == ".whl":
                name, version, _, tags = parse_wheel_filename(path.name)
            elif path.name.endswith(".tar.gz"):
                (name, version), tags = parse_sdist_filename(path.name), supported
            else:
                continue
        except ValueError:
            continue
        if tags & supported:
            found.setdefault(name, {})[version] = path
    return found


def requires(path: Path) -> list[str]:
    """The requirements of a wheel; none of a source archive, which does not tell."""
    if path.suffix != ".whl":
        return []
    with zipfile.ZipFile(path) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist") or []


def read_requirements(words: Any) -> list[Any]:
    """The requirements among words, and in the files of --requirement: without comments, hashes and options."""
    from pip._vendor.packaging.requirements import Requirement

    lines: list[str] = []
    for word in words:
        requirement, _, file = word.partition("--requirement=")
        lines += Path(file).read_text().splitlines() if file else [requirement]
    lines = [line.split(" #")[0].strip(" \\") for line in lines]
    return [Requirement(line) for line in lines if line and line[0].isalnum()]


def _distribution(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def _satisfying(requirement: Any) -> bool:
    there = _distribution(requirement.name)
    return bool(there and requirement.specifier.contains(there.version, prereleases=True))


COMMANDS = {check.__name__: check for check in (place, torch, torch_version, horovod, one_mpi, installed, missing)}

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file
    COMMANDS[sys.argv[1]](*sys.argv[2:])
