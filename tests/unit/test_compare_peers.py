"""benchmarks/compare_peers.py: what it makes of the steps' times, when it refuses to compare, how it starts each."""

from __future__ import annotations

import math
from pathlib import Path

import compare_peers
import compare_report
import compare_windows
import pytest
from compare_report import Spread, Timing
from compare_windows import Work
from datasets import Dataset
from tables import each
from transformers import BertConfig, BertForQuestionAnswering

from hvd_bert.errors import UserError


def rows(seconds: list[float], tokens: int | None = 100) -> list[dict[str, float | None]]:
    return [{"step_s": s, "loss": 1.0, "tokens": tokens} for s in seconds]


def test_timing_leaves_the_warm_up_out():
    timed = compare_report.timing(rows([9.0, 9.0, 1.0, 3.0]), warmup=2, steps=2, global_batch=16)
    assert timed == Timing(windows=32, seconds=4.0, tokens=200)
    assert (timed.windows_per_s, timed.tokens_per_s) == (8.0, 50.0)
    with pytest.raises(UserError, match=r"has 3 steps\. It needs 1 untimed and 3 timed"):
        compare_report.timing(rows([1.0] * 3), warmup=1, steps=3, global_batch=16)


RUNS = {
    "ours": [Timing(40, 10.0, 800), Timing(40, 8.0, 640), Timing(40, 20.0, 800)],
    "peer": [Timing(40, 20.0, 800), Timing(40, 40.0, 800), Timing(40, 25.0, 800)],
    "padded": [Timing(10, 10.0), Timing(10, 10.0), Timing(10, 5.0)],
}


def test_ratios_are_taken_round_by_round():
    # Of the medians it would be 4 / 1.6 = 2.5 windows/s.
    assert compare_report.ratios(RUNS, "ours", "peer") == Spread(2.0, 1.25, 5.0)
    assert compare_report.token_ratios(RUNS, "ours", "peer") == Spread(2.0, 1.25, 4.0)
    assert compare_report.token_ratios(RUNS, "ours", "padded") is None
    found = compare_report.compared(RUNS, "ours")
    assert list(found) == ["peer", "padded"]
    assert found["padded"] == {"windows_per_s": {"median": 4.0, "least": 1.0, "most": 5.0}, "tokens_per_s": None}
    assert compare_report.compared(RUNS, "absent") == {}
    lines = compare_report.table(RUNS, {"ours": "A", "peer": "B", "padded": "C"}, "ours").splitlines()
    assert lines[2] == "| A | 4.00 (2.00 to 5.00) | 80 | - | - |"
    assert lines[3] == "| B | 1.60 (1.00 to 2.00) | 32 | 2.00 (1.25 to 5.00) | 2.00 (1.25 to 4.00) |"
    assert lines[4] == "| C | 1.00 (1.00 to 2.00) | - | 4.00 (1.00 to 5.00) | - |"
    assert len({line.count("|") for line in lines}) == 1


@each("other", [[6.0, 5.001], [6.0], [6.0, None], [6.0, math.nan]])
def test_losses_that_differ_or_are_missing_are_refused(other: list[float | None]):
    worst = compare_report.check_losses({"ours": [6.0, 5.0], "peer": [6.0003, 5.0], "third": [6.0, 4.9998]}, 1e-4)
    assert worst == pytest.approx(5e-5)
    for losses in ({"ours": [6.0, 5.0], "peer": other}, {"ours": other, "peer": [6.0, 5.0]}):
        with pytest.raises(UserError, match="do not train alike"):
            compare_report.check_losses(losses, 1e-4)
    with pytest.raises(UserError, match="do not train alike"):
        compare_report.check_losses({"ours": [6.0], "peer": [6.0]}, math.nan)


@pytest.fixture
def work() -> Work:
    tables = (Path("windows"), Path("padded"))
    return Work(Path("T"), None, 384, 8, 42, Path("model"), *tables, num_windows=999, mean_tokens=179.0)


