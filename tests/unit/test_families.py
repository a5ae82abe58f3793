"""Encoder families: the same results as transformers, packed or padded, and the same FLOP as torch's counter."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator

import families_page
import numpy as np
import pytest
import torch
from refusals import refused
from safetensors.torch import save_file
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForQuestionAnswering
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSIFIERS
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING as TAGGERS

from hvd_bert.config.settings import ModelArguments
from hvd_bert.data.collate import BUCKET, Bucket, Collator
from hvd_bert.data.window_table import WindowTable
from hvd_bert.evaluation.forward import head_logits, span_logits, window_losses
from hvd_bert.model import attention
from hvd_bert.model.bert import configure, load_model, new_model, span_losses
from hvd_bert.model.cpu.linear import Linear
from hvd_bert.model.families import FAMILIES, adapt, check_precision, choose_padding, max_tokens, model_class
from hvd_bert.model.flops import forward_flops
from hvd_bert.model.layers import JoinedAttention, compile_layers, place
from hvd_bert.model.loading import load_config, load_encoder, num_weights
from hvd_bert.model.lora import FILES, add_adapters, merge
from hvd_bert.model.precision import autocast
from hvd_bert.model.unlisted import check_unlisted
from hvd_bert.strategies.fsdp import sharded_copy
from hvd_bert.strategies.word_rows import word_embedding

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
PAD, CLS, SEP, QUESTION, FIRST_TOKEN, VOCABULARY = 1, 2, 3, 4, 5, 60
LENGTHS = [12, 17, 11, 20, 12]
# Sizes, under all names that configurations use. With these, local attention is narrower than the windows.
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "embedding_size": 16,
    "pad_token_id": PAD,
    "sep_token_id": SEP,
    "question_token_id": QUESTION,
    "type_vocab_size": 2,
    "num_key_value_heads": 2,
    "attention_window": 4,
    "sliding_window": 3,
    "input_embedding_size": 16,
    "local_attention": 6,
    "num_hidden_groups": 2,
}

CONFIGS = {name: CONFIG_MAPPING[name] for name in FAMILIES if name in CONFIG_MAPPING}
LACKING = sorted(FAMILIES.keys() - CONFIGS.keys())  # missing in the installed transformers
TRAINED = list(CONFIGS)
PACKED = [name for name in TRAINED if FAMILIES[name].packed]
PADDED = [name for name in TRAINED if name not in PACKED]
POOLING = {"modernbert": ["cls", "mean"], "ultrabert": ["cls", "mean"]}
CLASSIFIED = [
    (name, CLASSIFIERS, how) for name in TRAINED if CONFIGS[name] in CLASSIFIERS for how in POOLING.get(name, [None])
]
TAGGED = [(name, TAGGERS, None) for name in TRAINED if CONFIGS[name] in TAGGERS]


def small(name: str):
    kind = CONFIGS[name]
    known = kind().to_dict().keys() | kind.attribute_map.keys()
    return kind(**{key: value for key, value in SMALL.items() if key in known})


def models(name: str, padded: bool = False, pooling: str | None = None, heads=None) -> tuple:
    """Make two small models with the same random weights: this package's and transformers'.

    `heads`: None for a span head; CLASSIFIERS or TAGGERS for a head for three classes.
    """
    configs = small(name), small(name)
    for config in configs:
        config.num_labels = 3 if heads else 2
        if pooling:
            config.classifier_pooling = pooling
    if heads:
        token_types = getattr(configs[0], "type_vocab_size", 0) >= 2
        kind = heads[type(configs[0])]
        configure(configs[0], kind, 0.0, padded)
        torch.manual_seed(1)
        ours = adapt(kind(configs[0]), token_types).eval()
    else:
        ours = new_model(configs[0], 0.0, seed=1, padded=padded).eval()
    generator = torch.Generator().manual_seed(1)
    for weights in ours.parameters():  # the initial biases (0) and norms (1) would hide mistakes
        with torch.no_grad():
            weights += 0.1 * torch.randn(weights.shape, generator=generator)
    kind = heads[type(configs[1])] if heads else model_class(configs[1])
    theirs = kind._from_config(configs[1], attn_implementation="eager")
    theirs.load_state_dict(ours.state_dict())
    place(ours, CPU)
    return ours, theirs.eval()


@pytest.fixture(scope="module")
def windows() -> WindowTable:
    """Make windows `CLS q q q QUESTION SEP SEP context SEP`: Splinter needs QUESTION, Longformer needs three SEP."""
    random = np.random.default_rng(0)
    ids = [random.integers(FIRST_TOKEN, VOCABULARY, length) for length in LENGTHS]
    for tokens in ids:
        tokens[[0, 4, 5, 6, -1]] = CLS, QUESTION, SEP, SEP, SEP
    ids[2][8] = PAD  # a text may contain "<pad>"
    starts = [int(random.integers(7, length - 2)) for length in LENGTHS]
    return WindowTable.from_columns(
        {
            "input_ids": [tokens.tolist() for tokens in ids],
            "context_start": [7] * len(ids),
            "start_position": starts,
            "end_position": [start + 1 for start in starts],
        }
    )


def collator(name: str, windows: WindowTable) -> Collator:
    return Collator(windows, CPU, None if name in PACKED else 0)


def transformers_logits(model, windows: WindowTable):
    """Run a transformers model on padded windows. Returns span logits [2, B, T], -inf at padding, or class rows."""
    rows = windows.lists("input_ids", range(len(LENGTHS)))
    ids = torch.full((len(rows), max(LENGTHS) + 1), PAD)
    mask, types = torch.zeros_like(ids), torch.zeros_like(ids)
    for i, tokens in enumerate(rows):
        ids[i, : len(tokens)], mask[i, : len(tokens)], types[i, 7 : len(tokens)] = torch.tensor(tokens), 1, 1
    inputs = {"token_type_ids": types} if getattr(model.config, "type_vocab_size", 0) >= 2 else {}
    output = model(input_ids=ids, attention_mask=mask, **inputs)
    if "logits" in output:
        return class_rows(output.logits)
    logits = torch.stack([output.start_logits, output.end_logits])
    return logits.masked_fill(mask == 0, -torch.inf)[..., : max(LENGTHS)]


def class_rows(logits):
    """Return class logits as rows without padding: one per text, or one per token of all texts."""
    if logits[0].ndim == 1:
        return logits
    return torch.cat([rows[:length] for rows, length in zip(logits, LENGTHS, strict=True)])


def compare(models, windows: WindowTable, pad_to: int | None = None, spans: bool = True) -> None:
    """Compare both models' logits to 1e-5 of the largest logit, and gradients to 1e-4 of each tensor's norm."""
    (ours, theirs), batch = models, Collator(windows, CPU, pad_to)(range(len(LENGTHS)))
    found = torch.stack(span_logits(ours, batch)) if spans else class_rows(head_logits(ours, batch))
    expected = transformers_logits(theirs, windows)
    real = expected != -torch.inf
    assert torch.equal(found != -torch.inf, real)
    assert expected[real].std() > 0.1  # smaller logits could hide mistakes
    assert (found[real] - expected[real]).abs().max() <= 1e-5 * expected[real].abs().max()
    if spans:
        span_losses(*found, batch.starts, batch.ends).mean().backward()
        labels = torch.stack([batch.starts, batch.ends])
        (sum(cross_entropy(side, label) for side, label in zip(expected, labels, strict=True)) / 2).backward()
    else:
        for logits in (found, expected):
            cross_entropy(logits, torch.arange(len(logits)) % 3).backward()
    total = torch.stack([weights.grad.norm() for weights in theirs.parameters() if weights.grad is not None]).norm()
    for (name, weights), reference in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if weights.requires_grad and reference.grad is not None:
            limit = max(1e-4 * reference.grad.norm(), 1e-6 * total)  # key biases: the exact gradient is 0
            assert (weights.grad - reference.grad).norm() <= limit, name
        assert reference.grad is not None or weights.grad is None, name


@pytest.mark.parametrize("kernel", [attention.by_window, attention.by_probabilities, attention.by_jagged])
@pytest.mark.parametrize("name", PACKED)
def test_packed_windows_give_the_logits_and_gradients_of_transformers(name, kernel, windows, monkeypatch):
    def chosen(device, dtype, dropout, head_size, local):
        return attention.by_window if local and kernel is attention.by_jagged else kernel

    monkeypatch.setattr(attention, "choose", chosen)
    both = models(name)
    assert both[0].config._attn_implementation == attention.NAME
    compare(both, windows)


@pytest.mark.parametrize("name", TRAINED)
def test_padded_windows_give_the_logits_and_gradients_of_transformers(name, windows):
    compare(models(name, padded=True), windows, pad_to=0)


@pytest.mark.parametrize("name", ["squeezebert", "luke", "bart"])
def test_unlisted_family_is_trained_on_padded_windows_without_our_layers(name, windows, monkeypatch, caplog):
    monkeypatch.setitem(CONFIGS, name, CONFIG_MAPPING[name])
    both = ours, _ = models(name, padded=True)
    compare(both, windows, pad_to=0)
    assert {type(part).__module__.split(".")[0] for part in ours.modules()} == {"torch", "transformers"}
    unused = [key for key, weights in ours.named_parameters() if weights.requires_grad == (weights.grad is None)]
    assert not unused, "no strategy could average their gradients"
    caplog.set_level("INFO")
    assert choose_padding(ours.config, "none") == "longest"
    assert len(caplog.messages) == 1 and name in caplog.text
    assert [choose_padding(small(listed), "none") for listed in ("bert", "deberta")] == ["none", "longest"]


# YOSO hashes tokens; LUKE's positions start after pad_token_id; LXMERT needs an image.
@pytest.mark.parametrize(
    ("name", "tokens", "reason"), [("yoso", 8, "padding"), ("luke", 63, "index"), ("lxmert", 8, "visual_feats")]
)
def test_unlisted_family_that_fails_is_refused(name, tokens, reason, monkeypatch):
    monkeypatch.setitem(CONFIGS, name, CONFIG_MAPPING[name])
    torch.manual_seed(0)
    model = adapt(model_class(small(name))(small(name)), True)
    with pytest.raises(ValueError, match=f"{reason}.* {name}|{name} .*{reason}"):
        check_unlisted(model, tokens)


@pytest.mark.parametrize("pad_to", [None, 0], ids=["packed batch", "padded batch"])
@pytest.mark.parametrize(("name", "heads", "pooling"), CLASSIFIED + TAGGED)
def test_other_heads_give_the_logits_and_gradients_of_transformers(name, heads, pooling, pad_to, windows):
    if name in PACKED or pad_to is not None:  # other families are only padded
        compare(models(name, pad_to is not None, pooling, heads), windows, pad_to, spans=False)


def test_other_heads_of_an_unlisted_family_are_tried(monkeypatch):
    monkeypatch.setitem(CONFIGS, "squeezebert", CONFIG_MAPPING["squeezebert"])
    config = small("squeezebert")
    model = adapt(CLASSIFIERS[type(config)](config), True)
    check_unlisted(model, 40)
    with torch.no_grad():
        model.classifier.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="padding"):
        check_unlisted(model, 40)


@pytest.mark.parametrize("name", TRAINED)
def test_encoder_without_a_head_is_loaded(name, tokenizer, tmp_path):
    config = small(name)
    config.vocab_size = len(tokenizer)
    whole = model_class(config)(config)
    whole.base_model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    found = load_model(ModelArguments(model_name_or_path=str(tmp_path)), tokenizer, 32, seed=1)
    expected = whole.base_model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in found.base_model.state_dict().items())
    assert len(found.state_dict()) == len(whole.state_dict()) > len(expected)
    with refused(tmp_path):
        load_model(ModelArguments(model_name_or_path=str(tmp_path)), tokenizer, 32, seed=1, needs_head=True)


@pytest.mark.parametrize("name", [name for name in TRAINED if not FAMILIES[name].only_fp32])
def test_half_precision(name, windows):
    model = new_model(small(name), 0.1, seed=1).train()
    with autocast(CPU, "bf16"):
        window_losses(model, collator(name, windows)(range(len(LENGTHS)))).mean().backward()
    assert all(weights.grad.isfinite().all() for weights in model.parameters() if weights.grad is not None)


def test_layers_with_hooks_and_of_other_libraries_are_not_replaced():
    model, called = new_model(small("bert"), 0.0, seed=1), []
    layer = model.bert.encoder.layer[0]
    prune.l1_unstructured(layer.intermediate.dense, "weight", 0.5)
    layer.output.register_forward_hook(lambda *_: called.append(True))
    quantized = torch.ao.nn.quantized.dynamic.Linear(16, 16)
    layer.attention.output.dense = quantized
    place(model, CPU)
    model(input_ids=torch.tensor([[CLS, FIRST_TOKEN, SEP]]))
    assert called and type(layer.intermediate.dense) is torch.nn.Linear
    assert layer.attention.output.dense is quantized and type(layer.attention.self.query) is Linear


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.attention])
def test_query_key_and_value_as_one_product(name, windows):
    batch, separate = Collator(windows, CPU)(range(len(LENGTHS))), new_model(small(name), 0.0, seed=1).eval()
    joined = copy.deepcopy(separate)
    place(joined, CPU, compiled=True)
    assert sum(type(part) is JoinedAttention for part in joined.modules()) == separate.config.num_hidden_layers
    assert torch.equal(window_losses(joined, batch), window_losses(separate, batch))  # fp32 is not joined
    gradients = []
    for model in (separate, joined):
        with autocast(CPU, "bf16"):
            window_losses(model, batch).mean().backward()
        gradients.append(torch.cat([weights.grad.flatten() for weights in model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() <= 0.02 * gradients[0].norm()
    assert joined.state_dict().keys() == separate.state_dict().keys()
    dropping = new_model(small(name), None, seed=1, attention_dropout=0.5).train()
    place(dropping, CPU, compiled=True)
    assert not torch.equal(*(window_losses(dropping, batch) for _ in "ab"))


def test_family_that_transformers_lacks_is_refused_with_advice_to_upgrade(tmp_path, monkeypatch):
    monkeypatch.delitem(CONFIG_MAPPING._mapping, "ultrabert", raising=False)
    (tmp_path / "config.json").write_text('{"model_type": "ultrabert"}')
    with refused(tmp_path, "ultrabert", "pip install --upgrade transformers"):
        load_config(str(tmp_path), ModelArguments(model_name_or_path=str(tmp_path)))


# --- limits and settings ---------------------------------------------------------------------------


def test_number_of_positions():
    assert (max_tokens(small("bert")), max_tokens(small("roberta"))) == (64, 62)
    with pytest.raises((IndexError, RuntimeError)):
        model_class(small("roberta"))(small("roberta"))(input_ids=torch.full((1, 63), FIRST_TOKEN))


@pytest.mark.parametrize("name", TRAINED)
def test_number_of_weights_and_rates_of_dropout(name):
    config = small(name)
    config.num_labels = 3  # must not count: the head is for spans
    assert num_weights(config, model_class(config)) == sum(weights.numel() for weights in models(name)[1].parameters())
    model = new_model(small(name), 0.25, seed=1)
    module_rates = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    assert module_rates == ({0.25} if name != "ultrabert" else set())  # it has dropout in attention only
    config_rates = {value for key, value in model.config.to_dict().items() if "dropout" in key and value is not None}
    assert config_rates == {0.25}
    config = new_model(small(name), 0.25, seed=1, attention_dropout=0.5).config.to_dict()
    given = {("attention" in key, value) for key, value in config.items() if "dropout" in key and value is not None}
    assert (True, 0.5) in given and given <= {(True, 0.5), (False, 0.25)}


@pytest.mark.parametrize("name", TRAINED)
def test_adapters_begin_with_the_models_results_and_are_merged(name, windows, tmp_path):
    model, batch = new_model(small(name), 0.0, seed=1).eval(), collator(name, windows)([1, 0])
    before, logits = dict(model.named_parameters()), span_logits(model, batch)[0]
    wrapper = add_adapters(model, ModelArguments(lora_rank=2), seed=1)
    torch.testing.assert_close(span_logits(model, batch)[0], logits)
    window_losses(model, batch).sum().backward()
    trained = [name for name, weights in model.named_parameters() if weights.requires_grad]
    assert all(model.get_parameter(name).grad is not None for name in trained)
    assert all("lora_" in name or not name.startswith(f"{model.base_model_prefix}.") for name in trained)
    model.config.save_pretrained(tmp_path)
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with refused("--lora_rank"):  # adapters are not merged yet
        load_encoder(type(model), ModelArguments(model_name_or_path=str(tmp_path)), model.config, needs_head=False)
    assert merge(wrapper).keys() == set(FILES) and dict(model.named_parameters()).keys() == before.keys()


@pytest.mark.parametrize("name", TRAINED)
def test_copies_keep_the_adapted_inputs_and_the_saved_class(name, windows, tmp_path):
    ours, _ = models(name)
    batch = collator(name, windows)([1, 0])
    assert word_embedding(ours) is not None, "their gradient could not be sent as rows"
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(span_logits(copied, batch)[0], span_logits(ours, batch)[0])
    ours.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [model_class(ours.config).__name__]


def test_precision_that_a_family_fails_with_is_refused():
    check_precision(small("deberta"), "fp32")
    with refused("--bf16", "deberta"):
        check_precision(small("deberta"), "bf16")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


# ALBERT has nested layers and a pooler, DeBERTa is padded, and ModernBERT's classifier uses the mean over tokens.
@pytest.mark.filterwarnings("error:.*returned a view tensor")  # FSDP would miss in-place operations
@pytest.mark.parametrize("classes", [False, True])
@pytest.mark.parametrize("name", ["albert", "modernbert", "roberta", "deberta-v2"])
def test_sharded_copies_compute_the_same(name, classes, windows, mesh):
    pooling = "mean" if name == "modernbert" and classes else None
    ours, _ = models(name, name in PADDED, pooling, CLASSIFIERS if classes else None)
    batch = collator(name, windows)(range(len(LENGTHS)))
    outputs = head_logits if classes else window_losses
    expected, found = (outputs(model, batch) for model in (ours, sharded_copy(ours, mesh)))
    torch.testing.assert_close(found, expected)
    found.mean().backward()


@pytest.mark.parametrize("heads", [None, CLASSIFIERS, TAGGERS], ids=["spans", "texts", "tokens"])
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_windows_that_pad_a_batch_to_a_bucket_change_no_logits(windows, name, heads):
    model = models(name, heads=heads)[0]
    bucket = Bucket(windows=len(LENGTHS) + 1, longest=60)
    packed, padded = (Collator(windows, CPU, bucket=kind)(range(len(LENGTHS))) for kind in (None, bucket))
    assert padded.num_positions == BUCKET == sum(padded.lengths) and padded.lengths[: len(LENGTHS)] == LENGTHS
    assert max(padded.lengths) == padded.longest == 60
    ends = [0, *np.cumsum(padded.lengths)]
    assert padded.cu_seqlens.tolist() == ends + [BUCKET] * (bucket.borders - len(ends))
    found, expected = (
        head_logits(model, batch) if heads else torch.stack(span_logits(model, batch)) for batch in (padded, packed)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_layers_of_another_build_are_not_compiled():
    compile_layers(models("roberta")[0], None)
    with refused("--torch_compile", "distilbert"):
        compile_layers(models("distilbert")[0], None)


# --- the page --------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(LACKING), reason=f"the page lists {LACKING}, which this transformers lacks")
def test_the_page_of_families_is_current():
    written = families_page.PAGE.read_text(encoding="utf-8")
    assert written == families_page.page(), "run `python scripts/families_page.py`"


RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
PUBLISHED = {"deberta": RELATIVE, "deberta-v2": RELATIVE | {"position_buckets": 8, "conv_kernel_size": 3}}
WINDOWS, LENGTH = 3, 48


def counted(model) -> int:
    """Count the FLOP of a forward and backward pass over padded windows with torch's counter."""
    tokens = torch.full((WINDOWS, LENGTH), 5)
    tokens[:, [0, 3, 10, -1]] = torch.tensor([SEP, QUESTION, SEP, SEP])  # Longformer needs SEPs
    with FlopCounterMode(display=False) as counter:
        output = model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
        (output.start_logits + output.end_logits).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", TRAINED)
def test_flop_formula_agrees_with_torchs_counter(name):
    config = small(name)
    for key, value in PUBLISHED.get(name, {}).items():
        setattr(config, key, value)
    model = model_class(config)._from_config(config, attn_implementation="eager")
    # The formula approximates Splinter's head (mostly one token per window) and DeBERTa's position projections.
    limit = {"splinter": 0.1, "deberta": 0.11}.get(name, 0.01)
    assert forward_flops(model).training([LENGTH] * WINDOWS) == pytest.approx(counted(model), rel=limit)


def test_crossover_of_bert_base():
    with torch.device("meta"):
        assert forward_flops(BertForQuestionAnswering(BertConfig())).crossover == 4608


def test_frozen_weights_have_no_gradients():
    config = small("bert")
    config.num_hidden_layers = 12
    model = model_class(config)._from_config(config, attn_implementation="eager")
    add_adapters(model, ModelArguments(lora_rank=2), seed=1)
    # The tolerance covers the first layer's input, which needs no gradient.
    assert forward_flops(model).training([LENGTH] * WINDOWS) == pytest.approx(counted(model), rel=0.03)
