"""The table of families of encoders: their inputs, and the layers that this package replaces.

To add a family, add a row to `FAMILIES`, and a size to tests/unit/test_families.py, whose tests then compare it with
transformers. Models of all other families are trained with transformers' layers, on padded windows.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_QUESTION_ANSWERING_MAPPING

from hvd_bert.errors import UserError, log
from hvd_bert.model.precision import evaluating


@dataclass(frozen=True)
class Family:
    """A family of models with the same `model_type`. On CPUs, `layers.place` replaces every nn.Linear.

    Attributes:
        packed: Attention goes through transformers' AttentionInterface, the model takes position_ids, and no other
            layer mixes the tokens of a row. So windows can be packed. Otherwise they are padded to the longest window.
        attention: The class of the self-attention, if JoinedAttention can replace it.
        add_and_norm: The classes that AddAndNorm can replace.
        positions_after_padding: Positions start at pad_token_id + 1, as in RoBERTa.
        question_attends_globally: The question's tokens attend to all tokens, as in Longformer.
        only_fp32: The mask of the attention overflows in half precision.
        since: The first version of transformers with the family, if pyproject.toml also allows older versions.
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
    """A family with BERT's layers. `name`: the beginning of its classes' names."""
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


def find_family(config: Any) -> Family:
    """The row of a model's configuration. Families without a row get padded windows and unchanged layers."""
    return FAMILIES.get(config.model_type, _PADDED)


def model_class(config: Any) -> Any:
    """transformers' class of an encoder with a span head."""
    return MODEL_FOR_QUESTION_ANSWERING_MAPPING[type(config)]


def class_with_head(head: Any, config: Any, source: str) -> Any:
    """transformers' class of a model with a head, from its configuration. Raises UserError if there is none.

    `head`: a class such as AutoModelForSequenceClassification. `source`: the model's name.
    """
    if type(config) not in head._model_mapping:
        raise UserError(
            f"{source} is a {config.model_type} model: transformers has no {head.__name__} for it. Name an encoder such"
            f" as those of the families {', '.join(FAMILIES)}."
        )
    return head._model_mapping[type(config)]


def max_tokens(config: Any) -> int:
    """The number of positions of a model, which limits the length of a window."""
    offset = config.pad_token_id + 1 if find_family(config).positions_after_padding else 0
    positions = getattr(config, "max_position_embeddings", None) or -1  # XLNet and T5 have no limit
    return sys.maxsize if positions < 0 else int(positions) - offset


def choose_padding(config: Any, padding: str, unit: str = "windows") -> str:
    """The --padding of a training: "none" becomes "longest" if the model's family takes no packed windows. Logs why."""
    name = config.model_type
    if name not in FAMILIES:
        log.info("%s is not a listed family: %s are padded, and no layer is replaced by a faster one.", name, unit)
    elif padding == "none" and not find_family(config).packed:
        log.info("%s models take no packed %s: they are padded to the longest of the batch.", name, unit)
    return "longest" if padding == "none" and not find_family(config).packed else padding


def check_precision(config: Any, precision: str) -> None:
    """Raise UserError if the model's family fails with the precision."""
    if precision != "fp32" and find_family(config).only_fp32:
        raise UserError(
            f"--{precision} does not work with {config.model_type} models, whose attention overflows in it. Omit the"
            " flag, or name another model."
        )


def adapt(model: Any, token_types: bool) -> Any:
    """Add hooks so that the model takes this trainer's batches, packed or padded. Returns the model.

    `token_types`: whether the model gets token types.
    """
    model.takes_token_types, family = token_types, find_family(model.config)
    if "ForQuestionAnswering" not in type(model).__name__:
        # Longformer's other heads choose the tokens that attend globally themselves.
        family = replace(family, question_attends_globally=False)
    if not family.packed or family.positions_after_padding or not token_types:  # else its inputs are BERT's
        model.register_forward_pre_hook(partial(_family_inputs, family), with_kwargs=True)
    if type(model).__name__.endswith("ForSequenceClassification"):
        layers = getattr(model.base_model, "encoder", model.base_model)  # excludes the pooler
        mean = getattr(model.config, "classifier_pooling", "cls") == "mean"  # ModernBERT's
        layers.register_forward_hook(partial(_one_token_per_text, mean=mean), with_kwargs=True)
    return model


def try_once(model: Any) -> None:
    """Run the encoder on one short window. Raises any exception if the configuration is wrong."""
    config = model.config
    length = int(np.max(getattr(config, "attention_window", 2)))  # Longformer pads to multiples of its window
    tokens = torch.full((1, length), config.vocab_size - 1, device=model.device)  # 0 or 1 may be padding
    if find_family(config).positions_after_padding:  # padding has no position, and Longformer's window may exceed them
        tokens[:, max_tokens(config) :] = config.pad_token_id
    with evaluating(model):
        model.base_model(input_ids=tokens)


def _family_inputs(family: Family, model: Any, _: Any, inputs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Convert the arguments of `evaluation.forward` for the family's forward pass."""
    inputs = {"token_type_ids": None, "attention_mask": None, **inputs}
    ids, types, mask = inputs["input_ids"], inputs["token_type_ids"], inputs["attention_mask"]
    if types is None or not model.takes_token_types:
        del inputs["token_type_ids"]
    if family.question_attends_globally and types is not None:
        # transformers marks the tokens before the first separator, and fails if a text contains another separator.
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
        inputs["attention_mask"] = mask.long()  # tokenizers give int64
    return (), inputs


def _one_token_per_text(_: Any, __: Any, inputs: dict[str, Any], output: Any, mean: bool) -> Any:
    """Reduce each packed text to one token for the head: the first one, or the mean."""
    windows = inputs.get("windows")
    if windows:
        texts = output.last_hidden_state[0].split(windows.lengths)
        output.last_hidden_state = torch.stack([text.mean(0) if mean else text[0] for text in texts])[:, None]
    return output


def _positions_after_padding(ids: torch.Tensor, positions: torch.Tensor, padding: int) -> torch.Tensor:
    """RoBERTa's positions of packed windows: from padding + 1 on, and `padding` at padding tokens.

    `positions`: from 0 on in each window.
    """
    is_token = (ids != padding).long()
    before = is_token.cumsum(1) - is_token
    starts = torch.arange(ids.shape[1], device=ids.device) - positions  # index of each token's window
    return (before - before.gather(1, starts) + 1) * is_token + padding
