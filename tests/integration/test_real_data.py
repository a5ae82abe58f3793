"""Train two steps on real SQuAD, whose texts are more varied than generated data."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import TINY
from launch import REPOSITORY, TRAIN, launcher, run

SQUAD = Path(os.environ.get("HVD_BERT_SQUAD") or REPOSITORY.parent / "shared" / "data" / "squad")
AVAILABLE = pytest.mark.skipif(not (SQUAD / "train-v1.1.json").is_file(), reason=f"no SQuAD in {SQUAD}")
pytestmark = [pytest.mark.integration, pytest.mark.realdata, AVAILABLE]


@pytest.mark.parametrize(("version", "size", "by"), [("1.1", 2, "gloo"), ("2.0", 1, "none")])
def test_two_steps(version: str, size: int, by: str, make_tokenizer: Callable[..., Any], tmp_path: Path) -> None:
    from transformers import BertConfig

    # This tokenizer splits most words into characters, so most passages have several windows.
    tokenizer = make_tokenizer("the", "of", "and", "in", "to", "what", "who", "when", "is", "was")
    tokenizer.save_pretrained(tmp_path / "model")
    BertConfig(vocab_size=len(tokenizer), **TINY).save_pretrained(tmp_path / "model")
    words = ["--config_name", "model", "--tokenizer_name", "model", "--max_steps", 2, "--output_dir", "out"]
    words += ["--train_file", SQUAD / f"train-v{version}.json", "--max_train_samples", 32]
    words += ["--validation_file", SQUAD / f"dev-v{version}.json", "--max_eval_samples", 9]
    if version == "2.0":
        words.append("--version_2_with_negative")
    run([*launcher(size, by), *TRAIN, *map(str, words)], tmp_path).expect(0)
    out = tmp_path / "out"
    results = json.loads((out / "train_results.json").read_text())
    assert results["train_windows"] > 32
    assert len(json.loads((out / "eval_predictions.json").read_text())) == 9
    assert (out / "eval_null_odds.json").exists() == (version == "2.0")
