"""The model: its sources, refused input, and packed windows compared with transformers' own results."""

from __future__ import annotations

import json
from pathlib import Path

import gpu_kernels
import numpy as np
import pytest
import torch
from tables import each, refused
from torch.torch_version import TorchVersion
from transformers import (
    AutoModelForQuestionAnswering,
    BertConfig,
    BertForQuestionAnswering,
    BertModel,
    FNetConfig,
    GPT2Config,
)

from hvd_bert.config.settings import ModelArguments, TrainArguments
from hvd_bert.data.collate import Collator
from hvd_bert.data.sources import squad
from hvd_bert.data.window_cutting import WindowOptions
from hvd_bert.data.window_table import WindowTable, prepare
from hvd_bert.model import attention
from hvd_bert.model.bert import compile_layers, load_model, load_tokenizer, window_losses
from hvd_bert.model.cpu.dropout import Dropout
from hvd_bert.model.cpu.linear import Linear
from hvd_bert.model.precision import autocast, set_precision

LENGTH = 32  # max_seq_length of these tests
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bert(tokenizer) -> BertConfig:
    return BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=64, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory, bert, tokenizer) -> Path:
    """scratch/ (only a configuration), encoder/ (with a pooler, without a span head), model/ (complete)."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    bert.save_pretrained(folder / "scratch")
    BertModel(bert).save_pretrained(folder / "encoder")
    BertForQuestionAnswering(bert).save_pretrained(folder / "model")
    for name in ("scratch", "encoder", "model"):
        tokenizer.save_pretrained(folder / name)
    return folder


def load(
    tokenizer, seed: int = 1, max_seq_length: int = LENGTH, padded: bool = False, **names
) -> BertForQuestionAnswering:
    args = ModelArguments(**{name: str(value) for name, value in names.items()})
    return load_model(args, tokenizer, max_seq_length, seed, padded)


def alter(folder: Path, target: Path, **settings) -> Path:
    """A copy of a model's folder with a changed configuration."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | settings))
    return target


# --- sources ---------------------------------------------------------------------------------------


@each("source", [{"config_name": "scratch"}, {"model_name_or_path": "encoder"}, {"model_name_or_path": "model"}])
def test_no_pooler_and_all_parameters_are_used(folders, tokenizer, windows, source):
    model = load(tokenizer, **{key: folders / value for key, value in source.items()})
    assert not [name for name, _ in model.named_parameters() if "pooler" in name]
    window_losses(model, Collator(windows, CPU)([0, 1])).sum().backward()
    # Horovod would use zero gradients for unused parameters, and AdamW would decay them.
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_new_weights_are_a_function_of_the_seed(folders, tokenizer):
    for source in ({"config_name": "scratch"}, {"model_name_or_path": "encoder"}):
        names = {key: folders / value for key, value in source.items()}
        one, again, other = (load(tokenizer, seed, **names).state_dict() for seed in (1, 1, 2))
        assert all(torch.equal(one[name], again[name]) for name in one)
        differing = {name for name in one if not torch.equal(one[name], other[name])}
        assert len(differing) > 1 if "config_name" in source else differing == {"qa_outputs.weight"}
    saved = BertModel.from_pretrained(folders / "encoder").state_dict()
    assert all(torch.equal(one[f"bert.{name}"], value) for name, value in saved.items() if "pooler" not in name)


def test_saved_folder_loads_whole_with_our_own_layers(folders, tokenizer):
    model = load(tokenizer, seed=5, model_name_or_path=folders / "model")
    plain = AutoModelForQuestionAnswering.from_pretrained(folders / "model").state_dict()
    assert model.state_dict().keys() == plain.keys()
    assert all(torch.equal(value, plain[name]) for name, value in model.state_dict().items())
    kinds = {type(module) for module in model.modules()}
    assert {Dropout, Linear} <= kinds and kinds.isdisjoint({torch.nn.Dropout, torch.nn.Linear})


# --- refused input ---------------------------------------------------------------------------------


@each(
    ("settings", "named"),
    [
        ({"max_position_embeddings": LENGTH - 1}, [f"--max_seq_length {LENGTH}", LENGTH - 1]),
        ({"vocab_size": 20}, [20]),
        ({"vocab_size": "many"}, ["vocab_size"]),
        ({"hidden_act": "unheard"}, ["unheard"]),
        ({"num_hidden_layers": 3}, ["bert.encoder.layer.2"]),
        ({"intermediate_size": 40}, ["intermediate.dense.weight"]),
    ],
)
def test_configuration_that_does_not_fit(folders, tokenizer, tmp_path, settings, named):
    folder = alter(folders / "model", tmp_path / "altered", **settings)
    with refused(*named):
        load(tokenizer, model_name_or_path=folder)


def test_padded_vocabulary_is_accepted(folders, tokenizer, tmp_path, bert):
    folder = alter(folders / "scratch", tmp_path / "padded", vocab_size=bert.vocab_size + 63)
    assert load(tokenizer, config_name=folder).config.vocab_size == bert.vocab_size + 63


