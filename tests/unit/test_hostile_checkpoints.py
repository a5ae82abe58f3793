"""Checkpoints with right checksums and wrong content: skipped with the reason, and an older one is resumed."""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from tables import each
from test_state import state as training_state

from hvd_bert.checkpoint import files, resume
from hvd_bert.checkpoint.files import Contents, CorruptCheckpoint
from hvd_bert.checkpoint.fit import check_state, shape_of
from hvd_bert.config.command_line import parse
from hvd_bert.storage import written

pytestmark = pytest.mark.timeout(300)

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
Change = Callable[[dict[str, Any]], object]


def tensors() -> dict[str, dict[str, torch.Tensor]]:
    weights = {name: value.detach().clone() for name, value in MODEL.state_dict().items()}
    moments = {f"{name}/exp_avg": torch.zeros_like(value) for name, value in weights.items()}
    rng = {f"rank0.{name}": value for name, value in training_state._random_numbers(torch.device("cpu")).items()}
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


def put(*path: str | int, value: Any) -> Change:
    def change(state: Any) -> None:
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = value

    return change


def without(*path: str) -> Change:
    def change(state: Any) -> None:
        for key in path[:-1]:
            state = state[key]
        del state[path[-1]]

    return change


STATES: dict[str, Change] = {
    **{f"no {name}": without(name) for name in STATE if name not in ("epoch", "accumulation")},
    **{f"no meter.{name}": without("meter", name) for name in STATE["meter"]},
    **{f"no strategy.{name}": without("strategy", name) for name in STATE["strategy"]},
    **{f"no best.{name}": without("best", name) for name in STATE["best"]},
    **{f"step {value!r:.12}": put("step", value=value) for value in ("abc", -3, 10**30, 1.5, None, True, [], {})},
    **{f"global_batch {value!r:.12}": put("global_batch", value=value) for value in (0, -1, "8", 10**20)},
    **{f"world_size {value!r:.12}": put("world_size", value=value) for value in (0, 2, "1", 10**9)},
    "rank_batch 0": put("rank_batch", value=0),
    "identity a list": put("identity", value=[]),
    "strategy a list": put("strategy", value=[]),
    "no groups": put("strategy", "groups", value=[]),
    "a group without a rate": put("strategy", "groups", 0, value={"betas": [0.9, 0.999]}),
    "a group with a nested value": put("strategy", "groups", 0, "betas", value=[[0.9]]),
    "rate NaN": put("strategy", "groups", 0, "lr", value=float("nan")),
    "schedule with an object": put("schedule", "base_lrs", value={"a": 1}),
    "schedule at step -1": put("schedule", "last_epoch", value=-1),
    "skipped steps as a text": put("meter", "skipped_steps", value="1"),
    "meter with a text": put("meter", "train_s", value="1"),
    "time infinite": put("meter", "train_s", value=float("inf")),
    "sums of no rank": put("since_last_look", value=[]),
    "sums of two ranks": put("since_last_look", value=[[0.0, 0, 0], [0.0, 0, 0]]),
    "sums too short": put("since_last_look", value=[[0.0]]),
    "sums with a text": put("since_last_look", value=[["0", 0, 0]]),
    "loss NaN": put("since_last_look", value=[[float("nan"), 0, 0]]),
    "best with another key": put("best", "run", value="os.system"),
    "best metric a list": put("best", "metric", value=[]),
    "eval_pending 1": put("eval_pending", value=1),
}
NO_STATES: dict[str, Any] = {"a list": [], "null": None, "a text": "state", "a number": 20, "empty": {}}


@each("name", [*STATES, *NO_STATES])
def test_a_wrong_state_is_skipped(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 10)
    state: Any = copy.deepcopy(STATE)
    if name in STATES:
        STATES[name](state)
    write(tmp_path, 20, NO_STATES.get(name, state) if name in NO_STATES else state)
    if name == "null":  # `write` takes None for the usual state
        rewritten(tmp_path / "checkpoint-20", "state.json", b"null")
    step, warnings = found(tmp_path, caplog)
    assert step == 10
    hostile.check_message(warnings, "Skipping a damaged checkpoint", "checkpoint-20/state.json")


def rewritten(folder: Path, name: str, content: bytes) -> None:
    """Change a file of a checkpoint, and its checksum."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = asdict(files._fingerprint(folder / name))
    (folder / "manifest.json").write_text(json.dumps(manifest))


GOOD = {"bytes": 2, "sha256": "0" * 64}
MANIFESTS: dict[str, Any] = {
    "a list": [],
    "null": None,
    "no files": {"format": 1, "step": 20},
    "files a list": {"format": 1, "files": []},
    "no format": {"files": {"state.json": GOOD}},
    **{f"format {value!r:.12}": {"format": value, "files": {}} for value in ("1", None, -1, 10**30, 1e999, True, 2)},
    **{
        f"file {value!r:.20}": {"format": 1, "files": {"state.json": value}}
        for value in (None, [], 7, {}, {"bytes": 1})
    },
    **{
        f"bytes {value!r:.12}": {"format": 1, "files": {"state.json": GOOD | {"bytes": value}}}
        for value in ("2", -1, None, 10**30, 1.5, float("inf"))
    },
    "checksum a number": {"format": 1, "files": {"state.json": GOOD | {"sha256": 5}}},
    **{
        f"name {name!r:.20}": {"format": 1, "files": {"state.json": GOOD, name: GOOD}}
        for name in ("", ".", "..", "../x", "/etc/passwd", "a/b", "a\0b", "\ud800", "\x1b[31m", "a" * 5000)
    },
}


@each("name", MANIFESTS)
def test_a_wrong_manifest_is_skipped(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 10)
    (write(tmp_path, 20) / "manifest.json").write_text(json.dumps(MANIFESTS[name]))
    step, warnings = found(tmp_path, caplog)
    assert step == 10
    hostile.check_message(warnings, "Skipping a damaged checkpoint", "checkpoint-20")


@each("what", hostile.ALL)
@each("name", ["manifest.json", "state.json", "model.safetensors", "rng.safetensors"])
def test_hostile_files_are_skipped(tmp_path: Path, name: str, what: str, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 10)
    folder = write(tmp_path, 20)
    (folder / name).unlink()
    hostile.ALL[what](folder / name)
    if what in hostile.CONTENTS and name != "manifest.json":
        rewritten(folder, name, (folder / name).read_bytes())
    step, warnings = found(tmp_path, caplog)
    assert step == 10
    hostile.check_message(warnings, "Skipping a damaged checkpoint", "checkpoint-20")


def test_shape_of_a_model_is_part_of_the_checkpoint_format():
    assert shape_of(MODEL) == "2 tensors, 8 parameters, aa902f8e6f66"


def test_states_of_older_versions_and_of_two_ranks_are_read():
    old = copy.deepcopy(STATE) | {"since_last_look": [[0.0, 0, 0]]}  # without positions
    two = STATE | {"world_size": 2, "since_last_look": [[0.0, 0, 0, 0]] * 2}
    skips = STATE | {"meter": STATE["meter"] | {"skipped_steps": 2, "skipped_before": 1, "loss_sum": math.nan}}
    for state in (STATE, old, two, skips, STATE | {"later": "version"}, {"step": 5, "model_only": True}):
        check_state(state)


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
