"""The table of encoder families: which inputs they need, and which of their layers this package replaces.

To add a family, add a row to `FAMILIES`, and a model size to tests/unit/test_families.py, whose tests then compare the
family with transformers. Models of all other families are trained with transformers' layers, on padded windows.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
)

from hvd_bert.errors import UserError, log
from hvd_bert.model.precision import evaluating


@dataclass(frozen=True)
class Family:
    """A family of models with the same `model_type` in config.json.

    Attributes:
        packed: Whether windows can be packed: attention uses transformers' AttentionInterface, the model takes
            position_ids, and no other layer mixes the tokens of a row. Other families' windows are padded.
        attention: Class name of the self-attention, if JoinedAttention can replace it; else "".
        add_and_norm: Class names of the layers that AddAndNorm can replace.
        positions_after_padding: Whether positions start at pad_token_id + 1, as in RoBERTa.
        question_attends_globally: Whether the question's tokens attend to all tokens, as in Longformer.
        only_fp32: Whether half precision is refused, since the attention mask overflows in it.
        since: First transformers version with this family, if pyproject.toml allows older versions; else "".
    """

    packed: bool = False
    attention: str = ""
    add_and_norm: tuple[str, ...] = ()
    positions_after_padding: bool = False
    question_attends_globally: bool = False
    only_fp32: bool = False
    since: str = field(default="", compare=False)


def _norms(name: str) -> tuple[str, ...]:
    return f"{name}SelfOutput", f"{name}Output"


def _like_bert(name: str) -> Family:
    """Make the row of a family with BERT's layers. `name`: prefix of its class names."""
    return Family(packed=True, attention=f"{name}SelfAttention", add_and_norm=_norms(name))


def _like_roberta(name: str) -> Family:
    return replace(_like_bert(name), positions_after_padding=True)


_PACKED, _PADDED = Family(packed=True), Family()

FAMILIES: dict[str, Family] = {
    "albert": _PACKED,
    "bert": _like_bert("Bert"),
    "camembert": _like_roberta("Camembert"),
    "data2vec-text": _like_roberta("Data2VecText"),
    "deberta": Family(add_and_norm=_norms("Deberta"), only_fp32=True),
    "deberta-v2": Family(add_and_norm=_norms("DebertaV2")),
    "distilbert": _PACKED,
    "electra": _like_bert("Electra"),
    "ernie": _like_bert("Ernie"),
    "jina_embeddings_v3": _PACKED,
    "longformer": Family(
        add_and_norm=_norms("Longformer"), positions_after_padding=True, question_attends_globally=True
    ),
    "megatron-bert": _PADDED,
    "modernbert": _PACKED,
    "mpnet": Family(add_and_norm=("MPNetOutput",), positions_after_padding=True),
    "rembert": Family(add_and_norm=_norms("RemBert")),
    "roberta": _like_roberta("Roberta"),
    "roberta-prelayernorm": replace(_like_roberta("RobertaPreLayerNorm"), add_and_norm=()),
    "roformer": Family(add_and_norm=_norms("RoFormer")),
    "splinter": Family(add_and_norm=_norms("Splinter")),
    "ultrabert": Family(packed=True, since="5.20"),
    "xlm-roberta": _like_roberta("XLMRoberta"),
    "xlm-roberta-xl": replace(_like_roberta("XLMRobertaXL"), add_and_norm=()),
}


# The end of a message about a model that cannot be used.
ENCODERS = f"Name an encoder such as those of the families {', '.join(FAMILIES)}."


def described(config: Any) -> str:
    """Describe a model by its configuration, such as "a gpt2 model, a decoder"."""
    return ", ".join(filter(None, [f"a {config.model_type} model", generates(config)]))


def generates(config: Any) -> str:
    """Return "an encoder-decoder" or "a decoder" for a model that generates text, "" for an encoder."""
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder"
    kind, encoders = type(config), {*FAMILIES, "xlnet"}  # XLNet's attention is not causal
    causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING and kind not in MODEL_FOR_MASKED_LM_MAPPING
    return "a decoder" if causal and config.model_type not in encoders else ""


def find_family(config: Any) -> Family:
    """Return the family of a model's configuration. Unlisted families get padded windows and unchanged layers."""
    return FAMILIES.get(config.model_type, _PADDED)


def model_class(config: Any) -> Any:
    """Return transformers' class of an encoder with a span head for a configuration."""
    return MODEL_FOR_QUESTION_ANSWERING_MAPPING[type(config)]


def class_with_head(head: Any, config: Any, source: str) -> Any:
    """Return transformers' model class with a head for a configuration. Raises UserError if there is no such class.

    `head`: an auto class such as AutoModelForSequenceClassification. `source`: the model's name for messages.
    """
    if type(config) not in head._model_mapping:
        raise UserError(f"{source} is {described(config)}: transformers has no {head.__name__} for it. {ENCODERS}")
    return head._model_mapping[type(config)]


