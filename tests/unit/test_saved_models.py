"""A saved model folder in plain transformers: its own classes, its own padding, and the logits of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_tokenizers import MAKERS
from test_world import make_world
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    ModernBertConfig,
    RobertaConfig,
)

from hvd_bert.config.command_line import parse
from hvd_bert.data.collate import Batch
from hvd_bert.model.bert import span_logits
from hvd_bert.model.classifier import class_logits
from hvd_bert.output import run_folder
from hvd_bert.tasks.base import load_task

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 130, "initializer_range": 0.3,
}  # fmt: skip
FAMILIES = {
    "bert": (BertConfig, {}),
    "roberta": (RobertaConfig, {"type_vocab_size": 1}),
    "modernbert": (ModernBertConfig, {"local_attention": 16, "cls_token_id": 2, "sep_token_id": 3}),
}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tokenizer: Any, tmp_path: Path) -> list[str]:
    """Flags of a new model of a family, with the family's own tokenizer if it needs one."""
    kind, settings = FAMILIES[request.param]
    own = MAKERS["roberta"]() if request.param == "roberta" else tokenizer
    own.save_pretrained(tmp_path / "model")
    kind(vocab_size=len(own), pad_token_id=own.pad_token_id, **SIZES, **settings).save_pretrained(tmp_path / "model")
    flags = ["--config_name", str(tmp_path / "model"), "--max_seq_length", "64", "--dropout", "0"]
    return [*flags, "--strategy", "none", "--no_do_eval", "--max_steps", "1"]


def in_transformers(folder: Path, kind: Any, batch: Batch) -> Any:
    """The output of the model in a folder for the same tokens, a row per window, padded by the saved tokenizer."""
    ids = batch.input_ids[0].split(batch.lengths) if batch.attention_mask is None else None
    rows = [row[mask] for row, mask in zip(batch.input_ids, batch.attention_mask, strict=True)] if ids is None else ids
    saved = AutoTokenizer.from_pretrained(folder)
    inputs = dict(saved.pad({"input_ids": [row.tolist() for row in rows]}, return_tensors="pt"))
    plain = kind.from_pretrained(folder, attn_implementation="eager").eval()
    assert type(plain).__name__ == plain.config.architectures[0]
    if plain.config.model_type == "bert":
        assert batch.attention_mask is None
        inputs["token_type_ids"] = pad_sequence(batch.token_type_ids[0].split(batch.lengths), batch_first=True)
    with torch.no_grad():
        return plain(**inputs)


def saved(flags: list[str], folder: Path) -> Any:
    """A task's new model, saved in `folder`."""
    task = load_task(parse(flags), make_world())
    task.model.eval()
    folder.mkdir()
    run_folder.save_model(folder, task)
    return task


def test_questions(model, tmp_path, make_questions, write_squad):
    task = saved([*model, "--train_file", str(write_squad(make_questions(4))), "--doc_stride", "8"], tmp_path / "out")
    batch = task.batch(np.array([0, 3, 1]))
    with torch.no_grad():
        starts, ends = span_logits(task.model, batch)
    plain = in_transformers(tmp_path / "out", AutoModelForQuestionAnswering, batch)
    for found, expected in ((starts, plain.start_logits), (ends, plain.end_logits)):
        assert expected.std() > 0.1
        for row, (logits, length) in enumerate(zip(found, batch.lengths, strict=True)):
            torch.testing.assert_close(logits[:length], expected[row, :length], rtol=0, atol=1e-5)


def test_texts(model, tmp_path):
    texts = tmp_path / "texts.csv"
    texts.write_text("sentence1,sentence2,label\nred box,what,a\nthe box is in the red box,green,b\nwhat?,,c\n")
    task = saved([*model, "--task", "text-classification", "--train_file", str(texts)], tmp_path / "out")
    batch, _ = task.batch(np.arange(3)).content
    with torch.no_grad():
        found = class_logits(task.model, batch)
    expected = in_transformers(tmp_path / "out", AutoModelForSequenceClassification, batch).logits
    assert expected.shape == (3, 3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
