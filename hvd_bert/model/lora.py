"""LoRA (Hu et al. 2021, arXiv:2106.09685) with peft: trains low-rank adapters instead of an encoder's weights."""

from __future__ import annotations

import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hvd_bert.config.data import ModelArguments
from hvd_bert.errors import UserError

FILES = ("adapter_config.json", "adapter_model.safetensors")
# Names of query and value layers in the listed families, and of layers that compute both.
_QUERY_VALUE = {"query", "value", "query_proj", "value_proj", "q_lin", "v_lin", "q_proj", "v_proj", "q", "v"}
_FUSED = {"Wqkv", "in_proj"}


def add_adapters(model: nn.Module, args: ModelArguments, seed: int) -> Any:
    """Freeze the encoder except its pooler, and add adapters to its query and value layers, initialized from `seed`.

    Modifies the model in place. Its head and pooler are trained in full. Returns peft's wrapper, for `merge`. Raises
    UserError if peft is not installed, the rank is too large, or the model has no query and value layers.
    """
    for package in ("peft", "accelerate"):  # peft imports accelerate
        if find_spec(package) is None:
            raise UserError(f"--lora_rank: {package} is not installed. Run `pip install .[lora]`.")
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in _QUERY_VALUE | _FUSED
    }
    if not layers or not isinstance(model, PreTrainedModel) or model.base_model is model:
        raise UserError(
            f"--lora_rank: {type(model).__name__} is not an encoder with a head and with linear layers for query and"
            " value. Omit the flag, or name another model."
        )
    widest = max(max(layer.weight.shape) for layer in layers.values())
    if args.lora_rank > widest:
        raise UserError(f"--lora_rank {args.lora_rank}: its layers have {widest} features. Use a rank of at most that.")
    peft = import_module("peft")  # imported late: it takes seconds
    above = {name for name, _ in model.named_children()} - {model.base_model_prefix}
    trained = [
        name
        for name, module in model.named_modules()
        if name in above | {f"{model.base_model_prefix}.pooler"} and any(p.requires_grad for p in module.parameters())
    ]
    alpha = args.lora_alpha or 2 * args.lora_rank
    settings = peft.LoraConfig(r=args.lora_rank, lora_alpha=alpha, target_modules=[*layers], modules_to_save=trained)
    torch.default_generator.manual_seed(seed)
    return peft.get_peft_model(model, settings)


def merge(wrapper: Any) -> dict[str, bytes]:
    """Merge the adapters into the model's weights, in place. Returns the content of peft's adapter files by name."""
    with tempfile.TemporaryDirectory() as folder:
        wrapper.save_pretrained(folder, save_embedding_layers=False)
        files = {name: (Path(folder) / name).read_bytes() for name in FILES}
    wrapper.merge_and_unload()
    return files
