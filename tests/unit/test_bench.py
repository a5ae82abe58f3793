"""The benchmark's arithmetic, workload and flags. tests/integration/test_bench.py runs the benchmark."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused
from test_world import make_world

from hvd_bert.distributed import runner
from hvd_bert.distributed.runner import join
from hvd_bert.model.layers import place
from hvd_bert.output.metrics_log import MetricsLogger
from hvd_bert.tasks.base import load_task
from hvd_bert.tools.bench import host_time, speed
from hvd_bert.tools.bench.__main__ import parse
from hvd_bert.tools.bench.speed import SQUAD_DECILES, RandomWindows, lengths_like_squad
from hvd_bert.training import start as starting
from hvd_bert.training.loop import Training, train_only
from hvd_bert.training.start import Start, prepare

TINY = {"model_type": "bert", "vocab_size": 1100, "hidden_size": 32, "num_hidden_layers": 3}
TINY |= {"num_attention_heads": 2, "intermediate_size": 64}


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return f"--model={tmp_path}"


def small_training(folder, *flags, callbacks=()):
    """Set up a training of TINY on random windows."""
    (folder / "config.json").write_text(json.dumps(TINY))
    config, world = parse([f"--model={folder}", "--strategy=none", *flags])[1], make_world()
    start = Start(config, task := RandomWindows(config, world)).in_folder(folder)
    place(task.model, world.device, config.train.torch_compile)
    logger = MetricsLogger(folder, enabled=False, callbacks=callbacks)
    return Training(start, prepare(start, world), None, logger, world)


def test_lengths_are_distributed_as_in_squad():
    lengths = lengths_like_squad(20_000, 384, seed=0)
    assert lengths.mean() == pytest.approx(178, abs=2)
    assert (lengths.min() >= SQUAD_DECILES[0], lengths.max()) == (True, 383)
    assert lengths_like_squad(100, 128, seed=0).max() == 128


def test_spread_of_sections():
    spread = speed.spread([{"step_s": seconds} for seconds in (0.5, 0.7, 0.4)])
    assert spread["step_s"] == {"median": 0.5, "least": 0.4, "most": 0.7}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--steps", "1"], "--steps 1"),
        (["--model", "m", "--train-file", "t"], "--model applies"),
        (["--model_name_or_path", "m"], "--model_name_or_path"),
        (["--no_do_train"], "--do_train"),
        (["--per_device_train_batch_size", "auto"], "--per_device_train_batch_size"),
    ],
)
def test_wrong_flags(words, named):
    with refused(named):
        parse(words)


def test_flags_of_the_trainer_are_used():
    flags, config = parse(["--steps", "4", "--repeats", "2", "--bf16", "--learning_rate", "1e-3"])
    assert (config.train.max_steps, config.train.logging_steps, config.train.bf16) == (12, 4, True)
    assert flags.random and not parse(["--config", "sample"])[0].random


def test_adapters_are_measured(tiny):
    task = load_task(parse([tiny, "--lora_rank", "2"])[1], make_world(), RandomWindows)
    assert task.forward_flops.frozen > 0 and task.lora


def test_settings_for_evaluations_and_lost_ranks_are_ignored(tiny):
    words = ["--steps=2", "--repeats=1", "--early_stopping_patience=2", "--elastic"]
    (world := runner.join("none")).set_up_device()
    train_only(parse([tiny, "--strategy=none", *words])[1], world, [recorder := speed.Recorder()], RandomWindows)
    assert [row["step"] for row in recorder.rows] == [1, 2, 4]


def event(key: str, count: int, device_ms: float = 0, kind: str = "CPU", annotation: bool = False) -> Any:
    """Make a row of a profile's key_averages()."""
    times = {"self_device_time_total": 1000 * device_ms, "self_cpu_time_total": 5000.0}
    device = SimpleNamespace(name=kind)
    return SimpleNamespace(key=key, count=count, device_type=device, is_user_annotation=annotation, **times)


