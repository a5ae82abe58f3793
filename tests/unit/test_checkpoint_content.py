"""What a checkpoint's JSON and tensors must hold: each rule at its limits, and its message."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tables import each
from test_hostile_checkpoints import MODEL, STATE, tensors

from hvd_bert.checkpoint import schema
from hvd_bert.checkpoint.files import Contents
from hvd_bert.checkpoint.fit import misfit, shape_of

FLAG = "true or false"
NAN = float("nan")
GENERATORS = ("torch", "numpy", "python", "gauss")


def wrong(rule: Callable[..., None], *arguments: Any) -> str:
    with pytest.raises(schema.Wrong) as caught:
        rule(*arguments)
    return str(caught.value)


@each(
    ("rule", "right", "others", "what"),
    [
        (schema.real, [0, 1.5, NAN, 2**53, -(2**53)], ["1", True, None, 2**53 + 1, -(2**53) - 1], "a number"),
        (schema.number, [0, -2.5], [NAN, float("inf"), "1", True], "a finite number"),
        (schema.flag, [True, False], [0, None, "true"], FLAG),
        (schema.text, ["", "a"], [1, None, b"a"], "a text"),
        (schema.count(), [0, 2**53], [-1, 1.0, True, 2**53 + 1, "1"], "a whole number from 0 to 2**53"),
        (schema.count(3), [3], [2], "a whole number from 3 to 2**53"),
        (schema.list_of(schema.flag), [[], [True, False]], [(), None, {}], "a list of 0 or more"),
        (schema.list_of(schema.flag, minimum=2), [[True, True]], [[True]], "a list of 2 or more"),
        (schema.optional(schema.flag), [None, True], [0, "null"], FLAG),
        (schema.record({}), [{}, {"a": 1}], [[], None, "{}"], "an object"),
        (schema._setting, [None, 1, 1.5, "a", True, [], [1, None]], [{}, [[1]], b"a"], "a plain value"),
    ],
)
def test_rules(rule, right, others, what):
    for value in right:
        rule(value, "place")
    for value in others:
        assert wrong(rule, value, "place") == f"place is {value!r}, not {what}"


def test_messages_name_the_place():
    lists, settings = schema.list_of(schema.flag), schema.record({"a": schema.flag})
    known, flags = schema.record({}, others=None), schema.record({}, others=schema.flag)
    assert wrong(lists, [True, 1], "place") == f"place[1] is 1, not {FLAG}"
    assert wrong(settings, {"a": 1}, "place") == f"place.a is 1, not {FLAG}"
    assert wrong(settings, {"a": 1}, "") == f"a is 1, not {FLAG}"
    assert wrong(settings, {"b": 1}, "place") == "place.a is missing"
    assert wrong(flags, {"b": 1}, "place") == f"place.b is 1, not {FLAG}"
    assert wrong(known, {"é" * 99: 1}, "place") == f"place.{chr(92)}xe9{(chr(92) + 'xe9') * 14} is unknown"
    assert wrong(schema.flag, "x" * 99, "place") == f"place is '{'x' * 59}, not {FLAG}"


@each("name", ["", ".", "..", "a/b", "/a", "a\n"])
def test_files_are_inside_the_folder(name):
    fingerprint = {"bytes": 1, "sha256": ""}
    schema._files({"model.safetensors": fingerprint}, "")
    assert wrong(schema._files, {name: fingerprint}, "") == f"{name!a} names files outside its folder"
    assert wrong(schema._files, {"a": {"bytes": 1}}, "") == "a.sha256 is missing"
    assert wrong(schema._files, {"a": {"sha256": ""}}, "") == "a.bytes is missing"
    assert wrong(schema._files, [], "files") == "files is [], not an object"


def test_state_of_a_model_or_of_a_training():
    schema.check_state({"model_only": True, "step": 5})
    schema.check_state(STATE)
    two = copy.deepcopy(STATE) | {"world_size": 2, "since_last_look": [[0.0, 0, 0], [0.0, 0, 0]]}
    schema.check_state(two)
    count = "not a whole number from 0 to 2**53"
    assert wrong(schema.check_state, []) == "state.json is [], not an object"
    assert wrong(schema.check_state, {"model_only": True, "step": "a"}) == f"step is 'a', {count}"
    assert wrong(schema.check_state, {"model_only": 1, "step": 5}) == "world_size is missing"
    rows = "since_last_look is not a row for each of the 2 ranks"
    for sums in ([[0.0, 0, 0]], [[0.0, 0, 0]] * 3, [[0.0, 0, 0], [0.0, 0, 0, 0]]):
        assert wrong(schema.check_state, two | {"since_last_look": sums}) == rows


# --- tensors ---------------------------------------------------------------------------------------


def problem(file: str, changes: dict[str, torch.Tensor | None], **state: Any) -> str:
    """What is wrong with the tensors of `MODEL` after these changes."""
    of = tensors()
    for name, value in changes.items():
        of[file].pop(name, None)
        if value is not None:
            of[file][name] = value
    return misfit(Contents(of, {"state": STATE | state}, {}), MODEL)


def test_shape_of_a_model_is_part_of_the_checkpoint_format():
    assert shape_of(MODEL) == "2 tensors, 8 parameters, aa902f8e6f66"
    assert shape_of(torch.nn.Linear(2, 3, bias=False)).startswith("1 tensors, 6 parameters, ")


def test_tensors_of_the_model_fit():
    assert problem("model", {}) == ""
    assert problem("model", {"bias": None}, identity={"the model": "another"}) == ""  # refused with both named


@pytest.mark.parametrize("file", ["model", "optimizer", "rng"])
def test_a_missing_file_is_named(file):
    of = {name: group for name, group in tensors().items() if name != file}
    assert misfit(Contents(of, {"state": STATE}, {}), MODEL) == f"it has no {file}.safetensors"


@each(
    ("file", "changes", "message"),
    [
        ("model", {"bias": None, "aa": torch.zeros(2)}, " has other tensors than the model (aa)"),
        ("model", {"weight": torch.zeros(2, 4)}, ": weight has the shape (2, 4) instead of (2, 3)"),
        ("optimizer", {"other/exp_avg": torch.zeros(2)}, ": other/exp_avg is of no weight of the model"),
        ("optimizer", {"weight": torch.zeros(2, 3)}, ": weight is of no weight of the model"),
        ("optimizer", {"weight/exp_avg": torch.zeros(6)}, ": weight/exp_avg has the shape (6,) instead of (2, 3)"),
        ("optimizer", {"weight/exp_avg": torch.zeros(1)}, ": weight/exp_avg has the shape (1,) instead of (2, 3)"),
        ("optimizer", {"weight/step": torch.zeros(2)}, ": weight/step has the shape (2,) instead of (2, 3)"),
        ("rng", {"rank0.gauss": None}, ": rank0.gauss is missing or of another type"),
        ("rng", {"rank0.gauss": torch.zeros(2)}, ": rank0.gauss is missing or of another type"),
        ("rng", {"rank0.torch": torch.zeros(3, dtype=torch.uint8)}, ": rank0.torch has 3 numbers"),
        ("rng", {"rank0.numpy": torch.zeros(625, dtype=torch.int64)}, ": rank0.numpy has 625 numbers"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(file, changes, message):
    assert problem(file, changes) == f"{file}.safetensors{message}"


def test_random_numbers_are_those_of_each_rank():
    assert problem("rng", {}, world_size=2) == "rng.safetensors: rank1.torch is missing or of another type"
    assert (
        problem("rng", {f"rank1.{name}": tensors()["rng"][f"rank0.{name}"] for name in GENERATORS}, world_size=2) == ""
    )


@each(
    ("generator", "place", "least", "most"),
    [
        ("numpy", 0, 0, 2**32 - 1),
        ("numpy", 623, 0, 2**32 - 1),
        ("numpy", 624, 0, 624),  # of the next number
        ("python", 1, 0, 2**32 - 1),
        ("python", 624, 0, 2**32 - 1),
        ("python", 625, 0, 624),
    ],
)
def test_states_of_generators_are_in_their_range(generator, place, least, most):
    def changed(value: int) -> str:
        state = tensors()["rng"][f"rank0.{generator}"].clone()
        state[place] = value
        return problem("rng", {f"rank0.{generator}": state})

    assert changed(least) == changed(most) == ""
    message = f"rng.safetensors: rank0.{generator} is no state of a generator"
    assert changed(least - 1) == changed(most + 1) == message
