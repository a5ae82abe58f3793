"""benchmarks/compare_peers.py: rates computed from step times, and refused comparisons."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import compare_peers
import pytest
from launch import REPOSITORY, SAMPLE, run
from transformers import AutoTokenizer, BertConfig, BertForQuestionAnswering

from hvd_bert.errors import UserError


def test_timing_leaves_the_warm_up_out() -> None:
    rows = [{"step_s": seconds, "loss": 1.0, "tokens": 100} for seconds in (9.0, 9.0, 1.0, 3.0)]
    assert compare_peers.timing(rows, 2, 2, 16) == {"windows_per_s": 8.0, "tokens_per_s": 50.0}
    assert compare_peers.timing([row | {"tokens": None} for row in rows], 2, 2, 16) == {"windows_per_s": 8.0}
    with pytest.raises(UserError, match=r"has 4 steps\. It needs 2 untimed and 3 timed"):
        compare_peers.timing(rows, 2, 3, 16)


def rates(*rounds: tuple[float, ...]) -> list[compare_peers.Rates]:
    return [dict(zip(("windows_per_s", "tokens_per_s"), values, strict=False)) for values in rounds]


def test_ratios_are_taken_round_by_round() -> None:
    runs = {
        "ours": rates((4, 80), (5, 80), (2, 40)),
        "hf_best": rates((2, 40), (1, 20), (1.6, 32)),
        "hf_run_qa": rates((1,), (1,), (2,)),
    }
    assert compare_peers.ratios(runs, "hf_best", "windows_per_s") == [
        2,
        5,
        1.25,
    ]  # a ratio per round; the medians' ratio would be 4 / 1.6
    lines = [line.split(" | ")[1:] for line in compare_peers.table(runs).splitlines()[2:]]
    assert lines[0] == ["4.00 (2.00 to 5.00)", "80", "-", "- |"]
    assert lines[1] == ["1.60 (1.00 to 2.00)", "32", "2.00 (1.25 to 5.00)", "2.00 (1.25 to 4.00) |"]
    assert lines[2] == ["1.00 (1.00 to 2.00)", "-", "4.00 (1.00 to 5.00)", "- |"]


@pytest.mark.parametrize("other", [[6.0, 5.001], [6.0, None], []], ids=str)
def test_losses_that_differ_or_are_missing_are_refused(other: list[float | None]) -> None:
    worst = compare_peers.check_losses({"ours": [6.0, 5.0], "peer": [6.0003, 5.0], "third": [6.0, 4.9998]}, 1e-4)
    assert worst == pytest.approx(5e-5)
    for losses in ({"ours": [6.0, 5.0], "peer": other}, {"ours": other, "peer": [6.0, 5.0]}):
        with pytest.raises(UserError, match="do not train alike"):
            compare_peers.check_losses(losses, 1e-4)


@pytest.mark.campaign  # takes 90 s: three variants in two rounds
def test_variants_with_equal_losses_are_compared_in_turns(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs env/setup.sh --bench")
    (tmp_path / "train.json").write_bytes(gzip.decompress((SAMPLE / "train-v1.1.json.gz").read_bytes()))
    tokenizer = AutoTokenizer.from_pretrained(SAMPLE, trust_remote_code=False)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    for part in (BertForQuestionAnswering(BertConfig(vocab_size=len(tokenizer), **sizes)), tokenizer):
        part.save_pretrained(tmp_path / "model")
    words = [sys.executable, REPOSITORY / "benchmarks" / "compare_peers.py", "--model_name_or_path", "model"]
    words += ["--train_file", "train.json", "--max_train_samples", 300, "--max_seq_length", 128, "--out", "out"]
    words += ["--repeats", 2, "--warmup", 1, "--steps", 3, "--padded_steps", 2]
    done = run(map(str, words), tmp_path, timeout=600, cold=True).expect(0)
    names = [line.split()[0] for line in done.output.splitlines() if line.endswith(" ...")]
    variants = ["ours", "hf_run_qa", "hf_best"]
    rounds = [f"round1-{name}" for name in variants] + [f"round2-{name}" for name in reversed(variants)]
    assert names == [f"preflight-{name}" for name in variants] + rounds
    record = json.loads((tmp_path / "out" / "peers.json").read_text())
    assert record["preflight"]["largest_relative_difference"] < 1e-5
    assert all(len(rates["windows_per_s"]) == 2 for rates in record["ratios"].values())
