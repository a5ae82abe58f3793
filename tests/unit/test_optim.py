"""Parameter groups, the learning rate and its schedule."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from refusals import refused
from torch import nn
from transformers import AutoConfig, AutoModelForQuestionAnswering, Trainer

from hvd_bert.config.training import SCHEDULES, TrainArguments
from hvd_bert.training.optim import (
    check_optimizer,
    large_batch_note,
    layer_depths,
    make_optimizer,
    make_schedule,
    scaled_learning_rate,
    warmup_steps,
)


def make_model(family):
    sizes = {"vocab_size": 30, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.device("meta"):
        return AutoModelForQuestionAnswering.from_config(AutoConfig.for_model(family, **sizes, pad_token_id=0))


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("bert", ["qa_outputs", "bert.encoder.layer.1", "bert.encoder.layer.0", "bert.embeddings"]),
        ("modernbert", ["head", "model.layers.1", "model.layers.0", "model.embeddings"]),
    ],
)
def test_learning_rates_of_the_layers(family, modules):
    model = make_model(family)
    args = TrainArguments(learning_rate=1.0, layerwise_lr_decay=0.5, weight_decay=0.1)
    groups = make_optimizer(model, args, 1).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    rates = {names[id(p)]: group["lr"] for group in groups for p in group["params"]}
    assert rates.keys() == set(names.values()) and groups[0]["lr"] == 1.0
    for depth, module in enumerate(modules):
        assert {rate for name, rate in rates.items() if name.startswith(module)} == {0.5**depth}
    for made in (groups, make_optimizer(model, TrainArguments(weight_decay=0.1), 1).param_groups):
        decaying = {names[id(p)] for group in made if group["weight_decay"] for p in group["params"]}
        assert decaying == set(Trainer.get_decay_parameter_names(None, model))


def test_model_without_separate_layers_is_refused():
    for model in (make_model("albert"), nn.Linear(2, 2)):
        with refused("--layerwise_lr_decay", type(model).__name__):
            layer_depths(model)


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model[0].weight.requires_grad = False
    trained = {id(p) for group in make_optimizer(model, TrainArguments(), 1).param_groups for p in group["params"]}
    assert trained == {id(parameter) for parameter in (model[0].bias, *model[1].parameters())}


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "lamb", "lars"])
def test_settings_reach_the_optimizer(optim):
    learned = {"learning_rate": 2e-5, "lr_scaling": "linear", "weight_decay": 0.5}
    args = TrainArguments(optim=optim, adam_beta1=0.8, adam_epsilon=1e-6, **learned)  # type: ignore[arg-type]
    decaying, spared = make_optimizer(nn.Linear(2, 2), args, devices=4).param_groups
    assert (decaying["weight_decay"], spared["weight_decay"], decaying["lr"]) == (0.5, 0, pytest.approx(8e-5))
    assert decaying.get("momentum", decaying.get("betas", [0])[0]) == 0.8
    assert "adamw" not in optim or decaying["eps"] == 1e-6


def test_optimizer_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with refused("--optim lamb", "pip install .[pytorch_optimizer]"):
        check_optimizer("lamb")


@pytest.mark.parametrize(
    ("rule", "settings", "devices", "factor"),
    [
        ("none", {}, 8, 1),
        ("linear", {"lr_scaling_limit": math.inf}, 8, 8),
        ("linear", {}, 1024, 4),  # the default limit
        ("linear", {"global_batch": 32}, 3, 1),  # --global_batch is the base, whatever the number of devices
        ("sqrt", {"lr_base_batch_size": 32, "gradient_accumulation_steps": 2}, 8, 2),
    ],
)
def test_learning_rate_by_the_global_batch(rule, settings, devices, factor):
    args = TrainArguments(learning_rate=3e-5, lr_scaling=rule, **settings)
    assert scaled_learning_rate(args, devices) == pytest.approx(3e-5 * factor)


@pytest.mark.parametrize(
    ("devices", "settings", "named"),
    [
        (4, {}, ["batch of 32 is 4 times the 8", "5e-05", "--lr_scaling none", "docs/"]),
        (8, {"lr_scaling": "sqrt", "lr_base_batch_size": 16}, ["4 times the 16 of --lr_base_batch_size", "0.0001"]),
        (4, {"global_batch": 32}, None),  # set by --global_batch, so it is the base
    ],
)
def test_large_batch_is_noted_with_its_rate_and_a_page(devices, settings, named):
    args = TrainArguments(**settings)
    note = large_batch_note(args, args.windows_per_step(devices), scaled_learning_rate(args, devices))
    assert note is None if named is None else all(words in note for words in named), note


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, 11),  # a tenth of the steps, rounded up
        ({"warmup_ratio": 0.0}, 0),
        ({"warmup_steps": 7, "warmup_ratio": 0.1}, 7),
    ],
)
def test_warmup_steps(settings, steps):
    assert warmup_steps(TrainArguments(**settings), total_steps=101) == steps


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule(name):
    args = TrainArguments(learning_rate=1.0, warmup_steps=4, lr_scheduler_type=name)
    optimizer = make_optimizer(nn.Linear(2, 2), args, devices=1)
    schedule, rates = make_schedule(optimizer, args, 12), []
    for _ in range(12):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    warm = [] if name == "constant" else [0.0, 0.25, 0.5, 0.75]
    assert rates[: len(warm)] == pytest.approx(warm)
    assert rates[4] == 1.0 == max(rates)
