"""Loads configurations, tokenizers and weights with transformers, and refuses what could not be trained.

The only place in the package that calls `from_pretrained`: whatever that raises becomes one UserError, and no code in a
model's folder ever runs.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, but not in __all__
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.tokenization_auto import AutoTokenizer
from transformers.utils import logging as transformers_logging

from hvd_bert.config.settings import ModelArguments
from hvd_bert.data.sources import hub
from hvd_bert.errors import UserError, as_user_error, log
from hvd_bert.machine import free_memory
from hvd_bert.model.families import FAMILIES, family_of, lacking_family, model_class
from hvd_bert.storage.reading import GIB

LORA_CHECKPOINT = (  # after the name of a folder
    "is a checkpoint of a training with --lora_rank, which can only be resumed. Name the output folder of the finished"
    " training."
)
LFS_POINTER = "version https://git-lfs.github.com/spec/v1"  # the first line of one

_UPPER_CASE = re.compile(r"^[^\[<].*[A-Z]|^[A-Z]")  # not in special tokens, such as [CLS] and <S>

# Settings that transformers' encoders would ignore or fail with -> the supported value.
SUPPORTED = {"position_embedding_type": "absolute", "quantization_config": None}
# Values that the hub's configurations of a family have instead, and that are right for it.
SUPPORTED_TOO = {("jina_embeddings_v3", "position_embedding_type", "rotary")}


def reported(name: str) -> AbstractContextManager[None]:
    """Turn any error inside into a UserError that says that `name` cannot be loaded, why, and what to do."""
    return as_user_error(
        lambda reason: (
            f"'{name}' cannot be loaded ({lfs_pointers(name) or reason}). Check the name and the files, name another"
            " model or a local folder, or try `python -m hvd_bert.train --config sample`, which has a model of its own."
        )
    )


def lfs_pointers(name: str) -> str:
    """Names the files of a folder that git-lfs has not downloaded; "" if there are none."""
    files = (path for path in sorted(Path(name).glob("*")) if path.is_file() and os.access(path, os.R_OK))
    found = [path.name for path in files if path.open("rb").read(len(LFS_POINTER)) == LFS_POINTER.encode()]
    return f"{', '.join(found)}: only a git-lfs pointer; run `git lfs pull` in the folder" if found else ""


def load(kind: Any, name: str, args: ModelArguments, **extra: Any) -> Any:
    """`kind.from_pretrained(name)`: from a folder, else the hub's cache, else the hub. Raises UserError."""
    transformers_logging.set_verbosity_error()  # our checks replace its warnings, which every rank would print
    transformers_logging.disable_progress_bar()
    with reported(name):
        try:
            return _load(kind, name, args, **extra)
        except pickle.UnpicklingError:
            raise ValueError("its weights are pickled objects, which can run code: save them as safetensors") from None
        except ValueError as error:
            if "trust_remote_code" in str(error):  # transformers would advise to set it
                raise ValueError("it has its own Python code, which this trainer never runs") from None
            if lacking := lacking_family(str(error)):
                raise ValueError(lacking) from None
            if lacks_model_type(name):
                raise UserError(
                    f'{Path(name) / "config.json"} has no key "model_type", which names the model\'s family. Add it,'
                    ' for a BERT "model_type": "bert", or name a complete configuration of the same model with'
                    " --config_name."
                ) from None
            raise


def load_encoder(kind: Any, args: ModelArguments, config: Any, needs_head: bool) -> Any:
    """The model in --model_name_or_path, in fp32; its pooler and, unless `needs_head`, its head may have new weights.

    Raises UserError if weights are missing.
    """
    name = args.model_name_or_path
    model, info = load(
        kind,
        str(name),
        args,
        config=config,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused below with a better message
    )
    sizes = {key: f"{key}: {[*saved]} instead of {[*needed]}" for key, saved, needed in info["mismatched_keys"]}
    new, encoder = sizes.keys() | info["missing_keys"], f"{model.base_model_prefix}."
    # Not every pretrained model has a pooler.
    lost = [key for key in sorted(new) if key.startswith(encoder) and (key in sizes or ".pooler." not in key)]
    if lost:
        saved = sorted(info["unexpected_keys"])
        raise UserError(f"{name} {_why_lost(lost, saved, encoder, ', '.join(sizes.get(key, key) for key in lost[:3]))}")
    described = ", ".join(sizes.get(key, key) for key in sorted(new)[:3])
    if needs_head and new:
        raise UserError(
            f"{name} has no trained head for this task ({described}), so its results would be random. Train it first,"
            " or name a model that is fine-tuned for this task."
        )
    if sizes:
        log.info("%s: the saved head has another size (%s), so it gets new weights.", name, described)
    return model


