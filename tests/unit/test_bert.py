"""The model: its sources, refused input, and packed windows compared with transformers' own results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForQuestionAnswering,
    BertConfig,
    BertForQuestionAnswering,
    BertModel,
    FNetConfig,
    GPT2Config,
)

from hvd_bert.config.settings import ModelArguments
from hvd_bert.data import squad
from hvd_bert.data.collate import Collator
from hvd_bert.data.windows import WindowOptions, WindowTable, prepare
from hvd_bert.errors import UserError
from hvd_bert.model import attention
from hvd_bert.model.bert import (
    compile_layers,
    load_model,
    load_tokenizer,
    span_logits,
    span_losses,
    window_losses,
)
from hvd_bert.model.cpu.dropout import Dropout
from hvd_bert.model.cpu.linear import Linear
from hvd_bert.model.precision import autocast

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


def weights(model) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def alter(folder: Path, target: Path, **settings) -> Path:
    """A copy of a model's folder with a changed configuration."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | settings))
    return target


# --- sources ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source", [{"config_name": "scratch"}, {"model_name_or_path": "encoder"}, {"model_name_or_path": "model"}], ids=str
)
def test_no_pooler_and_all_parameters_are_used(folders, tokenizer, windows, source):
    model = load(tokenizer, **{key: folders / value for key, value in source.items()})
    assert not [name for name, _ in model.named_parameters() if "pooler" in name]
    window_losses(model, Collator(windows, CPU)([0, 1])).sum().backward()
    # Horovod would use zero gradients for unused parameters, and AdamW would decay them.
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_scratch_is_a_function_of_the_seed(folders, tokenizer):
    one, again, other = (weights(load(tokenizer, seed, config_name=folders / "scratch")) for seed in (1, 1, 2))
    assert same(one, again)
    assert not same(one, other)


def test_new_span_head_is_a_function_of_the_seed(folders, tokenizer):
    one, again, other = (weights(load(tokenizer, seed, model_name_or_path=folders / "encoder")) for seed in (1, 1, 2))
    assert same(one, again)
    differing = {name for name in one if not torch.equal(one[name], other[name])}
    assert differing == {"qa_outputs.weight"}
    saved = BertModel.from_pretrained(folders / "encoder").state_dict()
    assert all(torch.equal(one[f"bert.{name}"], value) for name, value in saved.items() if "pooler" not in name)


def test_saved_folder_loads_whole(folders, tokenizer):
    model = load(tokenizer, seed=5, model_name_or_path=folders / "model")
    assert same(weights(model), weights(AutoModelForQuestionAnswering.from_pretrained(folders / "model")))


@pytest.mark.parametrize("source", [{"config_name": "scratch"}, {"model_name_or_path": "model"}], ids=str)
def test_dropout_option(folders, tokenizer, source):
    names = {key: str(folders / value) for key, value in source.items()}
    kept = load_model(ModelArguments(**names), tokenizer, LENGTH, 1)
    none = load_model(ModelArguments(**names, dropout=0.0), tokenizer, LENGTH, 1)
    for model, expected in ((kept, {0.1}), (none, {0.0})):
        assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == expected


def test_tokenizer_is_loaded(folders, tokenizer):
    loaded = load_tokenizer(ModelArguments(config_name="nowhere", tokenizer_name=str(folders / "model")))
    assert loaded.is_fast
    assert loaded("what is the box?")["input_ids"] == tokenizer("what is the box?")["input_ids"]


# --- refused input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_position_embeddings": LENGTH - 1}, f"--max_seq_length {LENGTH}: .* has only {LENGTH - 1} positions"),
        ({"vocab_size": 20}, "Model and vocabulary differ: .* has 20 embeddings"),
        ({"vocab_size": 30522}, "Model and vocabulary differ: .* has 30522 embeddings"),
        ({"vocab_size": "many"}, "cannot be loaded .*vocab_size"),
        ({"num_attention_heads": 3}, "cannot be loaded .*heads"),
        ({"hidden_act": "unheard"}, "cannot be loaded .*unheard"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["config_name", "model_name_or_path"])
def test_configuration_that_does_not_fit(folders, tokenizer, tmp_path, settings, words, kind):
    folder = alter(folders / "model", tmp_path / "altered", **settings)
    with pytest.raises(UserError, match=words):
        load(tokenizer, **{kind: folder})


def test_padded_vocabulary_is_accepted(folders, tokenizer, tmp_path, bert):
    folder = alter(folders / "scratch", tmp_path / "padded", vocab_size=bert.vocab_size + 63)
    assert load(tokenizer, config_name=folder).config.vocab_size == bert.vocab_size + 63


@pytest.mark.parametrize(
    ("settings", "lost"),
    [({"num_hidden_layers": 3}, "bert.encoder.layer.2"), ({"intermediate_size": 40}, "intermediate.dense.weight")],
    ids=str,
)
def test_weights_that_do_not_fit_the_configuration(folders, tokenizer, tmp_path, settings, lost):
    folder = alter(folders / "model", tmp_path / "altered", **settings)
    with pytest.raises(UserError, match=rf"altered lacks weights .*{re.escape(lost)}"):
        load(tokenizer, model_name_or_path=folder)


