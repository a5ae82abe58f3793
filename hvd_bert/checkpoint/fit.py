"""Whether a checkpoint holds the state of a training, and whether its model is this one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from torch import nn
from transformers import PreTrainedModel

from hvd_bert.errors import as_user_error
from hvd_bert.storage.reading import Count, Finite, convert, read_json

# Entries of a configuration that change no step: how it was saved, names, defaults of outputs that are given
# explicitly, and what new weights, which a checkpoint replaces, are drawn from.
_WITHOUT_EFFECT = {
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "id2label", "label2id"),
    *("problem_type", "output_attentions", "output_hidden_states", "return_dict", "use_cache", "initializer_range"),
}

Number = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)] | float  # may be NaN or infinite
Plain = bool | Number | str | None
Settings = dict[str, Plain | list[Plain]]  # of an optimizer or a schedule
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


@dataclass
class Saved:
    """A state.json of only the model (--save_only_model)."""

    step: Count


@dataclass
class Rate:
    lr: Finite


@dataclass
class StrategyState:
    groups: Annotated[list[Rate], msgspec.Meta(min_length=1)]
    scaler: Settings


@dataclass
class Position:
    last_epoch: Count


@dataclass
class MeterState:
    last_step: Count
    train_s: Finite
    loss_sum: Number
    windows: Count
    tokens: Count
    seconds: Finite
    skipped_steps: Count = 0
    skipped_before: Count = 0


class BestState(msgspec.Struct, forbid_unknown_fields=True):
    metric: str
    value: Number | None
    step: Count
    since: Count


@dataclass
class State:
    """A state.json to resume from."""

    step: Count
    world_size: Positive
    global_batch: Positive
    rank_batch: Positive
    strategy: StrategyState
    schedule: Position
    meter: MeterState
    since_last_look: list[Annotated[list[Finite], msgspec.Meta(min_length=3)]]
    best: BestState
    eval_pending: bool
    identity: dict[str, Any]


def check_state(found: Any) -> None:
    """Raise ValueError unless this is a state.json to resume from, or that of a checkpoint with only the model."""
    if isinstance(found, dict) and found.get("model_only") is True:
        convert(found, Saved)
        return
    state = convert(found, State)
    for number, group in enumerate(found["strategy"]["groups"]):
        convert(group, Settings, f"strategy.groups[{number}]")
    convert(found["schedule"], Settings, "schedule")
    rows, ranks = state.since_last_look, state.world_size
    if len(rows) != ranks or len({len(row) for row in rows}) > 1:
        raise ValueError(f"since_last_look is not a row for each of the {ranks} ranks")


def shape_of(model: nn.Module) -> str:
    """The number of a model's weights, and a digest of their names and shapes."""
    shapes = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    size = sum(parameter.numel() for parameter in model.parameters())
    return f"{len(shapes)} tensors, {size:,} parameters, {hashlib.sha256(repr(shapes).encode()).hexdigest()[:12]}"


def configuration_changes(folder: Path, model: nn.Module) -> list[str]:
    """Each entry of a model's configuration that changes what a step computes and differs from a checkpoint's.

    Entries that the model does not know, such as another version's, and models that are not transformers' have none.
    """
    if not isinstance(model, PreTrainedModel):
        return []
    kind, path = type(model.config), folder / "config.json"
    with as_user_error(lambda reason: f"{path} cannot be compared with the model ({reason}). Use another checkpoint."):
        saved, now = _entries(kind.from_dict(read_json(path))), _entries(model.config)
        known = kind().to_dict().keys() - _WITHOUT_EFFECT
    return [
        f"{name} in the model's config.json was {saved.get(name)} and is {now.get(name)}"
        for name in sorted(known)
        if saved.get(name) != now.get(name)
    ]


def _entries(config: Any) -> dict[str, Any]:
    """A configuration's entries, with the defaults, as JSON has them."""
    entries: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return entries