def _why_lost(lost: list[str], saved: list[str], encoder: str, described: str) -> str:
    """Why weights of an encoder are missing, from their names and those of unknown weights, and what to do."""
    if any(".lora_A." in key for key in saved):
        return LORA_CHECKPOINT
    ending = lost[0].removeprefix(encoder)
    prefixes = [key.removesuffix(ending).removesuffix(encoder) for key in saved if key.endswith(f".{ending}")]
    if prefixes:
        return (
            f"has weights whose names begin with {prefixes[0]!r} ({saved[0]}). If they come from a wrapper such as DDP,"
            " save the model inside it (`model.module`). Otherwise remove the prefix from the names."
        )
    if saved and not any("." in key for key in saved):
        return f"has a weights file with the entries {', '.join(saved[:3])}. Save only the one that has the weights."
    return f"lacks weights that its configuration needs ({described}, ...). Name another model."


def _load(kind: Any, name: str, args: ModelArguments, **extra: Any) -> Any:
    path = Path(name)
    if path.exists():
        return kind.from_pretrained(name, trust_remote_code=False, **extra)
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise FileNotFoundError(f"no such folder{'' if path.is_absolute() else f' in {Path.cwd()}'}") from None
    extra |= {"cache_dir": args.cache_dir, "revision": args.model_revision}
    # The cache first: it needs no network, and N ranks do not all contact the hub.
    for cached_name in hub.names_of(name):
        with contextlib.suppress(OSError):
            return kind.from_pretrained(cached_name, trust_remote_code=False, local_files_only=True, **extra)
    try:
        hub.reach()
    except Exception:
        raise FileNotFoundError(
            f"no such folder in {Path.cwd()}, the model is not in the hub's cache, and the hub does not answer"
        ) from None
    return kind.from_pretrained(name, trust_remote_code=False, **extra)


def load_tokenizer_files(args: ModelArguments, **extra: Any) -> Any:
    """The tokenizer in --tokenizer_name, which keeps upper-case letters if its files say so. Raises UserError.

    Without "do_lower_case" in tokenizer_config.json, transformers lower-cases texts for BERT's vocabularies, and thus
    splits each word with an upper-case letter. Then tokenizer.json decides, and without one the vocabulary.
    """
    tokenizer = load(AutoTokenizer, args.tokenizer, args, **extra)
    if not tokenizer.init_kwargs.get("do_lower_case"):
        return tokenizer
    with reported(args.tokenizer):
        if "do_lower_case" in _content(args, "tokenizer_config.json"):
            return tokenizer
        normalizer = json.dumps(_content(args, "tokenizer.json").get("normalizer"))
    cased = any(_UPPER_CASE.search(token) for token in tokenizer.get_vocab())
    if '"lowercase": true' in normalizer or '"Lowercase"' in normalizer or not cased:
        return tokenizer
    log.info(
        "%s: the vocabulary has words with upper-case letters, so texts are not lower-cased. To lower-case them, set"
        ' "do_lower_case": true in tokenizer_config.json.', args.tokenizer,
    )  # fmt: skip
    return load(AutoTokenizer, args.tokenizer, args, do_lower_case=False, **extra)


def _content(args: ModelArguments, file: str) -> dict[str, Any]:
    """A JSON file of the tokenizer in its folder or in the hub's cache; {} if it has none."""
    name = args.tokenizer
    folder = Path(name)
    if folder.exists():
        return _json_object(folder / file) if (folder / file).is_file() else {}
    for cached_name in hub.names_of(name):
        path = try_to_load_from_cache(cached_name, file, args.cache_dir, args.model_revision)
        if isinstance(path, str):
            return _json_object(Path(path))
    return {}


def lacks_model_type(name: str) -> bool:
    """Whether `name` is a folder whose config.json does not name the family, as those of old models."""
    path = Path(name) / "config.json"
    return path.is_file() and "model_type" not in _json_object(path)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} must contain a JSON object")
    return content


def load_config(name: str, args: ModelArguments, copies: int = 1) -> Any:
    """An encoder's configuration, checked. `copies` of its weights must fit into this host's memory. Raises UserError.

    Only families in FAMILIES can be trained.
    """
    config = load(AutoConfig, name, args)
    if config.model_type not in FAMILIES:
        raise UserError(
            f"{name} is a {config.model_type} model, which cannot be trained. Name an encoder of one of the families"
            f" {', '.join(FAMILIES)}."
        )
    with reported(name):
        _check_config(config)
        needed, free = copies * 4 * num_weights(config), free_memory()
        if needed > free:
            raise ValueError(f"it needs {needed / GIB:,.1f} GiB of memory, but {free / GIB:.1f} GiB are free")
    return config


def _check_config(config: Any) -> None:
    """Raise ValueError if a model of this configuration could not be built or trained."""
    if family_of(config).positions_after_padding and not isinstance(config.pad_token_id, int):
        raise ValueError("config.json: pad_token_id is missing, after which the positions start")
    for name, supported in SUPPORTED.items():
        value = getattr(config, name, supported)
        if value != supported and (config.model_type, name, str(value)) not in SUPPORTED_TOO:
            found = json.dumps(value, default=repr)
            raise ValueError(f"config.json: {name} must be {json.dumps(supported)}, not {found}")


def num_weights(config: Any) -> int:
    """Number of weights of an encoder with a span head, without allocating them."""
    config = copy.deepcopy(config)
    config.num_labels = 2  # start and end; the configuration may be a classifier's
    with torch.device("meta"):
        model = model_class(config)(config)
    return sum(weights.numel() for weights in model.parameters())