@pytest.mark.parametrize(("kind", "reason"), [(GPT2Config, "it is a decoder"), (FNetConfig, "padding changes")])
def test_families_that_cannot_be_right_are_refused(tokenizer, tmp_path, kind, reason):
    kind(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    for name in ("config_name", "model_name_or_path"):
        with pytest.raises(UserError, match=f"{tmp_path} is a {kind.model_type} model: {reason}"):
            load(tokenizer, **{name: tmp_path})


@pytest.mark.parametrize("damage", ["cut off", "no weights", "no config", "config cut off", "nothing", "no folder"])
def test_damaged_folder(folders, tokenizer, tmp_path, damage, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder = alter(folders / "model", tmp_path / "damaged")
    weights_file, config_file = folder / "model.safetensors", folder / "config.json"
    if damage == "cut off":
        weights_file.write_bytes(weights_file.read_bytes()[:2000])
    elif damage == "no weights":
        weights_file.unlink()
    elif damage == "no config":
        config_file.unlink()
    elif damage == "config cut off":
        config_file.write_text(config_file.read_text()[:40])
    else:
        for path in folder.iterdir():
            path.unlink()
        if damage == "no folder":
            folder.rmdir()
    with pytest.raises(UserError, match=rf"'{folder}' cannot be loaded \(.+--config sample"):
        load(tokenizer, model_name_or_path=folder)


def test_folder_without_tokenizer(tmp_path, bert):
    bert.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"'{tmp_path}' has no vocabulary"):
        load_tokenizer(ModelArguments(model_name_or_path=str(tmp_path)))


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


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory) -> BertForQuestionAnswering:
    """The same model loaded with transformers, with attention over padded rows."""
    folder = tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder)
    plain = AutoModelForQuestionAnswering.from_pretrained(folder, attn_implementation="eager").eval()
    assert plain.config._attn_implementation != model.config._attn_implementation
    return plain


def padded(windows: WindowTable, ids: list[int]) -> dict[str, torch.Tensor]:
    """The windows as transformers' own collators pad them, with some more columns of padding."""
    rows = windows.arrow.take(ids).to_pydict()
    width = max(map(len, rows["input_ids"])) + 3
    grid = {name: torch.zeros(len(ids), width, dtype=torch.long) for name in ("ids", "types", "mask")}
    for i, (tokens, start) in enumerate(zip(rows["input_ids"], rows["context_start"], strict=True)):
        grid["ids"][i, : len(tokens)] = torch.tensor(tokens)
        grid["types"][i, start : len(tokens)] = 1
        grid["mask"][i, : len(tokens)] = 1
    return {"input_ids": grid["ids"], "token_type_ids": grid["types"], "attention_mask": grid["mask"]}


@pytest.mark.parametrize("ids", [[5], [0, 1, 2, 3], [7, 0, 4], list(range(8))], ids=str)
@torch.no_grad()
def test_logits_equal_those_of_transformers(model, plain, windows, ids):
    starts, ends = span_logits(model, Collator(windows, CPU)(ids))
    inputs = padded(windows, ids)
    expected = plain(**inputs)
    assert starts.shape == ends.shape == (len(ids), int(inputs["attention_mask"].sum(1).max()))
    assert starts.dtype == ends.dtype == torch.float32
    for row, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
        assert starts[row, :length].std() > 0.1
        for found, own in ((starts, expected.start_logits), (ends, expected.end_logits)):
            torch.testing.assert_close(found[row, :length], own[row, :length], rtol=0, atol=1e-5)
            assert (found[row, length:] == float("-inf")).all()


