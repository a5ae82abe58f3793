"""Small fast tokenizers of several families, trained on a few words."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import (
    ByteLevelBPETokenizer,
    SentencePieceUnigramTokenizer,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import (
    AlbertTokenizer,
    DebertaV2Tokenizer,
    PreTrainedTokenizerFast,
    RobertaTokenizer,
    SplinterTokenizer,
    XLMRobertaTokenizer,
)

TEXT = ["The red boxes of 1940 are in the hall, and what colour is box 42? The colour is pale grey-green."] * 3
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,?!-"
WORDS = ["the", "red", "box", "##es", "what"]
BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[QUESTION]"]
ROBERTA_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def byte_level(kind: Any, special: list[str]) -> Any:
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXT, 320, special_tokens=special, show_progress=False)
    model = json.loads(trained.to_str())["model"]
    return kind(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]], model_max_length=512)


def modernbert(vocab: dict[str, int], merges: list[tuple[str, ...]], model_max_length: int) -> Any:
    """As the published ModernBERT's tokenizer.json: it has no class of its own, and its offsets include spaces."""
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocab[token]) for token in ("[CLS]", "[SEP]")],
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("cls", "sep", "pad", "unk", "mask")}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=model_max_length,
        **names,
    )


def unigram(kind: Any, *special: str) -> Any:
    trained = SentencePieceUnigramTokenizer()
    trained.train_from_iterator(
        [*TEXT, *CHARACTERS], 150, special_tokens=[*special], unk_token=special[-1], show_progress=False
    )
    pieces = [tuple(piece) for piece in json.loads(trained.to_str())["model"]["vocab"]]
    return kind(vocab=pieces, model_max_length=512)


def word_pieces() -> Any:
    pieces = [*BERT_TOKENS, *WORDS, *CHARACTERS, *(f"##{character}" for character in CHARACTERS)]
    return SplinterTokenizer(vocab={piece: place for place, piece in enumerate(pieces)}, model_max_length=512)


MAKERS = {
    "roberta": lambda: byte_level(RobertaTokenizer, ROBERTA_TOKENS),
    "modernbert": lambda: byte_level(modernbert, BERT_TOKENS),
    "xlm-roberta": lambda: unigram(XLMRobertaTokenizer, "<s>", "<pad>", "</s>", "<unk>"),
    "albert": lambda: unigram(AlbertTokenizer, "<pad>", "[CLS]", "[SEP]", "[MASK]", "<unk>"),
    "deberta-v2": lambda: unigram(DebertaV2Tokenizer, "[PAD]", "[CLS]", "[SEP]", "[UNK]"),
    "splinter": word_pieces,
}
