"""Models as ONNX files: onnxruntime's logits are transformers', and what cannot be converted leaves no file."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import transformers
from tables import each
from transformers import AutoTokenizer, BertConfig, DebertaV2Config, ElectraConfig, LongformerConfig

from hvd_bert.tools.export import conversion
from hvd_bert.tools.export.__main__ import main

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 96, "initializer_range": 0.3,
}  # fmt: skip
ATTENTION = {"relative_attention": True, "pos_att_type": "c2p|p2c", "position_buckets": 8, "type_vocab_size": 0}
FAMILIES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "bert": (BertConfig, SIZES, "BertForQuestionAnswering"),
    "electra": (ElectraConfig, SIZES | {"embedding_size": 8, "num_labels": 3}, "ElectraForSequenceClassification"),
    "deberta-v2": (DebertaV2Config, SIZES | ATTENTION, "DebertaV2ForQuestionAnswering"),
    "longformer": (LongformerConfig, SIZES | {"attention_window": 8}, "LongformerForQuestionAnswering"),
}  # fmt: skip


def make_model(family: str, tokenizer: Any, folder: Path) -> Path:
    """A tiny model with random weights and its tokenizer in a folder."""
    config, settings, kind = FAMILIES[family]
    torch.manual_seed(1)
    settings = settings | {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "sep_token_id": 3}
    getattr(transformers, kind)(config(**settings)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@each("family", [name for name in FAMILIES if name != "longformer"])
def test_logits_are_those_of_transformers(family, tokenizer, tmp_path, capsys, monkeypatch):
    folder = make_model(family, tokenizer, tmp_path / "model")
    (target := tmp_path / "target").mkdir()
    command = [str(folder), "--output", str(target / "model.onnx")]
    assert main(command) == 0
    assert "maximum difference of the logits from transformers'" in capsys.readouterr().out
    assert os.listdir(target) == ["model.onnx"]

    texts = ["what is in the box?", "red", "the green box in the hall is the box of the red box"]
    session = onnxruntime.InferenceSession(target / "model.onnx", providers=["CPUExecutionProvider"])
    axes = {value.name: value.shape for value in session.get_inputs()}
    types = (
        ["token_type_ids"] if family in ("bert", "electra") else []
    )  # what it was trained with, whatever its tokenizer returns
    assert axes == {name: ["batch", "sequence"] for name in ("input_ids", "attention_mask", *types)}
    encode = AutoTokenizer.from_pretrained(folder)
    encoded = encode(texts, texts[::-1], padding=True, return_token_type_ids=True, return_tensors="np")
    inputs = {name: encoded[name] for name in axes}
    found = session.run(None, inputs)
    plain = getattr(transformers, FAMILIES[family][2]).from_pretrained(folder).eval()
    with torch.no_grad():
        expected = plain(**{name: torch.from_numpy(values) for name, values in inputs.items()}).to_tuple()
    mask = torch.from_numpy(inputs["attention_mask"]).bool()
    for one, other in zip(map(torch.from_numpy, found), expected, strict=True):
        assert other.std() > 0.05
        rows = (one[mask], other[mask]) if one.shape == mask.shape else (one, other)
        torch.testing.assert_close(*rows, rtol=0, atol=1e-4)

    if family == "bert":  # a converted model with other weights leaves nothing

        def wrong(model: Any, example: Any, path: Path) -> list[str]:
            shutil.copy(target / "model.onnx", path)
            return ["start_logits", "end_logits"]

        monkeypatch.setattr(conversion, "export", wrong)
        plain.load_state_dict(plain.state_dict() | {"qa_outputs.bias": torch.tensor([math.nan, 0.0])})
        plain.save_pretrained(folder)
        assert main([str(folder), "--output", str(tmp_path / "model.onnx")]) == 2
        assert "differ from transformers' by up to nan" in capsys.readouterr().err
        assert not (tmp_path / "model.onnx").exists()


def test_a_family_that_cannot_be_converted(tokenizer, tmp_path, capsys):
    folder = make_model("longformer", tokenizer, tmp_path / "model")
    assert main([str(folder), "--output", str(tmp_path / "model.onnx")]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("hvd_bert: longformer models cannot be converted to ONNX by torch 2") and "AssertionE" in said
    )
    assert not [*tmp_path.glob("*.onnx*")] and "model" in os.listdir(tmp_path)


def test_refusals(tokenizer, tmp_path, capsys, monkeypatch):
    folder = make_model("bert", tokenizer, tmp_path / "model")
    (tmp_path / "there.onnx").write_text("mine")

    def refusal(*command: str | Path) -> str:
        assert main([str(word) for word in command]) == 2
        return capsys.readouterr().err

    new = tmp_path / "new.onnx"
    assert "there.onnx exists: name another file" in refusal(folder, "--output", tmp_path / "there.onnx")
    assert "nowhere is not a folder. Create it" in refusal(folder, "--output", tmp_path / "nowhere" / "new.onnx")
    assert "is not a folder. Name the output folder of a training" in refusal(tmp_path / "none", "--output", new)
    config = json.loads((folder / "config.json").read_text())
    for names, words in {
        ("AutoTokenizer",): "architectures names AutoTokenizer, which is not a model class of transformers",
        ("BertForSequenceClassification",): "has no weights for its whole model (bert.pooler.dense.bias, ",
    }.items():
        (folder / "config.json").write_text(json.dumps(config | {"architectures": names}))
        assert words in refusal(folder, "--output", new)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("onnx") else found(name))
    assert "install with `pip install onnx onnxscript onnxruntime`" in refusal(folder, "--output", new)
    assert not new.exists()