@each("kind", [GPT2Config, FNetConfig])
def test_families_that_cannot_be_right_are_refused(tokenizer, tmp_path, kind):
    kind(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    for name in ("config_name", "model_name_or_path"):
        with refused(tmp_path, kind.model_type):
            load(tokenizer, **{name: tmp_path})


# --- results ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def windows(tokenizer) -> WindowTable:
    """Eight windows: four of 12 tokens, then 18 to 24; their sum exceeds the number of positions."""
    random = np.random.default_rng(0)
    rows = []
    for number in range(8):
        length = 12 if number < 4 else 10 + 2 * number
        start = int(random.integers(6, length - 2)) if number % 4 else 0
        rows.append(
            {
                "input_ids": random.integers(5, len(tokenizer), length).tolist(),
                "context_start": 6,
                "start_position": start,
                "end_position": min(start + 2, length - 2) if start else 0,
            }
        )
    return WindowTable.from_columns({name: [row[name] for row in rows] for name in rows[0]})


@pytest.fixture(scope="module")
def model(folders, tokenizer) -> BertForQuestionAnswering:
    """In eval mode, with weights large enough that mistakes change the results."""
    model = load(tokenizer, config_name=alter(folders / "scratch", folders / "large", initializer_range=0.5))
    return model.eval()


@pytest.mark.realdata
def test_real_windows_padded_and_packed_give_the_same(real_encoder, squad_dir, tmp_path):
    args = ModelArguments(model_name_or_path=str(real_encoder))
    tokenizer = load_tokenizer(args)
    source = squad.open_file(squad_dir / "train-v1.1.json", False)
    table = prepare(source, tokenizer, WindowOptions(max_samples=40), cache_dir=tmp_path)
    found = []
    for padded, pad_to in ((False, None), (True, 0), (True, 384)):
        model = load_model(args, tokenizer, 384, 1, padded).eval()
        losses = window_losses(model, Collator(table, CPU, pad_to)([0, 7, 20, 39]))
        losses.mean().backward()
        found.append((losses.detach(), [weights.grad for weights in model.parameters()]))
    (packed, gradients), *others = found
    for losses, own in others:
        torch.testing.assert_close(losses, packed, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(own, gradients, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_compiled_layers_compute_the_same_in_one_graph(folders, tokenizer, model, windows, monkeypatch):
    """With a GPU's flash attention, which is computed here by tests/gpu_kernels.py."""
    gpu_kernels.register()
    monkeypatch.setattr(gpu_kernels, "LIMITS", False)  # fp32
    monkeypatch.setattr(attention, "choose", lambda *_: attention.by_flash)
    torch._dynamo.reset()
    compiled = load(tokenizer, model_name_or_path=folders / "model")
    compile_layers(compiled)
    compiled.load_state_dict(model.state_dict())  # the names are the same
    torch._dynamo.utils.counters.clear()
    for ids in ([0, 1, 2], [5], [4, 6, 7, 3]):
        batch = Collator(windows, CPU)(ids)
        compiled.train()
        first, second = (window_losses(compiled, batch).detach() for _ in range(2))
        assert not torch.equal(first, second)  # dropout is active
        compiled.eval()
        with torch.no_grad():
            torch.testing.assert_close(
                window_losses(compiled, batch), window_losses(model, batch), rtol=1e-5, atol=1e-6
            )
        for tree in (model, compiled):
            tree.zero_grad()
            window_losses(tree, batch).mean().backward()
        for (name, one), other in zip(model.named_parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(
                one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 3  # in training, in evaluation, and with gradients in evaluation
    assert not counters["graph_break"] and not counters["unimplemented"]
    draw = np.random.default_rng(0)
    for _ in range(50):  # other numbers of windows and of tokens
        batch = Collator(windows, CPU)(draw.permutation(len(windows))[draw.integers(len(windows)) :])
        window_losses(compiled.train(), batch)
    assert counters["stats"]["unique_graphs"] == 3


def test_share_of_no_windows_has_zero_gradients(model, windows):
    batch = Collator(windows, CPU)([])
    model.zero_grad()
    window_losses(model, batch)[: batch.num_windows].sum().backward()
    # None may be missing, since Horovod waits for each.
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_autocast_leaves_weights_gradients_and_logits_in_fp32(model, windows):
    batch = Collator(windows, CPU)([4, 5])
    full = window_losses(model, batch)
    with autocast(CPU, "bf16"):
        rough = window_losses(model, batch)
    assert rough.dtype == torch.float32
    assert 0 < (rough - full).abs().max() < 0.1 * full.abs().max()
    model.zero_grad()
    rough.sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    with autocast(CPU, "fp32"):
        assert torch.equal(window_losses(model, batch), full)


@each(
    ("version", "used"),
    [("2.10.0", True), ("2.13.1+cu130", False), ("2.14.0", True)],
)
def test_cudnns_attention_is_off_where_its_gradients_are_wrong(monkeypatch, version, used):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        set_precision(TrainArguments())
        assert torch.backends.cuda.cudnn_sdp_enabled() == used
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
