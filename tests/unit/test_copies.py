"""Copies of the state: equal to it, and in memory that was reserved and is kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hvd_bert.train.state import Copies


def state(value: float) -> dict[str, torch.Tensor]:
    matrix = torch.full((3, 5), value)
    return {"matrix": matrix, "transposed": matrix[:, :2].t(), "step": torch.tensor(value), "none": torch.empty(0)} | {
        "whole": torch.full((7,), int(value))
    }


def places(copies: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: copy.data_ptr() for name, copy in copies.items() if copy.numel()}


@pytest.mark.parametrize("expected", [0, 130, 1000], ids="{} bytes".format)
def test_copies_are_equal_and_stay_where_they_are(expected):
    copies = Copies(expected)
    copies.reserve()
    before = None
    for value in (1.0, 2.0):
        tensors = state(value)
        made = copies.copy("model", tensors)
        for name, tensor in tensors.items():
            assert made[name].equal(tensor) and made[name].dtype == tensor.dtype and made[name].is_contiguous()
        assert before in (None, places(made))
        before = places(made)
    other = copies.copy("optimizer", {"matrix": torch.zeros(3, 5)})
    assert made["matrix"].equal(state(2.0)["matrix"]) and not other["matrix"].any()


def test_changed_shape_gets_other_memory():
    copies = Copies(64)
    copies.reserve()
    copies.copy("model", {"a": torch.ones(3)})
    assert copies.copy("model", {"a": torch.ones(2, 40)})["a"].equal(torch.ones(2, 40))


def test_reserved_memory_is_enough_for_adamw():
    model = nn.Sequential(nn.Linear(3, 50), nn.LayerNorm(50))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    copies = Copies.of_training(model, torch.device("cpu"))
    copies.reserve()
    moments = {
        f"{number}/{slot}": value
        for number, slots in enumerate(optimizer.state.values())
        for slot, value in slots.items()
    }
    made = [copies.copy("model", dict(model.state_dict())), copies.copy("optimizer", moments)]
    assert len({copy.untyped_storage().data_ptr() for group in made for copy in group.values()}) == 1
