"""An encoder with a classification head: transformers' model, and BERT's forward pass over packed texts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
from transformers.models.bert.modeling_bert import BertForSequenceClassification as TransformersBert

from hvd_bert.config.settings import ModelArguments
from hvd_bert.data.collate import Batch
from hvd_bert.errors import UserError
from hvd_bert.model.bert import check_fit, configure, with_own_layers
from hvd_bert.model.loading import load, reported

# Families that are trained for questions, but cannot be for texts -> the reason.
REFUSED = {"mobilebert": "its embeddings mix neighboring tokens, so its results would depend on the padding"}


class BertForSequenceClassification(TransformersBert):
    """transformers' model, which also takes packed texts. It has the same name, which goes into config.json."""

    def forward(self, *, cu_seqlens: Tensor | None = None, **inputs: Any) -> Any:
        if cu_seqlens is None:
            return super().forward(**inputs)
        hidden = self.bert(cu_seqlens=cu_seqlens, **inputs).last_hidden_state[0]
        first = hidden[cu_seqlens[:-1]]  # the [CLS] of each text
        assert self.bert.pooler is not None
        pooled = self.bert.pooler(first[:, None])
        return SequenceClassifierOutput(logits=self.classifier(self.dropout(pooled)))


def packs(config: Any) -> bool:
    """Whether texts of the model can be packed; otherwise they are padded, with transformers' own forward pass."""
    return bool(config.model_type == "bert")


def load_classifier(
    args: ModelArguments,
    config: Any,
    tokenizer: Any,
    labels: list[str] | None,
    max_seq_length: int,
    seed: int,
    padded: bool,
) -> Any:
    """The model of `config` on the CPU, in fp32. New weights (the head, or all) are a function of `seed`.

    `labels`: names of the classes, in the model's own order if it has the same; a single one for a regression; None:
    those of the model, whose head must be trained. `padded`: see `load_model`.
    """
    source = args.configuration
    kind: Any = _class_of(config, source)
    check_fit(config, source, tokenizer, args.tokenizer, max_seq_length)
    own = [str(config.id2label[i]) for i in range(config.num_labels)]
    # The rows of a saved head have the model's own order. As in run_glue, upper and lower case are the same.
    names = own if labels is None or sorted(map(str.lower, labels)) == sorted(map(str.lower, own)) else labels
    configure(config, args.dropout, padded or not packs(config))
    config.num_labels = len(names)
    config.problem_type = "regression" if len(names) == 1 else None
    config.id2label, config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
    torch.manual_seed(seed)
    if args.model_name_or_path is None:
        if labels is None:
            raise UserError("--no_do_train: name a trained model with --model_name_or_path, not only --config_name.")
        with reported(source):
            return with_own_layers(kind(config))
    model, info = load(
        kind,
        args.model_name_or_path,
        args,
        config=config,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # a head for other labels is replaced; anything else is refused below
    )
    # New weights: the head, and the pooler, which not every pretrained model has.
    base = f"{model.base_model_prefix}."
    lost = {name for name in info["missing_keys"] if name.startswith(base) and ".pooler." not in name}
    lost |= {name for name, *_ in info["mismatched_keys"] if name.startswith(base)}
    if lost:
        raise UserError(
            f"{args.model_name_or_path} lacks weights that its configuration needs ({', '.join(sorted(lost)[:3])},"
            " ...). Name another model."
        )
    new = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    if labels is None and new:
        raise UserError(
            f"--no_do_train: {args.model_name_or_path} has no trained classification head ({', '.join(sorted(new)[:3])}"
            " would be random). Name a model that was trained with --task text-classification."
        )
    return with_own_layers(model)


def _class_of(config: Any, name: str) -> Any:
    """The class of the model with a classification head. Raises UserError for a family that cannot be trained."""
    if packs(config):
        return BertForSequenceClassification
    classes = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    missing = "" if type(config) in classes else "transformers has no classification head for it"
    refused = REFUSED.get(config.model_type, missing)
    if refused:
        raise UserError(f"{name} is a {config.model_type} model: {refused}. Name another encoder.")
    return classes[type(config)]


def class_logits(model: nn.Module, batch: Batch, token_types: bool = True) -> Tensor:
    """Logits of the classes for each text of a batch, float32 [B, classes].

    `model`: as wrapped by the strategy. `token_types`: see `takes_token_types`.
    """
    if batch.attention_mask is None:
        output = model(
            input_ids=batch.input_ids,
            token_type_ids=batch.token_type_ids,
            position_ids=batch.position_ids,
            window_lengths=batch.lengths,
            cu_seqlens=batch.cu_seqlens,
        )
    else:
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        output = model(**inputs, **({"token_type_ids": batch.token_type_ids} if token_types else {}))
    logits: Tensor = output.logits
    return logits.float()
