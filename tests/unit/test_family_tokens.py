"""Windows for families other than BERT: tokens of their fast tokenizers, labels, and token types."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from refusals import refused
from test_tokenization import ask, cases, spans_of, to_windows
from test_world import make_world
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
    AlbertConfig,
    AlbertTokenizer,
    AutoTokenizer,
    BertConfig,
    DebertaV2Tokenizer,
    ElectraConfig,
    PreTrainedTokenizerFast,
    RobertaTokenizer,
    SplinterTokenizer,
    XLMRobertaTokenizer,
)

from hvd_bert.config.command_line import parse
from hvd_bert.config.settings import ModelArguments
from hvd_bert.data.window_cutting import WindowOptions
from hvd_bert.data.window_table import check_lengths
from hvd_bert.model.bert import load_model
from hvd_bert.tasks.base import load_task

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
    """Make a tokenizer like ModernBERT's: of the generic class, with offsets that include leading spaces."""
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
    return SplinterTokenizer(vocab={piece: number for number, piece in enumerate(pieces)}, model_max_length=512)


MAKERS = {
    "roberta": lambda: byte_level(RobertaTokenizer, ROBERTA_TOKENS),
    "modernbert": lambda: byte_level(modernbert, BERT_TOKENS),
    "xlm-roberta": lambda: unigram(XLMRobertaTokenizer, "<s>", "<pad>", "</s>", "<unk>"),
    "albert": lambda: unigram(AlbertTokenizer, "<pad>", "[CLS]", "[SEP]", "[MASK]", "<unk>"),
    "deberta-v2": lambda: unigram(DebertaV2Tokenizer, "[PAD]", "[CLS]", "[SEP]", "[UNK]"),
    "splinter": word_pieces,
}


pytestmark = pytest.mark.slow

SPACES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture(scope="module", params=["bert", *MAKERS])
def family_tokenizer(request, tokenizer):
    return tokenizer if request.param == "bert" else MAKERS[request.param]()


def tokenizers_windows(tokenizer, questions, length, stride):
    """Make windows by the tokenizer's own truncation, as run_qa does."""
    return tokenizer(
        [question.question.lstrip() for question in questions],
        [question.context for question in questions],
        truncation="only_second",
        max_length=length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_token_type_ids=True,
    )


@given(cases())
@settings(max_examples=40)
def test_windows_equal_those_of_the_tokenizer(family_tokenizer, tokenizer, case):
    questions, length, stride = case
    length += 15 * (family_tokenizer is not tokenizer)  # six words must fit, although they have more byte tokens
    rows, counts = to_windows(family_tokenizer, questions, length, stride)
    expected = tokenizers_windows(family_tokenizer, questions, length, stride)
    assert (counts.questions, counts.windows, counts.shortened_questions) == (len(questions), len(rows), 0)
    assert [row["input_ids"] for row in rows] == expected["input_ids"]
    assert [row["question"] for row in rows] == expected["overflow_to_sample_mapping"]
    for number, (row, offsets) in enumerate(zip(rows, expected["offset_mapping"], strict=True)):
        context = [token for token, text in enumerate(expected.sequence_ids(number)) if text == 1]
        if context:
            assert [row["context_start"], row["context_end"]] == [context[0], context[-1] + 1]
        assert spans_of(row) == offsets[row["context_start"] : row["context_end"]]
        if family_tokenizer is tokenizer:
            first, size = row["context_start"], len(row["input_ids"])
            assert row["context_end"] == size - 1
            assert expected["token_type_ids"][number] == [0] * first + [1] * (size - first)


def test_windows_have_room_for_the_special_tokens():
    tokenizer = MAKERS["roberta"]()
    check_lengths(WindowOptions(max_seq_length=14, doc_stride=8), tokenizer)
    with refused("--max_seq_length 13", "14"):
        check_lengths(WindowOptions(max_seq_length=13, doc_stride=8), tokenizer)
    (row, *_), _ = to_windows(tokenizer, [ask("the red box " * 9)], length=14, stride=8)
    assert len(row["input_ids"]) == 14


def typed(config, tokenizer, tmp_path) -> bool:
    """Return whether a new model with this tokenizer uses token types."""
    config.save_pretrained(tmp_path)
    model = load_model(ModelArguments(config_name=str(tmp_path)), tokenizer, 32, seed=1)
    return model.takes_token_types


def test_model_that_was_pretrained_with_token_types_gets_them(tmp_path, make_questions, write_squad):
    """ALBERT's tokenizer does not return token types by default, but the tokenizer saved with the model must."""
    tokenizer, folder = MAKERS["albert"](), tmp_path / "model"
    assert "token_type_ids" not in tokenizer.model_input_names
    AlbertConfig(vocab_size=len(tokenizer), embedding_size=16, **SPACES).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    flags = ["--config_name", str(folder), "--train_file", str(write_squad(make_questions(3), "train.json"))]
    flags += ["--max_seq_length", "200", "--strategy", "none", "--dropout", "0"]
    made = load_task(parse(flags), make_world())
    batch = made.batch(np.arange(3))
    losses = made.losses(made.model, batch)
    batch.content.token_type_ids[:] = 1 - batch.content.token_type_ids
    assert not torch.equal(made.losses(made.model, batch), losses), "the types have no effect"
    (tmp_path / "saved").mkdir()
    made.save(tmp_path / "saved")
    encoded = AutoTokenizer.from_pretrained(tmp_path / "saved")("the red box", "the hall")
    assert {*encoded["token_type_ids"]} == {0, 1}


def test_models_with_token_types(tokenizer, tmp_path):
    words, bytes_ = tokenizer, MAKERS["roberta"]()
    assert typed(BertConfig(vocab_size=len(words), **SPACES), words, tmp_path)
    assert not typed(BertConfig(vocab_size=len(bytes_), **SPACES), bytes_, tmp_path)  # its token types are all 0
    electra = {"vocab_size": len(words), "embedding_size": 16, **SPACES}
    assert "token_type_ids" not in words.model_input_names
    assert typed(ElectraConfig(**electra), words, tmp_path), "it was pretrained with both"
    assert not typed(ElectraConfig(**electra, type_vocab_size=1), words, tmp_path)
