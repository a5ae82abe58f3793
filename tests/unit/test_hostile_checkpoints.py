"""Checkpoints with wrong content: skipped with the reason, and an older one is resumed."""

from __future__ import annotations

import copy
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from tables import each

from hvd_bert.checkpoint import files, resume
from hvd_bert.checkpoint.files import Contents, CorruptCheckpoint
from hvd_bert.checkpoint.resume import shape_of
from hvd_bert.config.command_line import parse
from hvd_bert.storage import written

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = torch.nn.Linear(3, 2)
STATE: dict[str, Any] = {
    "step": 20, "epoch": 0.5, "world_size": 1, "global_batch": 8, "rank_batch": 8, "accumulation": 1,
    "strategy": {"groups": [{"lr": 1e-4, "betas": [0.9, 0.999]}], "scaler": {}},
    "schedule": {"last_epoch": 20, "base_lrs": [1e-4]},
    "meter": {"last_step": 20, "train_s": 1.0, "loss_sum": 5.0, "windows": 160, "tokens": 900, "seconds": 0.1},
    "since_last_look": [[0.0, 0, 0, 0]],
    "best": {"metric": "f1", "value": None, "step": 0, "since": 0},
    "eval_pending": False,
    "identity": {"the model": shape_of(MODEL)},
}  # fmt: skip


def tensors() -> dict[str, dict[str, torch.Tensor]]:
    weights = {name: value.detach().clone() for name, value in MODEL.state_dict().items()}
    moments = {f"{name}/exp_avg": torch.zeros_like(value) for name, value in weights.items()}
    rng = {"rank0.torch": torch.get_rng_state()}
    return {"model": weights, "optimizer": moments | {"weight/step": torch.tensor(20.0)}, "rng": rng}


def write(folder: Path, step: int, state: Any = None) -> Path:
    state = copy.deepcopy(STATE | {"step": step}) if state is None else state
    return files.write(folder, step, Contents(tensors(), state, {"config.json": b"{}"}))


def found(folder: Path, caplog: pytest.LogCaptureFixture) -> tuple[int, str]:
    """The step from which a run in this folder resumes, and its warnings."""
    written.add(folder, "train_config.yaml")
    (folder / "train_config.yaml").touch()
    config = parse(["--output_dir", str(folder)])
    with caplog.at_level(logging.WARNING, logger="hvd_bert"):
        point = resume.find(None, config.train)
    assert point is not None
    return point.step, " ".join(record.getMessage() for record in caplog.records)


def rewritten(folder: Path, name: str, content: bytes) -> None:
    """Change a file of a checkpoint, and its checksum."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = asdict(files._fingerprint(folder / name))
    (folder / "manifest.json").write_text(json.dumps(manifest))


GOOD = {"bytes": 2, "sha256": "0" * 64}
MANIFESTS: dict[str, Any] = {
    "a list": [],
    "no files": {"format": 1, "step": 20},
    "no format": {"files": {"state.json": GOOD}},
    "format 2": {"format": 2, "files": {}},
    "no state": {"format": 1, "files": {"model.safetensors": GOOD}},
    "no checksum": {"format": 1, "files": {"state.json": {"bytes": 1}}},
    "bytes -1": {"format": 1, "files": {"state.json": GOOD | {"bytes": -1}}},
    **{
        f"name {name!r}": {"format": 1, "files": {"state.json": GOOD, name: GOOD}}
        for name in ("", "..", "../x", "a\0b", "\ud800", "\x1b[31m")
    },
}


@each("name", MANIFESTS)
def test_a_wrong_manifest_is_skipped(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 10)
    (write(tmp_path, 20) / "manifest.json").write_text(json.dumps(MANIFESTS[name]))
    step, warnings = found(tmp_path, caplog)
    assert step == 10
    hostile.check_message(warnings, "checkpoint-20")


@each("what", hostile.ALL)
@each("name", ["manifest.json", "state.json", "model.safetensors"])
def test_hostile_files_are_skipped(tmp_path: Path, name: str, what: str, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 10)
    folder = write(tmp_path, 20)
    with hostile.in_place_of(folder / name, what):
        step, warnings = found(tmp_path, caplog)
    assert step == 10
    hostile.check_message(warnings, "checkpoint-20")


def test_shape_of_a_model_is_part_of_the_checkpoint_format():
    assert shape_of(MODEL) == "2 tensors, 8 parameters, aa902f8e6f66"


def test_pickles_in_a_checkpoint_are_never_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    canary = hostile.Canary(tmp_path / "ran")
    write(tmp_path, 10)
    folder = write(tmp_path, 20)
    for name in ("optimizer.pt", "pytorch_model.bin", "rng_state.pth", "scheduler.pt", "trainer_state.pkl"):
        canary.pickled(folder / name)
    assert found(tmp_path, caplog)[0] == 20
    for name in ("state.json", "model.safetensors", "optimizer.safetensors"):
        canary.pickled(folder / name)
        rewritten(folder, name, (folder / name).read_bytes())
        assert found(tmp_path, caplog)[0] == 10
    with pytest.raises(CorruptCheckpoint):
        files.read(folder)
    assert not canary.ran
