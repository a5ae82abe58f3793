"""Checkpoints on disk. A checkpoint folder is either complete or absent, and has a checksum of each file.

    OUTPUT_DIR/checkpoint-120/   model.safetensors, config.json, tokenizer files: the model, for `from_pretrained`
                                 optimizer.safetensors, rng.safetensors, state.json and, with --ema_decay,
                                 unaveraged.safetensors: needed to resume (see `TrainState.snapshot`)
                                 manifest.json: format version; size and SHA-256 of each file above
    OUTPUT_DIR/latest            the name of the newest checkpoint, for people and scripts

A checkpoint is written into a temporary folder, flushed to disk, renamed, and only then named in `latest`. A previous
checkpoint of the same step is first renamed; if the process is then killed, `restore_replaced` renames it back. Reading
a checkpoint never unpickles a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from hvd_bert.storage.reading import Count, convert, open_regular, read_json, read_text, sha256_of
from hvd_bert.storage.writing import delete, flush, replacing

FORMAT = 1
POINTER = "latest"
_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*)")
_ASIDE = ".aside"
_PARTIAL = ".partial-"
_REPLACED = ".replaced-"  # prefix of complete checkpoints; folders with the prefix _PARTIAL may be incomplete
_LEFTOVER = re.compile(rf"({re.escape(_PARTIAL)}(old-)?|{re.escape(_REPLACED)})checkpoint-[0-9]+({re.escape(_ASIDE)})?")
# A file name without folders, control characters or lone surrogates.
FileName = Annotated[str, msgspec.Meta(pattern=r"^(?!\.{1,2}\Z)[^/\x00-\x1f\x7f-\x9f\ud800-\udfff]+\Z")]


class CorruptCheckpoint(ValueError):
    """A checkpoint is damaged or cannot be resumed. The message names the file and the problem."""


@dataclass(frozen=True)
class Manifest:
    """Content of manifest.json. `files`: size and SHA-256 by file name."""

    format: Count
    files: dict[FileName, dict[str, Any]]


@dataclass(frozen=True)
class Contents:
    """A checkpoint's content: `tensors` by file stem and tensor name, `state` for state.json, other `files` by name."""

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint folder for optimizer step `step`."""
    return f"checkpoint-{step}"


def checkpoint_step(folder: Path) -> int:
    """Return the step in a checkpoint folder's name; -1 for any other folder."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


def is_checkpoint(name: str) -> bool:
    """Return whether a folder name is a checkpoint's, including checkpoints that were set aside."""
    return _NAME.fullmatch(name.removesuffix(_ASIDE)) is not None


def is_written(folder: Path) -> bool:
    """Return whether a run wrote this checkpoint folder, rather than a user who chose such a name."""
    return (folder / "manifest.json").is_file()


def write(output_dir: Path, step: int, contents: Contents) -> Path:
    """Write a checkpoint, replace an existing checkpoint of the same step, and update `latest`. Returns its folder.

    If an OSError occurs before the new checkpoint is complete, the existing one stays.
    """
    folder = output_dir / checkpoint_name(step)
    partial, replaced = (folder.with_name(f"{prefix}{folder.name}") for prefix in (_PARTIAL, _REPLACED))
    delete(partial)
    try:
        partial.mkdir()
        for stem, tensors in contents.tensors.items():
            safetensors.torch.save_file(dict(tensors), partial / f"{stem}.safetensors", metadata={"format": "pt"})
        (partial / "state.json").write_text(json.dumps(contents.state, indent=1), encoding="utf-8")
        for name, content in contents.files.items():
            (partial / name).write_bytes(content)
        files = {file.name: _fingerprint(file) for file in sorted(partial.iterdir())}
        manifest = {"format": FORMAT, "step": step, "files": files}
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for file in partial.iterdir():
            shutil.copymode(partial / "manifest.json", file)  # safetensors creates files that only their owner can read
            flush(file)
        flush(partial)
        if is_written(folder):
            delete(replaced)
            folder.rename(replaced)
        try:
            partial.rename(folder)
        except OSError:
            restore_replaced(output_dir)
            raise
        flush(output_dir)
    except SafetensorError as error:  # for example a full disk
        raise OSError(str(error)) from None
    finally:
        with contextlib.suppress(OSError):
            delete(partial)
    with contextlib.suppress(OSError):  # if this fails, the next write or resume removes it
        delete(replaced)
    point_to(folder)
    return folder


