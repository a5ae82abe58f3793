"""Loads a model's tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from typing import Any

from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.tokenization_auto import AutoTokenizer

from hvd_bert import hub
from hvd_bert.config.data import ModelArguments
from hvd_bert.data.window_cutting import Layout
from hvd_bert.errors import UserError, log
from hvd_bert.model.families import ENCODERS, described, generates

_UPPER_CASE = re.compile(r"^[^\[<].*[A-Z]|^[A-Z]")  # ignores special tokens such as [CLS] and <S>


def load_tokenizer(args: ModelArguments) -> Any:
    """Load the model's fast tokenizer. Raises UserError if it has none, or one with an unsupported layout."""
    extra: dict[str, Any] = {"use_fast": True}
    if args.config_name and hub.lacks_model_type(args.tokenizer):  # AutoTokenizer needs the model type
        extra["config"] = hub.load_pretrained(AutoConfig, args.config_name, **args.on_hub)
    tokenizer = _load_with_case(args, **extra)
    # For a folder without a vocabulary, transformers returns an empty tokenizer.
    if len(tokenizer) <= len(tokenizer.all_special_tokens) or hub.LFS_POINTER in tokenizer.get_vocab():
        found = hub.lfs_pointers(args.tokenizer) or "Name a tokenizer's folder (--tokenizer_name FOLDER)"
        raise UserError(f"'{args.tokenizer}' has no vocabulary. {found}.")
    try:
        Layout.of(tokenizer)
    except UserError as error:
        raise _why_refused(args, error) from None
    return tokenizer


def _why_refused(args: ModelArguments, error: UserError) -> UserError:
    """Return the error for a tokenizer that is refused with `error`: another one if its model generates text."""
    with suppress(UserError):
        config = hub.load_pretrained(AutoConfig, args.configuration, **args.on_hub)
        if generates(config):
            source = f"{args.configuration} is {described(config)}"
            return UserError(f"{source}, whose tokenizer has no layout such as [CLS] a [SEP] b [SEP]. {ENCODERS}")
    return error


def _load_with_case(args: ModelArguments, **extra: Any) -> Any:
    """Load the tokenizer, and turn off lower-casing if its files do not call for it. Raises UserError.

    Without "do_lower_case" in tokenizer_config.json, transformers lower-cases texts for BERT's vocabularies, even cased
    ones. Then texts are lower-cased only if tokenizer.json says so or no word of the vocabulary has upper-case letters.
    """
    name, options = args.tokenizer, args.on_hub
    tokenizer = hub.load_pretrained(AutoTokenizer, name, **options, **extra)
    if not tokenizer.init_kwargs.get("do_lower_case"):
        return tokenizer
    with hub.reported(name):
        if "do_lower_case" in hub.json_file(name, "tokenizer_config.json", **options):
            return tokenizer
        normalizer = json.dumps(hub.json_file(name, "tokenizer.json", **options).get("normalizer"))
    cased = any(_UPPER_CASE.search(token) for token in tokenizer.get_vocab())
    if '"lowercase": true' in normalizer or '"Lowercase"' in normalizer or not cased:
        return tokenizer
    log.info(
        "%s: the vocabulary has words with upper-case letters, so texts are not lower-cased. To lower-case them, set"
        ' "do_lower_case": true in tokenizer_config.json.',
        name,
    )
    return hub.load_pretrained(AutoTokenizer, name, **options, do_lower_case=False, **extra)


def tokenizer_digest(tokenizer: Any) -> str:
    """Hash a tokenizer's vocabulary and rules. Returns 12 hex digits."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:12]
