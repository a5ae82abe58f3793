"""Name a report's files, check the folder for a report, and write it."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Mapping
from pathlib import Path

from hvd_bert.storage.writing import check_folder, make_folder, replacing, write_named

PAGE = "report.html"
CSV_FILES = ("report.csv", "runs.csv")
LATEX = "report.tex"
PANEL = "scaling_{}_{}.{}"  # table number, panel, format
PANELS = ("speedup", "efficiency", "throughput", "memory")  # drawn by plots.py, which imports matplotlib
FORMATS = ("png", "svg", "pdf")
_PANELS = (PANEL.format(*parts) for parts in itertools.product(range(1, 100), PANELS, FORMATS))
NAMES = {PAGE, LATEX, *CSV_FILES, *_PANELS, "report.md"}  # earlier versions wrote report.md


def check(folder: Path, overwrite: bool) -> list[Path]:
    """Find the files of an earlier report in the folder. Raises OSError if a new report cannot be written there.

    Without `overwrite`, this is also the case if there are such files.
    """
    check_folder(folder)
    earlier = sorted(path for path in folder.iterdir() if path.name in NAMES) if folder.exists() else []
    for path in earlier:
        if path.is_symlink() or not path.is_file():
            raise OSError(errno.EINVAL, f"its {path.name} is not a regular file: move it away")
    if earlier and not overwrite:
        names = ", ".join(path.name for path in earlier)
        raise FileExistsError(
            errno.EEXIST, f"it has {names}: add --overwrite to replace an earlier report, or name another folder"
        )
    return earlier


def write(folder: Path, contents: Mapping[str, bytes], overwrite: bool) -> None:
    """Write a report, and remove files of an earlier report that the new one lacks. Raises OSError."""
    make_folder(folder)
    with replacing(folder / PAGE) as page:  # prevents another process from writing a report here
        earlier = check(folder, overwrite)
        for name in contents.keys() - {PAGE}:
            write_named(folder / name, contents[name])
        for path in earlier:
            if path.name not in contents:
                path.unlink()
        page.write_bytes(contents[PAGE])