def restore_replaced(output_dir: Path) -> None:
    """Rename replaced checkpoints back whose replacement is missing, because the writer failed or was killed.

    The caller must hold the run's lock, or be the writer.
    """
    for replaced in output_dir.glob(f"{_REPLACED}*"):
        folder = output_dir / replaced.name.removeprefix(_REPLACED)
        if checkpoint_step(folder) >= 0 and not folder.exists():
            replaced.rename(folder)


def lost(output_dir: Path) -> str:
    """Return the name of the checkpoint in `latest` if its folder is missing, else ""."""
    try:
        name = read_text(output_dir / POINTER, errors="replace").strip()
    except (OSError, ValueError):
        return ""
    return name if _NAME.fullmatch(name) and not (output_dir / name).exists() else ""


def point_to(folder: Path) -> None:
    """Write the name of `folder` into `latest`, for people and scripts. The trainer itself uses `candidates`."""
    with replacing(folder.parent / POINTER, durable=True) as partial:
        partial.write_text(f"{folder.name}\n", encoding="utf-8")


def candidates(output_dir: Path) -> list[Path]:
    """List the checkpoints in a folder, newest first, including damaged ones. Raises OSError if it cannot be read."""
    if not output_dir.exists():
        return []
    found = [path for path in output_dir.iterdir() if checkpoint_step(path) >= 0]
    return sorted(found, key=checkpoint_step, reverse=True)


def verify(folder: Path) -> Collection[str]:
    """Check the size and SHA-256 of each file in the manifest, and return the files' names.

    Raises CorruptCheckpoint if a file is missing or differs, or if the manifest's format is newer than FORMAT.
    """
    path = folder / "manifest.json"
    try:
        manifest = convert(read_json(path), Manifest)
        if manifest.format > FORMAT:
            raise ValueError(f"its format needs a newer hvd_bert; this one reads up to {FORMAT}")
        for name, expected in manifest.files.items():
            path = folder / name
            if _fingerprint(path) != expected:
                raise ValueError("it has changed since it was written (its SHA-256 differs)")
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    return manifest.files.keys()


def read(folder: Path) -> Contents:
    """Verify a checkpoint and read its state and tensors into CPU memory. Raises CorruptCheckpoint if it is damaged."""
    paths = [folder / name for name in verify(folder) if name.endswith(".safetensors")]
    try:
        tensors = {path.stem: safetensors.torch.load_file(path) for path in paths}
        return Contents(tensors, read_json(folder / "state.json"))
    except (OSError, ValueError, SafetensorError) as error:
        raise CorruptCheckpoint(f"{folder}: {error}") from None


def discard(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so a crash never leaves a partial checkpoint under its name."""
    aside = folder.with_name(f"{_PARTIAL}old-{folder.name}")
    delete(aside)
    folder.rename(aside)
    delete(aside)


def prune(output_dir: Path, limit: int, keep: Collection[str] = ()) -> None:
    """Discard the run's checkpoints except the newest `limit` ones and those whose names are in `keep`."""
    for folder in [*filter(is_written, candidates(output_dir))][limit:]:
        if folder.name not in keep:
            discard(folder)


def remove_leftovers(output_dir: Path) -> None:
    """Remove the partial and replaced checkpoints of a killed writer. The caller must hold the run's lock."""
    for path in output_dir.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            delete(path)


def clear(output_dir: Path) -> None:
    """Remove all checkpoints, including partial ones and those set aside, and `latest`."""
    remove_leftovers(output_dir)
    for folder in candidates(output_dir):
        discard(folder)
    for path in output_dir.iterdir():
        if is_checkpoint(path.name) or path.name == POINTER:
            delete(path)


def set_aside_after(output_dir: Path, step: int) -> list[str]:
    """Rename the checkpoints after `step` to NAME.aside, since the resumed run writes these steps again.

    Returns the new names. A user can rename the folders back. If there are any, `latest` then names the checkpoint of
    `step`.
    """
    later = [folder for folder in candidates(output_dir) if checkpoint_step(folder) > step]
    if later:
        point_to(output_dir / checkpoint_name(step))
    renamed = []
    for folder in later:
        aside = folder.with_name(f"{folder.name}{_ASIDE}")
        if is_written(aside):
            discard(aside)
        folder.rename(aside)
        renamed.append(aside.name)
    return renamed


def _fingerprint(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": sha256_of(file)}
