"""Prints the packages that requirements need and that neither this Python nor a folder has.

    python missing.py FOLDER [REQUIREMENT... | --requirement=FILE...]

env/setup.sh --wheels runs it before it installs anything. pip, whose modules it uses, would stop at the first of them.
"""

import importlib.metadata as metadata
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.tags import sys_tags
from pip._vendor.packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

TAGS = frozenset(sys_tags())


def in_folder(folder: Path) -> dict:
    """Name -> version -> the file, of those that fit this Python and machine."""
    found: dict = {}
    for path in folder.iterdir():
        try:
            if path.suffix == ".whl":
                name, version, _, tags = parse_wheel_filename(path.name)
            elif path.name.endswith(".tar.gz"):
                (name, version), tags = parse_sdist_filename(path.name), TAGS
            else:
                continue
        except ValueError:
            continue
        if tags & TAGS:
            found.setdefault(name, {})[version] = path
    return found


def requires(path: Path) -> list:
    """What a wheel needs; nothing of a source archive, which does not tell."""
    if path.suffix != ".whl":
        return []
    with zipfile.ZipFile(path) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist") or []


def read(arguments: list) -> list:
    """The requirements among arguments, and in the files of --requirement: without comments, hashes and options."""
    lines = []
    for argument in arguments:
        option, _, file = argument.partition("--requirement=")
        lines += Path(file).read_text().splitlines() if file else [option]
    lines = [line.split(" #")[0].strip(" \\") for line in lines]
    return [line for line in lines if line and line[0].isalnum()]


def main(folder: Path, *arguments: str) -> int:
    files, seen, missing = in_folder(folder), set(), set()
    queue = [(line, "") for line in read(list(arguments))]
    for line, needed_by in queue:  # which grows
        requirement = Requirement(line)
        extras = [{"extra": extra} for extra in ("", *requirement.extras)]
        if requirement.marker and needed_by == "" and not requirement.marker.evaluate():
            continue
        name = canonicalize_name(requirement.name)
        try:
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            installed = None
        versions = files.get(name, {})
        fitting = [version for version in versions if requirement.specifier.contains(version, prereleases=True)]
        if requirement.url or (installed and requirement.specifier.contains(installed.version, prereleases=True)):
            needs = installed.requires or [] if installed else []
        elif fitting:
            needs = requires(versions[max(fitting)])
        else:
            others = [f"{installed.version} is installed"] if installed else []
            others += [f"{version} is in the folder" for version in sorted(versions)]
            why = "; ".join([f"needed by {needed_by}"] * bool(needed_by) + others)
            missing.add(f"{name}{requirement.specifier}" + f" ({why})" * bool(why))
            continue
        for need in needs:
            marker = Requirement(need).marker
            if (need, name) not in seen and (not marker or any(marker.evaluate(extra) for extra in extras)):
                seen.add((need, name))
                queue.append((need, name))
    print(*sorted(missing), sep="\n", end="\n" * bool(missing))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