@pytest.mark.parametrize("ids", [[0, 1, 2, 3], [5], [7]], ids=str)
def test_loss_and_gradients_equal_those_of_transformers(model, plain, windows, ids):
    batch = Collator(windows, CPU)(ids)
    losses = window_losses(model, batch)
    assert losses.shape == (len(ids),)
    torch.testing.assert_close(span_losses(*span_logits(model, batch), batch), losses)
    rows = windows.arrow.take(ids).to_pydict()
    inputs = {name: value[:, :-3] for name, value in padded(windows, ids).items()}  # of equal length: no padding
    positions = {f"{end}_positions": torch.tensor(rows[f"{end}_position"]) for end in ("start", "end")}
    own = plain(**inputs, **positions).loss
    torch.testing.assert_close(losses.mean(), own, rtol=1e-5, atol=1e-6)
    for tree, loss in ((model, losses.mean()), (plain, own)):
        tree.zero_grad()
        loss.backward()
    for (name, parameter), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        if ".key.bias" not in name:  # zero in theory
            torch.testing.assert_close(
                parameter.grad, reference.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


# Every kernel that works without a GPU; tests/unit/test_attention.py tests varlen_attn.
KERNELS = [attention.by_window, attention.by_probabilities, attention.by_jagged]


@pytest.fixture(params=KERNELS, ids=lambda kernel: kernel.__name__)
def kernel(request, monkeypatch):
    """Each kernel in turn, instead of the one chosen for this machine."""
    monkeypatch.setattr(attention, "choose", lambda *_: request.param)
    return request.param


def logits_and_gradients(model, batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logits of the windows' own tokens, and the gradients of the mean loss by parameter."""
    model.zero_grad()
    logits = torch.stack(span_logits(model, batch))
    span_losses(*logits, batch).mean().backward()
    return logits[logits != float("-inf")].detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def assert_same_to_rounding(one, other):
    """Compare logits to 1e-5 of the largest and gradients to 1e-4 of each tensor's norm."""
    (logits, gradients), (own_logits, own_gradients) = one, other
    assert (logits - own_logits).abs().max() <= 1e-5 * own_logits.abs().max()
    assert gradients.keys() == own_gradients.keys()
    total = torch.stack([value.norm() for value in own_gradients.values()]).norm()
    for name, own in own_gradients.items():
        # Zero in theory, so only rounding: the keys' biases, and biases that shift all logits of a window equally.
        zero = own.norm() <= 1e-6 * total
        assert not zero or name.endswith((".key.bias", ".output.LayerNorm.bias", "qa_outputs.bias")), name
        assert (gradients[name] - own).norm() <= (1e-6 * total if zero else 1e-4 * own.norm()), name


@pytest.mark.parametrize("pad_to", [0, LENGTH])
@pytest.mark.parametrize("ids", [[5], [7, 0, 4], list(range(8))], ids=str)
def test_padded_and_packed_windows_give_the_same(folders, tokenizer, model, windows, kernel, ids, pad_to):
    by_padding = load(tokenizer, padded=True, config_name=folders / "scratch").eval()
    by_padding.load_state_dict(model.state_dict())
    assert by_padding.config._attn_implementation == "sdpa"
    batch = Collator(windows, CPU, pad_to)(ids)
    assert batch.input_ids.shape == (len(ids), max(pad_to, *batch.lengths))
    starts, ends = span_logits(by_padding, batch)
    assert starts.shape == ends.shape == (len(ids), max(batch.lengths))
    assert_same_to_rounding(
        logits_and_gradients(model, Collator(windows, CPU)(ids)), logits_and_gradients(by_padding, batch)
    )


@pytest.mark.realdata
def test_real_windows_padded_and_packed_give_the_same(real_encoder, squad_dir, tmp_path, kernel):
    args = ModelArguments(model_name_or_path=str(real_encoder))
    tokenizer = load_tokenizer(args)
    source = squad.open_file(squad_dir / "train-v1.1.json", False)
    table = prepare(source, tokenizer, WindowOptions(max_samples=40), cache_dir=tmp_path)
    ids = [0, 7, 20, 39]
    ours, padded = (load_model(args, tokenizer, 384, 1, padded).eval() for padded in (False, True))
    own = logits_and_gradients(ours, Collator(table, CPU)(ids))
    for pad_to in (0, 384):
        assert_same_to_rounding(own, logits_and_gradients(padded, Collator(table, CPU, pad_to)(ids)))


@torch.no_grad()
def test_losses_do_not_depend_on_other_windows(model, windows, kernel):
    together = window_losses(model, Collator(windows, CPU)(list(range(8))))
    alone = torch.cat([window_losses(model, Collator(windows, CPU)([i])) for i in range(8)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


@torch.no_grad()
def test_logits_do_not_depend_on_other_windows(model, windows, kernel):
    together = span_logits(model, Collator(windows, CPU)(list(range(8))))
    for i in range(8):
        alone = span_logits(model, Collator(windows, CPU)([i]))
        for found, own in zip(together, alone, strict=True):
            torch.testing.assert_close(found[i, : own.shape[1]], own[0], rtol=1e-5, atol=1e-5)


def test_layers_are_our_own_with_the_same_names_of_weights(folders, tokenizer, plain):
    model = load(tokenizer, model_name_or_path=folders / "model")
    kinds = {type(module) for module in model.modules()}
    assert {Dropout, Linear} <= kinds
    assert kinds.isdisjoint({torch.nn.Dropout, torch.nn.Linear})
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_compiled_layers_compute_the_same(folders, tokenizer, model, windows):
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
    assert not torch._dynamo.utils.counters["unimplemented"]  # everything was compiled


def test_share_of_no_windows_has_zero_gradients(model, windows):
    batch = Collator(windows, CPU)([])
    model.zero_grad()
    window_losses(model, batch)[: batch.num_windows].sum().backward()
    # None may be missing, since Horovod waits for each.
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_dropout_differs_between_passes_in_training_only(folders, tokenizer, windows):
    model = load(tokenizer, model_name_or_path=folders / "model")
    batch = Collator(windows, CPU)([0, 4])
    for mode in (True, False):
        model.train(mode)
        one, other = (window_losses(model, batch) for _ in range(2))
        assert torch.equal(one, other) is not mode


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
