"""--report_to: metrics, settings and sample answers in the files of TensorBoard and of wandb in offline mode."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
from refusals import refused
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdowns_to_safe_html
from tensorboard.plugins.hparams import metadata as hparams
from test_train_run import base, process_stays_as_it_was, train  # noqa: F401  fixtures

from hvd_bert.distributed.world import CollectiveError
from hvd_bert.output.metrics_log import MetricsLogger
from hvd_bert.output.reporters import base as base_module
from hvd_bert.output.reporters.tensorboard import TensorBoard
from hvd_bert.output.run_folder import RUN_FILES

NASTY = "<script>alert(1)</script> & *bold* _it_ `code` [x](javascript:y) | a\n\n# heading\n\n    code &lt;"


def train_and_resume(base: list[str], out: Path, name: str) -> None:  # noqa: F811
    """Train three steps and evaluate; then remove checkpoint 3 and resume from step 2 with other settings."""
    flags = ["--output_dir", str(out), "--report_to", name, "--logging_steps", "1", "--save_steps", "1"]
    flags += ["--eval_strategy", "no"]
    train(base, *flags)
    (out / "train_results.json").unlink()
    shutil.rmtree(out / "checkpoint-3")
    train(base, *flags, "--per_device_eval_batch_size", "4")
    written = {path.name for path in out.glob("[!.]*")}
    assert {*base_module.REPORTERS[name][1]} <= written <= {*RUN_FILES, "checkpoint-2", "checkpoint-3"}


def logged(out: Path) -> dict[tuple[int, str], float]:
    """Return the values in metrics.jsonl by (step, key)."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {(row["step"], key): value for row in rows for key, value in row.items()}


def test_tensorboard(base: list[str], tmp_path):  # noqa: F811
    out = tmp_path / "out"
    train_and_resume(base, out, "tensorboard")
    events = EventAccumulator(str(out / "tb")).Reload()
    expected = logged(out)
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (step, pytest.approx(expected[step, "loss"])) for step in (1, 2, 3)
    ]
    assert [(e.step, e.value) for e in events.Scalars("eval/f1")] == [(3, pytest.approx(expected[3, "eval_f1"]))]
    content = events.PluginTagToContent(hparams.PLUGIN_NAME)[hparams.SESSION_START_INFO_TAG]
    settings = hparams.parse_session_start_info_plugin_data(content).hparams
    assert settings["learning_rate"].number_value == 5e-5 and settings["max_steps"].number_value == 3
    assert settings["strategy"].string_value == "none" and settings["do_eval"].bool_value
    assert settings["global_batch"].number_value == 6, "the effective value, not the flag's -1"
    assert "eval_steps" not in settings, "it is None"
    text = events.Tensors("eval/samples")[-1].tensor_proto.string_val[0].decode()
    samples = json.loads((out / "eval_samples.json").read_text())
    assert samples and all(sample["question"] in text and sample["prediction"] in text for sample in samples)


