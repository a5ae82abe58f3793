"""Text classification with every family: packed or padded texts give transformers' own logits and gradients."""

from __future__ import annotations

import torch
from tables import each
from test_families import CONFIGS, LENGTHS, PAD, TRAINED, mesh, small, windows  # noqa: F401  # the last are fixtures
from torch.nn.functional import cross_entropy
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from hvd_bert.data.collate import Collator
from hvd_bert.model import attention
from hvd_bert.model.classifier import class_logits, new_classifier
from hvd_bert.model.families import family_of
from hvd_bert.strategies.fsdp import sharded_copy

CPU = torch.device("cpu")
CLASSES = torch.tensor([0, 2, 1, 1, 0])
HEADS = [name for name in TRAINED if CONFIGS[name] in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING]
PACKED = [name for name in HEADS if family_of(CONFIGS[name]()).packed]
PADDED = [name for name in HEADS if name not in PACKED]
POOLING = {"modernbert": ["cls", "mean"], "ultrabert": ["cls", "mean"]}
CASES = [(name, pooling) for name in PACKED for pooling in POOLING.get(name, [None])]


def models(name: str, padded: bool, pooling: str | None = None) -> tuple:
    """A small classifier as this package makes it, and transformers' own with the same random weights."""
    configs = small(name), small(name)
    for config in configs:
        config.num_labels = 3
        if pooling:
            config.classifier_pooling = pooling
    token_types = getattr(configs[0], "type_vocab_size", 0) >= 2
    ours = new_classifier(configs[0], 0.0, seed=1, padded=padded, token_types=token_types).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in ours.parameters():  # new biases are 0, and new norms 1: mistakes would not show
            weights += 0.1 * torch.randn(weights.shape, generator=generator)
    kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(configs[1])]
    own = kind._from_config(configs[1], attn_implementation="eager")
    own.load_state_dict(ours.state_dict())
    return ours, own.eval()


def transformers_logits(model, windows, extra: int) -> torch.Tensor:  # noqa: F811
    """From inputs as transformers' tokenizers and collators make them."""
    ids = torch.full((len(LENGTHS), max(LENGTHS) + extra), PAD)
    mask, types = torch.zeros_like(ids), torch.zeros_like(ids)
    for i, tokens in enumerate(windows.lists("input_ids", range(len(LENGTHS)))):
        ids[i, : len(tokens)], mask[i, : len(tokens)], types[i, 7 : len(tokens)] = torch.tensor(tokens), 1, 1
    inputs = {"token_type_ids": types} if getattr(model.config, "type_vocab_size", 0) >= 2 else {}
    return model(input_ids=ids, attention_mask=mask, **inputs).logits


def compare(ours, own, batch, windows) -> None:  # noqa: F811
    """Logits to 1e-5 of the largest, gradients to 1e-4 of each tensor's norm."""
    found, expected = class_logits(ours, batch), transformers_logits(own, windows, extra=1)
    assert expected.std() > 0.1  # else mistakes would be rounded away
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    for logits in (found, expected):
        cross_entropy(logits, CLASSES).backward()
    total = torch.stack([weights.grad.norm() for weights in own.parameters() if weights.grad is not None]).norm()
    for (name, weights), reference in zip(ours.named_parameters(), own.parameters(), strict=True):
        assert (weights.grad is None) == (reference.grad is None), name
        if reference.grad is not None:
            limit = max(1e-4 * reference.grad.norm(), 1e-6 * total)  # zero in theory: keys' biases
            assert (weights.grad - reference.grad).norm() <= limit, name


@each(("name", "pooling"), CASES)
def test_packed_texts_give_the_logits_and_gradients_of_transformers(name, pooling, windows):  # noqa: F811
    ours, own = models(name, padded=False, pooling=pooling)
    assert ours.config._attn_implementation == attention.NAME
    compare(ours, own, Collator(windows, CPU)(range(len(LENGTHS))), windows)


@each("name", HEADS)
def test_padded_texts_give_the_logits_and_gradients_of_transformers(name, windows):  # noqa: F811
    ours, own = models(name, padded=True)
    compare(ours, own, Collator(windows, CPU, 0)(range(len(LENGTHS))), windows)


# ALBERT and MobileBERT have a pooler after their layers, ModernBERT takes the mean of a text.
@each("name", ["albert", "mobilebert", "modernbert", "roberta"])
def test_sharded_copies_compute_the_same(name, windows, mesh):  # noqa: F811
    ours, _ = models(name, padded=False, pooling="mean" if name == "modernbert" else None)
    batch = Collator(windows, CPU)(range(len(LENGTHS)))
    expected, found = (class_logits(model, batch) for model in (ours, sharded_copy(ours, mesh)))
    torch.testing.assert_close(found, expected)
    found.mean().backward()