EVENTS = [
    event("gemm", 300, 9, "CUDA"),
    event("Memcpy HtoD", 7, 1, "CUDA"),
    event("layer_norm", 50, 2, "CUDA"),
    event("Optimizer.step", 1, 4, "CUDA", annotation=True),
    event("aten::linear", 300, 9),
    event("cudaDeviceSynchronize", 1),
]
LAUNCHES = {"cudaLaunchKernel": 20, "cudaLaunchKernelExC": 4, "cuLaunchKernelEx": 3, "cudaGraphLaunch": 2}
EVENTS += [event(*row) for row in (LAUNCHES | {"cudaMemcpyAsync": 7, "cudaMemsetAsync": 1}).items()]


def test_advice_if_the_gpu_waits_for_the_host():
    found = host_time.figures([0.02, 0.05, 0.03], EVENTS)
    assert [row["name"] for row in found.pop("kernels")] == ["gemm", "layer_norm", "Memcpy HtoD"]
    assert found == {"host_ms_per_step": 30, "gpu_busy_ms_per_step": pytest.approx(12), "launches_per_step": 37}
    advice = host_time.advice(found, False)
    assert "37 launches take the host 30.0 ms" in advice and "the GPU 12.0 ms" in advice
    assert "reduce-overhead" in advice and "reduce-overhead" not in host_time.advice(found, True)
    assert host_time.advice(host_time.figures([0.011], EVENTS), False) is None
    nothing = dict.fromkeys(host_time.FIGURES)
    assert host_time.figures([], EVENTS[4:5]) == {**nothing, "kernels": []} and not host_time.advice(nothing, False)


@pytest.mark.slow
def test_host_time_is_measured_in_the_warm_up_and_after_the_sections(tiny, tmp_path, monkeypatch, capsys):
    """Run the host timer on the CPU, with made-up profile rows."""
    calls, averages = [], torch.profiler.profile.key_averages

    def key_averages(profile: Any) -> Any:
        names = {row.key: row.count for row in averages(profile)}
        assert names["Optimizer.step#AdamW.step"] == 1 and names["aten::embedding"] > 1  # one step was profiled
        return EVENTS

    def set_mode(mode: str) -> None:
        calls.append(mode)
        for text in ("called a synchronizing CUDA operation", "another") if mode == "default" else ():
            warnings.warn(text, stacklevel=1)

    on_step = host_time.HostTimer.on_step
    monkeypatch.setattr(starting, "set_up", lambda *_: None)  # it would change this test process
    monkeypatch.setattr(host_time, "measurable", lambda *_: True)
    monkeypatch.setattr(host_time.HostTimer, "on_step", lambda self, step: (calls.append(step), on_step(self, step)))
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: calls.append("waited"))
    monkeypatch.setattr(torch.profiler.profile, "key_averages", key_averages)
    words = [tiny, "--steps=4", "--repeats=2", "--gradient_accumulation_steps=2", "--strategy=none"]
    flags, config = parse([*words, "--json", str(tmp_path / "bench.json")])
    clock = SimpleNamespace(perf_counter=iter(range(5, 999, 5)).__next__)
    monkeypatch.setattr(host_time, "time", clock)
    (world := join("none")).set_up_device()
    speed.run(flags, config, world)
    # The warm-up's second half (steps 3 and 4) is timed. Waits are counted until step 6, to include those of logging.
    timed = ["waited", "warn", 3, "waited", 4, 5, 6, "default", *range(7, 13)]
    assert calls == [1, 2, *timed, "waited", 13, "waited"]
    record = json.loads((tmp_path / "bench.json").read_text())
    assert (record["host_ms_per_step"], record["launches_per_step"]) == (5000, 37)
    assert record["kernels"][0] == {"name": "gemm", "calls": 300, "seconds": pytest.approx(0.009)}
    assert len(record["host_waits"]) == 1 and record["host_waits"][0].startswith(__file__)
    assert record["evaluation_windows_per_s"] > 0 and record["memory_reserved_bytes"] is None  # None without a GPU
    printed = capsys.readouterr().out
    assert "launches per step: kernels, graphs, copies" in printed and "The GPU waits for the host" in printed
