"""Strategies: their table, refused flags and packages, and code that can be tested in a single process."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from test_families import CLS, FIRST_TOKEN, QUESTION, SEP, TRAINED, small
from test_world import make_world
from torch import distributed, nn
from transformers import BertConfig, BertForMaskedLM, BertForQuestionAnswering, BertModel

from hvd_bert.config import strategies
from hvd_bert.config.command_line import before_joining, parse
from hvd_bert.config.settings import ParallelArguments, TrainArguments
from hvd_bert.config.strategies import STRATEGIES
from hvd_bert.distributed import runner
from hvd_bert.distributed.launch import LaunchError
from hvd_bert.distributed.world import World
from hvd_bert.machine import PACKAGES
from hvd_bert.model.attention import make_windows
from hvd_bert.model.families import model_class
from hvd_bert.strategies.base import Strategy, StrategyOptions, strategy_class
from hvd_bert.strategies.dp import join_windows, split_windows
from hvd_bert.strategies.horovod import backward_groups, check_bf16
from hvd_bert.strategies.word_rows import WordRows, word_embedding


def test_horovod_without_bf16_is_refused_with_the_command_that_builds_it(monkeypatch):
    functions = {f"horovod_torch_allreduce_async_torch_{device}BFloat16Tensor": print for device in ("", "cuda_")}
    for device, old, nccl in (("cpu", True, 0), ("cuda", True, 22809), ("cuda", False, 20800), ("cpu", False, 0)):
        library = SimpleNamespace(**({} if old else functions))
        made = SimpleNamespace(mpi_ops=SimpleNamespace(mpi_lib=library), rocm_built=bool, nccl_built=lambda n=nccl: n)
        monkeypatch.setitem(sys.modules, "horovod.torch", made)
        monkeypatch.setitem(sys.modules, "horovod", SimpleNamespace(torch=made))
        if old or device == "cuda":
            with refused("--bf16_allreduce", "`bash env/setup.sh" + " --with-nccl`" * (device == "cuda")):
                check_bf16(torch.device(device))
    check_bf16(torch.device("cpu"))


# Flag -> the strategies that refuse it.
REFUSED = {
    "--timeline_file t.json": "ddp fsdp deepspeed dp none",
    "--ema_decay 0.5": "fsdp deepspeed",
    "--fp16": "deepspeed",
    "--optim lamb": "fsdp deepspeed",
    "--torch_compile_mode reduce-overhead": "fsdp deepspeed dp",
    "--torch_compile": "dp",
    "--gradient_checkpointing": "dp",
    "--per_device_train_batch_size auto": "dp",
}


@pytest.mark.parametrize("flags", REFUSED)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_flags_that_a_strategy_refuses(flags, strategy):
    words = ["--strategy", strategy, *flags.split()]
    if strategy in REFUSED[flags].split():
        with refused(flags.split()[0].removesuffix("_mode"), f" {strategy}"):
            parse(words)
    else:
        assert parse(words).parallel.strategy == strategy


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    assert {row.package for row in STRATEGIES.values() if row.package} <= {*PACKAGES}, "versions are recorded"
    monkeypatch.setattr(strategies, "find_spec", lambda name: None)
    with refused("deepspeed", "`bash env/setup.sh --deepspeed`"):
        strategy_class("deepspeed")


def test_strategy_is_known_before_the_world_is_joined(tmp_path):
    (file := tmp_path / "mine.yaml").write_text("strategy: fsdp\n")
    for argv, expected in (
        (["--strategy", "ddp", "--no_such_flag"], "ddp"),  # the wrong flag is reported after joining
        (["--strategy", "no_such_strategy"], "horovod"),
        (["--help", "--strategy", "none"], "none"),
        (["--config", str(file), "--strategy", "ddp"], "ddp"),
    ):
        assert before_joining(argv)["strategy"] == expected, argv


def test_strategies_of_one_process(monkeypatch):
    world = runner.join("none")  # joins without Horovod
    assert (world.rank, world.size, world.controller, world.devices) == (0, 1, "none", 1)
    assert not world.any_rank_async(False)() and world.any_rank_async(True)()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with refused("--strategy dp", 1):
        runner.join("dp")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert runner.join("dp").devices == 4
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    for strategy in ("none", "dp"):
        with refused(f"--strategy {strategy}", 2, error=LaunchError):
            runner.join(strategy)


LAYER = re.compile(r"\.(\d+)\.")  # a layer's number in a parameter's name


@pytest.mark.parametrize("family", TRAINED)
def test_each_group_of_horovod_is_complete_before_the_layers_of_the_next(family):
    config = small(family)
    config.relative_attention, config.norm_rel_ebd = True, "layer_norm"  # as in pretrained DeBERTas
    config.pos_att_type = ["c2p", "p2c"]
    model = model_class(config)(config)
    group_of = {weight: i for i, group in enumerate(backward_groups(model, 3)) for weight in group}
    assert set(group_of.values()) == {0, 1, 2}
    arrived = list[tuple[Any, bool]]()
    for name, weight in model.named_parameters():
        entry = group_of.get(weight), LAYER.search(name) is not None
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(lambda _, entry=entry: arrived.append(entry))
    outputs = model(input_ids=torch.tensor([[CLS, QUESTION, SEP, SEP, *range(FIRST_TOKEN, 20), SEP]]))
    (outputs.start_logits.square().sum() + outputs.end_logits.square().sum()).backward()
    for i, (number, in_layer) in enumerate(arrived):
        assert not in_layer or min(arrived[i:])[0] == number


@pytest.mark.parametrize(
    ("limit", "layers"),
    [
        (1, ["11 10 9 8 7 6 5 4 3 2 1 0"]),
        (2, ["11 10 9 8 7 6 5 4", "3 2 1 0"]),
        (4, ["11 10 9 8", "7 6 5 4", "3 2 1 0", ""]),  # the last group is the embeddings, as large as three layers
        (14, ["11", "10", "9", "8", "7", "6", "5", "4", "3", "2", "1", "0", ""]),
    ],
)
def test_groups_of_horovod_are_layers_of_nearly_equal_bytes(limit, layers: list[str]):
    with torch.device("meta"):
        model = BertForQuestionAnswering(BertConfig())
    frozen = model.bert.embeddings.position_embeddings.weight.requires_grad_(False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names.pop(id(parameter)) for parameter in group] for group in backward_groups(model, limit)]
    numbers = [dict.fromkeys(found[1] for name in group if (found := LAYER.search(name))) for group in groups]
    assert [" ".join(group) for group in numbers] == layers
    assert [*names] == [id(frozen)]


def test_groups_of_horovod_need_no_list_of_layers():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))
    groups = backward_groups(model, 3)
    assert [{id(weight) for weight in group} for group in groups] == [
        {id(weight) for weight in model[i].parameters()} for i in (3, 2, 0)
    ]


def packed_windows(lengths: list[int]) -> dict[str, object]:
    tokens = torch.arange(sum(lengths))[None]
    return {"input_ids": tokens, "position_ids": tokens + 1, "windows": make_windows(lengths, torch.device("cpu"))}


@pytest.mark.parametrize(("devices", "expected"), [(2, [[5, 3], [4]]), (8, [[5], [3], [4]])])
def test_dp_splits_between_windows(devices, expected):
    batches = split_windows(packed_windows([5, 3, 4]), [torch.device("cpu")] * devices)
    assert [batch["windows"].lengths for batch in batches] == expected
    assert torch.equal(torch.cat([batch["input_ids"] for batch in batches], 1), torch.arange(12)[None])
    for batch in batches:
        lengths = batch["windows"].lengths
        assert batch["windows"].cu_seqlens.tolist() == [0, *np.cumsum(lengths)]
        assert torch.equal(batch["position_ids"], batch["input_ids"] + 1)


def test_dp_joins_the_logits():
    outputs = [{"start_logits": torch.ones(1, n) * n, "end_logits": -torch.ones(1, n) * n} for n in (3, 2)]
    joined = join_windows(outputs, torch.device("cpu"))
    assert joined["start_logits"].tolist() == [[3, 3, 3, 2, 2]]
    assert joined["end_logits"].tolist() == [[-3, -3, -3, -2, -2]]
    classes = [{"logits": torch.ones(windows, 4)} for windows in (3, 2)]
    assert join_windows(classes, torch.device("cpu"))["logits"].shape == (5, 4)


def step_and_state(strategy: Strategy, factor: float) -> tuple[float, dict[str, torch.Tensor]]:
    """Run a step on the loss times `factor`. Returns the gradient norm, and copies of weights and optimizer state."""
    strategy.backward(strategy.module(torch.ones(4, 3)).square().sum() * factor)
    norm = float(strategy.clip())
    strategy.step()
    weights, tensors, _ = strategy.state()
    return norm, {name: value.detach().clone() for name, value in (weights | tensors).items()}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9)])
def test_fused_optimizers_clip_and_skip_like_others(kind: Callable[..., torch.optim.Optimizer]):
    """If this fails with another torch version, compare FusedClip with that version's GradScaler."""
    options = StrategyOptions(TrainArguments(max_grad_norm=0.5), ParallelArguments(), accumulation=1)
    clipped = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = kind(model.parameters(), lr=0.1, fused=fused)
        strategy = Strategy(model, lambda _, made=optimizer: made, options, make_world())
        norm, before = step_and_state(strategy, 1.0)
        assert norm > 0.5
        norm, after = step_and_state(strategy, math.nan)
        assert math.isnan(norm)
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        clipped.append(step_and_state(strategy, 1.0)[1])
    torch.testing.assert_close(*clipped)