def max_tokens(config: Any) -> int:
    """Return the maximum window length of a model: its number of positions, or sys.maxsize without a limit."""
    offset = config.pad_token_id + 1 if find_family(config).positions_after_padding else 0
    positions = getattr(config, "max_position_embeddings", None) or -1  # XLNet and T5 have no limit
    return sys.maxsize if positions < 0 else int(positions) - offset


def choose_padding(config: Any, padding: str, unit: str = "windows") -> str:
    """Return `padding` (--padding), or "longest" if it is "none" and the family does not support packed windows.

    Logs families whose windows must be padded. `unit`: name of the examples in messages.
    """
    name = config.model_type
    if name not in FAMILIES:
        log.info("%s is not a listed family: %s are padded, and no layer is replaced by a faster one.", name, unit)
    elif padding == "none" and not find_family(config).packed:
        log.info("%s models take no packed %s: they are padded to the longest of the batch.", name, unit)
    return "longest" if padding == "none" and not find_family(config).packed else padding


def check_precision(config: Any, precision: str) -> None:
    """Raise UserError if the model's family does not support the precision ("fp32", "bf16" or "fp16")."""
    if precision != "fp32" and find_family(config).only_fp32:
        raise UserError(
            f"--{precision} does not work with {config.model_type} models, whose attention overflows in it. Omit the"
            " flag, or name another model."
        )


def adapt(model: Any, token_types: bool) -> Any:
    """Add hooks so that the model accepts this trainer's batches, packed or padded. Returns the model.

    `token_types`: whether to pass token types to the model.
    """
    model.takes_token_types, family = token_types, find_family(model.config)
    if "ForQuestionAnswering" not in type(model).__name__:
        # Longformer's other heads choose by themselves which tokens attend globally.
        family = replace(family, question_attends_globally=False)
    if not family.packed or family.positions_after_padding or not token_types:  # otherwise its inputs are BERT's
        model.register_forward_pre_hook(partial(_family_inputs, family), with_kwargs=True)
    if type(model).__name__.endswith("ForSequenceClassification"):
        layers = getattr(model.base_model, "encoder", model.base_model)  # the module before the pooler
        mean = getattr(model.config, "classifier_pooling", "cls") == "mean"  # ModernBERT's setting
        layers.register_forward_hook(partial(_one_token_per_text, mean=mean), with_kwargs=True)
    return model


def try_once(model: Any) -> None:
    """Run the encoder once, on a short window. If its configuration is wrong, an exception of any type propagates."""
    config = model.config
    length = int(np.max(getattr(config, "attention_window", 2)))  # Longformer pads to multiples of its window
    tokens = torch.full((1, length), config.vocab_size - 1, device=model.device)  # 0 or 1 may be padding
    if find_family(config).positions_after_padding:  # the window may exceed the positions
        tokens[:, max_tokens(config) :] = config.pad_token_id
    with evaluating(model):
        model.base_model(input_ids=tokens)


def _family_inputs(family: Family, model: Any, _: Any, inputs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Forward pre-hook: convert the arguments from `evaluation.forward.model_inputs` to the family's."""
    inputs = {"token_type_ids": None, "attention_mask": None, **inputs}
    ids, types, mask = inputs["input_ids"], inputs["token_type_ids"], inputs["attention_mask"]
    if types is None or not model.takes_token_types:
        del inputs["token_type_ids"]
    if family.question_attends_globally and types is not None:
        # Without this, transformers marks the tokens before the first separator, and fails if a text contains another.
        inputs["global_attention_mask"] = ((types == 0) & (ids != model.config.sep_token_id)).long()
    if inputs.get("windows"):
        assert family.packed
        del inputs["attention_mask"]
        if family.positions_after_padding:
            positions, padding = inputs["position_ids"], model.config.pad_token_id
            inputs["position_ids"] = _positions_after_padding(ids, positions, padding)
        return (), inputs
    inputs.pop("position_ids", None)  # the model makes its own positions
    if mask is not None:
        inputs["input_ids"] = ids.masked_fill(~mask, model.config.pad_token_id or 0)
        inputs["attention_mask"] = mask.long()  # int64, as from transformers' tokenizers
    return (), inputs


def _one_token_per_text(_: Any, __: Any, inputs: dict[str, Any], output: Any, mean: bool) -> Any:
    """Forward hook: reduce each packed text to one vector for the head: its first token's or its mean."""
    windows = inputs.get("windows")
    if windows:
        texts = output.last_hidden_state[0].split(windows.lengths)
        output.last_hidden_state = torch.stack([text.mean(0) if mean else text[0] for text in texts])[:, None]
    return output


def _positions_after_padding(ids: torch.Tensor, positions: torch.Tensor, padding: int) -> torch.Tensor:
    """Compute RoBERTa's positions of packed windows, [1, N]: in each window, they count up from padding + 1.

    Padding tokens have the position `padding`. `positions`: positions that start at 0 in each window.
    """
    is_token = (ids != padding).long()
    before = is_token.cumsum(1) - is_token
    starts = torch.arange(ids.shape[1], device=ids.device) - positions  # where each token's window starts
    return (before - before.gather(1, starts) + 1) * is_token + padding