def test_sample_answers_are_shown_unchanged(tmp_path):
    reporter = TensorBoard(tmp_path)
    reporter.samples(1, [{"question": NASTY, "answers": ["one", NASTY]}, {"question": "second", "answers": []}])
    reporter.close(True)
    (event,) = EventAccumulator(str(tmp_path / "tb")).Reload().Tensors("eval/samples")
    shown = markdowns_to_safe_html(event.tensor_proto.string_val, "".join)
    tags = set(re.findall(r"<(\w+)", shown))
    assert tags == {"pre", "code"}
    plain = html.unescape(re.sub(r"<[^>]*>", "", shown))
    assert [line.split(maxsplit=1) for line in plain.splitlines() if line.strip()] == [
        ["question", " ".join(NASTY.split())],
        ["answers", f"one | {' '.join(NASTY.split())}"],
        ["question", "second"],
        ["answers"],
    ]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the package wandb in offline mode, without state from other tests."""
    package = pytest.importorskip("wandb")
    package.teardown()
    for name, value in (("MODE", "offline"), ("SILENT", "true"), ("DISABLE_GIT", "true"), ("X_DISABLE_STATS", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    return package


@pytest.mark.slow
def test_wandb(base: list[str], tmp_path, wandb):  # noqa: F811
    out = tmp_path / "out"
    train_and_resume(base, out, "wandb")
    wandb.teardown()
    assert not (out / "tb").exists()
    run_id = json.loads((out / "tracking.json").read_text())["wandb"]
    files = list((out / "wandb").glob("offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{run_id}.wandb"] * 2, "the resumed run is the same run"
    for file in files:  # protocol buffers, searched for strings
        content = file.read_bytes()
        for text in ("train/global_step", "train/loss", "eval/f1", str(logged(out)[3, "eval_f1"]), "eval/samples"):
            assert text.encode() in content, text


@pytest.mark.parametrize("folder", [False, True], ids=["nothing", "a folder of that name"])
def test_missing_package(base: list[str], tmp_path, monkeypatch, folder: bool):  # noqa: F811
    monkeypatch.setitem(base_module.REPORTERS, "no_such_package", ("none", []))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if folder:
        (tmp_path / "no_such_package").mkdir()
    with refused("--report_to no_such_package", "pip install .[no_such_package]", error=CollectiveError) as failed:
        train(base, "--output_dir", str(tmp_path / "out"), "--report_to", "no_such_package")
    assert failed.value.status == 2 and not (tmp_path / "out").exists()


def test_wandb_without_a_login(tmp_path, monkeypatch, wandb):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for name, value in (("MODE", "online"), ("CONFIG_DIR", str(tmp_path))):
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with refused("--report_to wandb", "WANDB_MODE"):
        base_module.check_reporters(["wandb"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()
    base_module.check_reporters(["wandb"])
    wandb.teardown()


@pytest.mark.slow
def test_wandb_whose_service_hangs(tmp_path, monkeypatch, caplog, wandb):
    module = pytest.importorskip("hvd_bert.output.reporters.wandb")

    def services() -> list[psutil.Process]:
        return [process for process in psutil.Process().children() if process.name() == module.SERVICE]

    monkeypatch.setattr(module, "PATIENCE_UNFINISHED_S", 0.5)
    logger = MetricsLogger(tmp_path, True, [reporter := module.Wandb(tmp_path)])
    (service,) = services()
    service.suspend()
    os.waitpid(service.pid, os.WUNTRACED)  # wait until it has stopped
    try:
        logger.close()
        assert "not taken everything in time. Its last values may be missing" in caplog.text
        reporter._thread.join()
        assert not service.is_running() or service.status() == psutil.STATUS_ZOMBIE, "wandb would wait for it at exit"
    finally:
        if service.is_running():
            service.resume()
    wandb.teardown()  # as at the interpreter's exit


class Run:
    """Replaces a wandb run; logging the second step fails."""

    id = "a1"

    def __init__(self) -> None:
        self.seen = list[object]()

    def define_metric(self, *_: object, **__: object) -> None:
        pass

    def log(self, values: dict[str, float]) -> None:
        self.seen.append(step := values["train/global_step"])
        if step == 2:
            raise OSError(28, "No space left on device")

    def finish(self, exit_code: int) -> None:
        self.seen.append(f"finished with {exit_code}")


def test_failure_of_wandb_is_one_warning(tmp_path, monkeypatch, caplog):
    module, run = pytest.importorskip("hvd_bert.output.reporters.wandb"), Run()
    monkeypatch.setattr(module.wandb, "init", lambda **_: run)
    logger = MetricsLogger(tmp_path, True, [reporter := module.Wandb(tmp_path)])
    for step in (1, 2):
        logger._record(step, {})
    reporter._thread.join()
    for step in (3, 4):
        logger._record(step, {})
    logger.close()
    assert caplog.messages == ["wandb cannot be written: No space left on device. Training continues."]
    assert run.seen == [1, 2, "finished with 1"]