WORDS = 11


def made() -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(WORDS, 3, padding_idx=0)


def backward(embedding: nn.Embedding, tokens: list[int]) -> None:
    positions = torch.arange(1.0, len(tokens) + 1)[:, None]
    (embedding(torch.tensor(tokens)).square() * positions).sum().backward()


def dense_gradient(*micro_batches: list[int]) -> torch.Tensor:
    embedding = made()
    for tokens in micro_batches:
        backward(embedding, tokens)
    return embedding.weight.grad


def test_the_gradient_equals_torchs_and_has_no_rows_of_earlier_steps():
    embedding = made()
    rows = WordRows(embedding)
    for micro_batches in ([[4, 7, 4, 0]], [[1, 2], [2, 10, 2]], [[4]]):
        for tokens in micro_batches:
            backward(embedding, tokens)
        assert embedding.weight.grad.is_sparse
        rows.make_dense()
        torch.testing.assert_close(embedding.weight.grad, dense_gradient(*micro_batches))
        embedding.zero_grad()


SHAPE = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 4}


def test_models_without_a_trained_word_embedding():
    model = BertModel(BertConfig(vocab_size=WORDS, **SHAPE))
    assert word_embedding(model) is model.embeddings.word_embeddings
    model.embeddings.word_embeddings.weight.requires_grad = False
    assert word_embedding(model) is word_embedding(nn.Linear(2, 2)) is None
    assert word_embedding(BertForMaskedLM(BertConfig(vocab_size=WORDS, **SHAPE))) is None  # tied to the output layer


