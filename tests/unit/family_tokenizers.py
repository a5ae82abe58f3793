"""Small fast tokenizers of several families, trained on a few words."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import ByteLevelBPETokenizer, SentencePieceUnigramTokenizer
from transformers import (
    AlbertTokenizer,
    CamembertTokenizer,
    DebertaV2Tokenizer,
    DistilBertTokenizer,
    RobertaTokenizer,
    SplinterTokenizer,
    XLMRobertaTokenizer,
)

TEXT = ["The red boxes of 1940 are in the hall, and what colour is box 42? The colour is pale grey-green."] * 3
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,?!-"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[QUESTION]", "the", "red", "box", "##es", "what"]


def byte_level(kind: Any) -> Any:
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        TEXT, 320, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"], show_progress=False
    )
    model = json.loads(trained.to_str())["model"]
    return kind(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]], model_max_length=512)


def unigram(kind: Any, *special: str) -> Any:
    trained = SentencePieceUnigramTokenizer()
    trained.train_from_iterator(
        [*TEXT, *CHARACTERS], 150, special_tokens=[*special], unk_token=special[-1], show_progress=False
    )
    pieces = [tuple(piece) for piece in json.loads(trained.to_str())["model"]["vocab"]]
    return kind(vocab=pieces, model_max_length=512)


def word_pieces(kind: Any) -> Any:
    pieces = [*WORDS, *CHARACTERS, *(f"##{character}" for character in CHARACTERS)]
    return kind(vocab={piece: place for place, piece in enumerate(pieces)}, model_max_length=512)


MAKERS = {
    "roberta": lambda: byte_level(RobertaTokenizer),
    "xlm-roberta": lambda: unigram(XLMRobertaTokenizer, "<s>", "<pad>", "</s>", "<unk>"),
    "camembert": lambda: unigram(CamembertTokenizer, "<s>", "<pad>", "</s>", "<unk>"),
    "albert": lambda: unigram(AlbertTokenizer, "<pad>", "[CLS]", "[SEP]", "[MASK]", "<unk>"),
    "deberta-v2": lambda: unigram(DebertaV2Tokenizer, "[PAD]", "[CLS]", "[SEP]", "[UNK]"),
    "distilbert": lambda: word_pieces(DistilBertTokenizer),
    "splinter": lambda: word_pieces(SplinterTokenizer),
}