def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Work, losses: dict[str, float]) -> list[str]:
    """Run `main` with runs that take 1 s a step (ours) or 4 s; returns the runs' names in their order."""
    started = []

    def train(name, args, work, run_name, steps, seed):
        started.append(run_name)
        return [{"step_s": 1.0 if name == "ours" else 4.0, "loss": losses[name], "tokens": None} for _ in range(steps)]

    monkeypatch.setattr(compare_peers, "train", train)
    monkeypatch.setattr(compare_peers, "prepare", lambda args: (work, work))
    words = ["--model_name_or_path", "M", "--train_file", "T", "--out", str(tmp_path / "out"), "--repeats", "2"]
    compare_peers.main([*words, "--variants", *losses])
    return started


def test_variants_take_turns_unless_their_losses_differ(tmp_path, monkeypatch, work, capsys):
    with pytest.raises(UserError, match="not compared"):
        start(tmp_path / "differing", monkeypatch, work, {"ours": 6.0, "hf_run_qa": 6.01})
    assert capsys.readouterr().out == "" and not (tmp_path / "differing/out/peers.json").exists()
    started = start(tmp_path, monkeypatch, work, {"ours": 6.0, "lightning": 6.0})
    rounds = ["round1-ours", "round1-lightning", "round2-lightning", "round2-ours"]
    assert started == ["preflight-ours", "preflight-lightning", *rounds]
    assert "| Lightning DDP, padded | 4.00 (4.00 to 4.00) | - | 4.00 (4.00 to 4.00) | - |" in capsys.readouterr().out
    assert (tmp_path / "out" / "peers.json").is_file()


def test_all_are_given_the_windows_of_the_batch_plan(tmp_path, tokenizer, make_questions, write_squad):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    model = BertForQuestionAnswering(BertConfig(vocab_size=len(tokenizer), **sizes))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    words = ["--model_name_or_path", str(tmp_path / "model"), "--train_file", str(write_squad(make_questions(30)))]
    words += ["--out", str(tmp_path / "out"), "--per_device_train_batch_size", "3", "--max_seq_length", "128"]
    words += ["--warmup", "1", "--steps", "3", "--padded_steps", "1", "--preflight_steps", "2"]
    args = compare_peers.parse(words)
    args.out.mkdir()
    preflight, timed = compare_windows.prepare(args)
    assert (timed.num_windows, timed.rank_batch) == (30, 3)
    tables = [Dataset.load_from_disk(table) for table in (timed.windows, timed.padded_windows)]
    unpadded = [[token for token in ids if token != tokenizer.pad_token_id] for ids in tables[1]["input_ids"]]
    assert unpadded == list(tables[0]["input_ids"])
    assert {len(ids) for ids in tables[1]["input_ids"]} == {128}
    assert len({len(ids) for ids in Dataset.load_from_disk(preflight.windows)["input_ids"]}) == 1
    assert BertForQuestionAnswering.from_pretrained(preflight.model).config.hidden_size == 16


def words_of(name: str, work: Work, seed: int | None) -> list[str]:
    args = compare_peers.parse(["--model_name_or_path", "M", "--train_file", "T", "--out", "O"])
    return compare_peers.command(name, args, work, Path("out"), 28, seed)


def flags_of(words: list[str]) -> dict[str, str]:
    return {word: following for word, following in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}


@each("name", compare_peers.VARIANTS)
def test_all_are_given_the_same_work(name: str, work: Work):
    timed, preflight = (flags_of(words_of(name, work, seed)) for seed in (7, None))
    same = {"--model_name_or_path": "model", "--max_steps": "28", "--per_device_train_batch_size": "8"}
    same["--learning_rate"] = "5e-05"
    assert same.items() <= timed.items() and same.items() <= preflight.items()
    assert timed["--seed"] == "7" and preflight["--seed"] == "42"
    if not name.startswith("ours"):
        assert timed["--windows"] == ("padded" if name in ("hf_run_qa", "lightning") else "windows")
        assert "--in_order" in preflight or preflight["--train_sampling_strategy"] == "sequential"
        assert "--in_order" not in timed and timed.get("--train_sampling_strategy") != "sequential"
