"""The BERT model: its sources, refused input, and results on packed windows compared with transformers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import gpu_kernels
import numpy as np
import pytest
import torch
from refusals import refused
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForQuestionAnswering,
    BertConfig,
    BertForQuestionAnswering,
    BertModel,
    FNetConfig,
)
from transformers.models.bert.modeling_bert import BertOutput

from hvd_bert.config.settings import ModelArguments, TrainArguments
from hvd_bert.data.collate import Collator
from hvd_bert.data.window_table import WindowTable
from hvd_bert.evaluation.forward import window_losses
from hvd_bert.model import attention
from hvd_bert.model.bert import load_model
from hvd_bert.model.cpu.linear import Linear
from hvd_bert.model.layers import AddAndNorm, JoinedAttention, compile_layers, place
from hvd_bert.model.precision import autocast, set_precision

LENGTH = 32  # max_seq_length of these tests
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bert(tokenizer) -> BertConfig:
    return BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=64,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory, bert, tokenizer) -> Path:
    """Save models: scratch (only a configuration), encoder (with a pooler, without a span head), model (complete)."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    bert.save_pretrained(folder / "scratch")
    BertModel(bert).save_pretrained(folder / "encoder")
    BertForQuestionAnswering(bert).save_pretrained(folder / "model")
    for name in ("scratch", "encoder", "model"):
        tokenizer.save_pretrained(folder / name)
    return folder


def load(tokenizer, seed: int = 1, compiled: bool = False, **names) -> BertForQuestionAnswering:
    model = load_model(ModelArguments(**{name: str(value) for name, value in names.items()}), tokenizer, LENGTH, seed)
    place(model, CPU, compiled)
    return model


# --- sources ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source", [{"config_name": "scratch"}, {"model_name_or_path": "encoder"}, {"model_name_or_path": "model"}]
)
def test_no_pooler_and_all_parameters_are_used(folders, tokenizer, windows, source):
    model = load(tokenizer, **{key: folders / value for key, value in source.items()})
    assert not [name for name, _ in model.named_parameters() if "pooler" in name]
    window_losses(model, Collator(windows, CPU)([0, 1])).sum().backward()
    # For an unused parameter Horovod would send a zero gradient, and AdamW would decay the parameter.
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_new_weights_are_a_function_of_the_seed(folders, tokenizer):
    for source in ({"config_name": "scratch"}, {"model_name_or_path": "encoder"}):
        names = {key: folders / value for key, value in source.items()}
        first, again, other = (load(tokenizer, seed, **names).state_dict() for seed in (1, 1, 2))
        assert all(torch.equal(first[name], again[name]) for name in first)
        differing = {name for name in first if not torch.equal(first[name], other[name])}
        assert len(differing) > 1 if "config_name" in source else differing == {"qa_outputs.weight"}
    saved = BertModel.from_pretrained(folders / "encoder").state_dict()
    assert all(torch.equal(first[f"bert.{name}"], value) for name, value in saved.items() if "pooler" not in name)


def test_all_saved_weights_are_loaded_into_our_layers(folders, tokenizer):
    model = load(tokenizer, seed=5, model_name_or_path=folders / "model")
    plain = AutoModelForQuestionAnswering.from_pretrained(folders / "model").state_dict()
    assert model.state_dict().keys() == plain.keys()
    assert all(torch.equal(value, plain[name]) for name, value in model.state_dict().items())
    kinds = {type(module) for module in model.modules()}
    assert {AddAndNorm, Linear} <= kinds and kinds.isdisjoint({BertOutput, torch.nn.Linear})


# --- refused input ---------------------------------------------------------------------------------


def test_a_family_whose_results_depend_on_padding_is_refused(tokenizer, tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 64}
    FNetConfig(vocab_size=len(tokenizer), **sizes).save_pretrained(tmp_path)
    with refused(tmp_path, "padding changes the results of fnet models"):
        load(tokenizer, config_name=tmp_path)


# --- results ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def windows(tokenizer) -> WindowTable:
    """Make eight windows of 12 to 24 tokens, together more tokens than the model has positions."""
    random = np.random.default_rng(0)
    lengths = [12, 12, 12, 12, 18, 20, 22, 24]
    starts = [0, 6, 8, 9, 0, 16, 7, 21]
    ids = [random.integers(5, len(tokenizer), length).tolist() for length in lengths]
    ends = [start + 1 if start else 0 for start in starts]
    columns = {"input_ids": ids, "context_start": [6] * 8, "start_position": starts, "end_position": ends}
    return WindowTable.from_columns(columns)


@pytest.fixture(scope="module")
def model(folders, tokenizer) -> BertForQuestionAnswering:
    """Make a model in eval mode, with weights so large that mistakes change the results."""
    (folders / "large").mkdir()
    config = BertConfig.from_pretrained(folders / "scratch", initializer_range=0.5)
    config.vocab_size += 63  # a padded vocabulary
    config.save_pretrained(folders / "large")
    return load(tokenizer, config_name=folders / "large").eval()


@pytest.mark.slow
def test_compiled_layers_compute_the_same_in_one_graph(folders, tokenizer, model, windows, monkeypatch):
    """Use the GPU's flash attention, emulated by tests/gpu_kernels.py."""
    gpu_kernels.register()
    monkeypatch.setattr(gpu_kernels, "LIMITS", False)  # allows fp32
    monkeypatch.setattr(attention, "choose", lambda *_: attention.by_flash)
    torch._dynamo.reset()
    compiled = load(tokenizer, compiled=True, config_name=folders / "large")
    compile_layers(compiled, None)
    assert all(isinstance(layer.attention.self, JoinedAttention) for layer in compiled.bert.encoder.layer)
    compiled.load_state_dict(model.state_dict())  # parameter names are equal, too
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
        gradients = ([weights.grad for weights in tree.parameters()] for tree in (model, compiled))
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)  # atol for key biases: their exact gradient is 0
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 3  # training, eval mode, eval mode with gradients
    assert not counters["graph_break"] and not counters["unimplemented"]
    draw = np.random.default_rng(0)
    for _ in range(50):  # other numbers of windows and tokens add no graph
        batch = Collator(windows, CPU)(draw.permutation(len(windows))[draw.integers(len(windows)) :])
        window_losses(compiled.train(), batch)
    assert counters["stats"]["unique_graphs"] == 3
    products = {}
    for precision in ("fp32", "bf16"):
        with torch.compiler.set_stance("force_eager"), autocast(CPU, precision), Products() as counted:
            window_losses(compiled, batch)
        products[precision] = counted.count
    assert products["fp32"] - products["bf16"] == 2 * len(compiled.bert.encoder.layer)  # bf16 joins query, key, value
    assert pickle.dumps(compiled)


class Products(TorchDispatchMode):
    """Counts matrix products of activations and weights."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.mm)
        return func(*args, **(kwargs or {}))


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


@pytest.mark.parametrize(("version", "used"), [("2.10.0", True), ("2.13.1+cu130", False), ("2.14.0", True)])
def test_cudnns_attention_is_off_where_its_gradients_are_wrong(monkeypatch, version, used):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        set_precision(TrainArguments())
        assert torch.backends.cuda.cudnn_sdp_enabled() == used
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
