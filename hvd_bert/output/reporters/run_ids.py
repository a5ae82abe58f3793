"""The ids of a run at wandb and MLflow, kept in the output folder so that a resumed run is the same run there."""

from __future__ import annotations

from pathlib import Path

from hvd_bert.storage import written
from hvd_bert.storage.reading import read_json
from hvd_bert.storage.writing import write_json

FILE = "tracking.json"


def read(folder: Path, library: str) -> str | None:
    """The run's id at a library; None if it has none yet."""
    return _all(folder).get(library)


def keep(folder: Path, library: str, run_id: str) -> None:
    """Keep the run's id at a library. Raises OSError."""
    ids = _all(folder)
    if ids.get(library) != run_id:
        written.add(folder, FILE)
        write_json(folder / FILE, ids | {library: run_id})


def _all(folder: Path) -> dict[str, str]:
    try:
        ids = read_json(folder / FILE)
    except (FileNotFoundError, ValueError):  # damaged: the run gets a new id
        return {}
    return {name: value for name, value in ids.items() if isinstance(value, str)} if isinstance(ids, dict) else {}
