"""Output files and logs of runs: one process, horovodrun, mpirun, all of Horovod's options, and a full log disk."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from commands import GLOBAL_BATCH, printed, read_lines, sample_ids, small_run
from documented import undocumented
from launch import Outcome, launcher, run

from hvd_bert.config import command_line
from hvd_bert.monitoring import PHASES
from hvd_bert.tools.runs import record

pytestmark = pytest.mark.integration

METRICS = {"step", "epoch", "loss", "learning_rate", "grad_norm", "windows_per_s", "tokens_per_s", "step_s"}
METRICS |= {"padding_share", "imbalance", "tflops_per_s"} | {
    f"{phase}_{of}" for phase in PHASES for of in ("s", "share")
}
SPREADS = {f"{phase}_{end}_s" for phase in PHASES for end in ("min", "max")}
SCORES = {"exact_match", "f1", "total", "eval_loss"}
V2_SCORES = SCORES | {f"{kind}_{name}" for kind in ("HasAns", "NoAns") for name in ("exact", "f1", "total")}
V2_SCORES |= {"best_exact", "best_exact_thresh", "best_f1", "best_f1_thresh"}


class Run:
    """A finished run, with its outcome and output folder."""

    def __init__(self, folder: Path, size: int, by: str) -> None:
        self.size, self.by, self.out = size, by, folder / "out"
        command = [*launcher(size, by), *small_run(size, self.out)]
        self.outcome: Outcome = run(command, folder, env={"HVD_BERT_CACHE": str(folder / "cache")})


WORLDS = [(1, "none"), (2, "gloo"), (2, "mpirun")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("alone"), 1, "none")


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world[0]}-{world[1]}")
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, alone: Run) -> Run:
    size, by = request.param
    ended = alone if by == "none" else Run(tmp_path_factory.mktemp(f"run-{size}-{by}"), size, by)
    ended.outcome.expect(0)
    return ended


def test_files(finished: Run) -> None:
    expected = {"train_config.yaml", "train_results.json", "metrics.jsonl", "tb", "config.json", "model.safetensors"}
    expected |= {"eval_results.json", "eval_predictions.json", "eval_nbest_predictions.json", "eval_samples.json"}
    expected |= {"events.jsonl", "README.md"}
    expected |= {"tokenizer.json", "tokenizer_config.json", "checkpoint-6", "latest", ".lock"}
    assert {path.name for path in finished.out.iterdir()} == expected


def test_metrics(finished: Run, alone: Run) -> None:
    lines = read_lines(finished.out / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    found = METRICS | SPREADS if finished.size > 1 else {key for key in METRICS if not key.startswith("exposed_comm")}
    assert all(line.keys() == found for line in steps)
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert [line["epoch"] for line in steps] == pytest.approx([step / 3 for step in range(1, 7)])
    assert [line["step"] for line in lines if "eval_f1" in line] == [6]
    others = [line["loss"] for line in read_lines(alone.out / "metrics.jsonl") if "loss" in line]
    np.testing.assert_allclose([line["loss"] for line in steps], others, rtol=0, atol=1e-4)


def test_train_results(finished: Run) -> None:
    results = json.loads((finished.out / "train_results.json").read_text())
    assert (results["world_size"], results["global_batch"]) == (finished.size, GLOBAL_BATCH)
    assert (results["train_steps"], results["train_samples"]) == (6, 66)
    controller = {"none": "none", "gloo": "gloo"}.get(finished.by, "mpi")
    assert results["controller"] == (controller if finished.size > 1 else "none")
    assert [info["rank"] for info in results["ranks"]] == list(range(finished.size))
    assert len(results["hosts"]) == 1
    assert results["versions"].keys() >= {"torch", "horovod", "transformers", "python"}
    steps = [line for line in read_lines(finished.out / "metrics.jsonl") if "loss" in line]
    assert results["train_loss"] == pytest.approx(np.mean([line["loss"] for line in steps]))
    assert results["train_samples_per_second"] == pytest.approx(66 / results["train_runtime"])
    found = results["breakdown"]
    assert (found["taken_steps"], found["steps"], found["padding_share"]) == (6, 5, 0.0)  # the first step is warm-up
    assert found["windows_per_s"] == pytest.approx(record.read(finished.out).windows_per_s)
    measured = sum(line[f"{phase}_s"] for line in steps for phase in found["phases"])
    assert measured == pytest.approx(results["train_runtime"], rel=0.02), "the phases add up to the run time"
    for phase, figures in found["phases"].items():
        assert figures["ms"] == pytest.approx(1000 * np.mean([line[f"{phase}_s"] for line in steps[1:]]))
        assert 0 <= figures["min_ms"] <= figures["ms"] <= figures["max_ms"]
    assert sum(figures["share"] for figures in found["phases"].values()) == pytest.approx(1)
    assert results["evaluations"] == 1 and results["evaluation_s"] > 0


def test_scores_and_predictions(finished: Run) -> None:
    scores, answers, nbest = (
        json.loads((finished.out / f"eval_{name}.json").read_text())
        for name in ("results", "predictions", "nbest_predictions")
    )
    assert scores.keys() == SCORES
    assert scores["total"] == 7
    assert list(answers) == list(nbest) == sample_ids("dev-v1.1.json.gz", 7)
    for id_, rivals in nbest.items():
        assert rivals[0]["text"] == answers[id_]
        assert rivals[0].keys() == {"text", "probability", "start_logit", "end_logit"}
        assert sum(rival["probability"] for rival in rivals) == pytest.approx(1)


def test_every_key_is_documented(finished: Run) -> None:
    def read(name: str) -> Any:
        return json.loads((finished.out / name).read_text())

    results = read("train_results.json")
    assert undocumented(results, "train_results.json", without=("breakdown", "work", "data_counts")) == []
    counts = [of_file for files in results["data_counts"].values() for of_file in files.values()]
    assert undocumented(counts, "train_results.json") == []
    assert undocumented(results["breakdown"], "breakdown") == []
    assert undocumented(read_lines(finished.out / "metrics.jsonl"), "metrics.jsonl") == []
    assert undocumented(read("eval_results.json"), "eval_results.json") == []
    assert undocumented(list(read("eval_nbest_predictions.json").values()), "Predictions") == []
    assert undocumented(read("eval_samples.json"), "eval_samples.json") == []
    events = read_lines(finished.out / "events.jsonl")
    assert undocumented(events, "events.jsonl", "train_results.json", without=("decided",)) == []
    settings = ("cpu_kernels", "identity", "meter", "schedule", "strategy")
    assert undocumented(read("checkpoint-6/state.json"), "state.json", without=settings) == []
    manifest = read("checkpoint-6/manifest.json")
    assert undocumented([manifest, *manifest["files"].values()], "Checkpoints", without=("files",)) == []


def test_folder_is_a_model(finished: Run) -> None:
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    model, info = AutoModelForQuestionAnswering.from_pretrained(finished.out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tokenizer = AutoTokenizer.from_pretrained(finished.out)
    logits = model(**tokenizer("Who?", "It is here.", return_tensors="pt")).start_logits
    assert logits.isfinite().all()


def test_stored_settings_give_the_same_run(finished: Run) -> None:
    stored = finished.out / "train_config.yaml"
    assert command_line.parse(["--config", str(stored)]).as_flat() == yaml.safe_load(stored.read_text())


def test_no_line_is_logged_twice(finished: Run) -> None:
    lines = [line for line in printed(finished.outcome).splitlines() if line.strip()]
    repeated = [line for line, times in Counter(lines).items() if times > 1]
    assert [line for line in repeated if not line.startswith("Tokenizing")] == []
    for words in ("step 1/6 ", "step 6/6 ", "windows/s", "ETA", "EM ", "F1 ", f"hvd-bert report {finished.out}"):
        assert any(words in line for line in lines), f"{words!r} is not in:\n{finished.outcome.output}"


def test_v2_with_every_option_of_horovod(tmp_path: Path) -> None:
    options = ["--bf16", "--fp16_allreduce", "--gradient_accumulation_steps", 2]
    options += ["--per_device_train_batch_size", 4, "--eval_strategy", "epoch", "--lr_scaling", "sqrt"]
    options += ["--lr_base_batch_size", 8]
    outcome = run([*launcher(2, "mpi"), *small_run(2, "out", *options, preset="sample_v2")], tmp_path).expect(0)
    out = tmp_path / "out"
    scores = json.loads((out / "eval_results.json").read_text())
    assert scores.keys() == V2_SCORES and undocumented(scores, "eval_results.json") == [], outcome
    odds = json.loads((out / "eval_null_odds.json").read_text())
    assert list(odds) == sample_ids("dev-v2.0.json.gz", 7)
    assert [line["step"] for line in read_lines(out / "metrics.jsonl") if "eval_f1" in line] == [3, 6]
    results = json.loads((out / "train_results.json").read_text())
    assert (results["global_batch"], results["precision"]) == (GLOBAL_BATCH, "bf16")
    assert printed(outcome).count("a peak learning rate of 0.00424 (--lr_scaling sqrt)") == 1, outcome


def test_training_completes_on_a_full_log_disk(tmp_path: Path) -> None:
    outcome = run(["sh", "-c", 'exec "$@" > /dev/full', "sh", *small_run(1, "out")], tmp_path).expect(0)
    assert outcome.output.count("warning: standard output cannot be written (No space left on device)") == 1, outcome
    assert "Traceback" not in outcome.output, outcome
    assert [line["step"] for line in read_lines(tmp_path / "out/metrics.jsonl")] == [1, 2, 3, 4, 5, 6, 6]
    assert (tmp_path / "out/train_results.json").exists() and (tmp_path / "out/eval_results.json").exists()