def test_words_whose_weight_has_another_use_stay_dense():
    embedding = made()
    rows = WordRows(embedding)
    (embedding(torch.tensor([1, 2])).sum() + embedding.weight.sum()).backward()
    rows.make_dense()
    assert embedding.weight.grad.sum(1).tolist() == [3, 6, 6, *[3] * 8]


class Waits(World):
    """A world of one rank that records waits with a time limit. `inside`: current waits; `ended`: finished waits."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.ended = list[str](), list[str]()

    @contextmanager
    def limit_wait(self, names):
        self.inside.extend(names())
        yield
        self.ended.append(self.inside.pop())


@pytest.fixture
def one_process() -> Iterator[None]:
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("name", "forward"), [("ddp", []), ("fsdp", ["the step's weights"])])
def test_watchdog_counts_while_a_step_waits_for_other_ranks(name, forward: list[str]):
    world = Waits()
    strategy = strategy_class(name)(
        nn.Linear(3, 1),
        lambda module: torch.optim.SGD(module.parameters(), 0.1),
        StrategyOptions(TrainArguments(), ParallelArguments(), 1),
        world,
    )
    strategy.backward(strategy.module(torch.ones(2, 3)).sum())
    strategy.step()
    assert world.ended == []  # no time limit in the first step, which may compile
    seen: list[list[str]] = []
    strategy.module.register_forward_pre_hook(lambda *_: seen.append(world.inside[:]))
    loss = strategy.module(torch.ones(2, 3)).sum()
    loss.register_hook(lambda _: seen.append(world.inside[:]))
    assert world.ended == forward
    strategy.backward(loss)
    assert seen == [forward, ["the step's gradients"]]
    assert world.inside == [] and world.ended == [*forward, "the step's gradients"]
