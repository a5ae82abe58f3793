"""GPU usage, with torch's functions replaced, and recordings of steps (--profile, --timeline_steps)."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch
from documented import undocumented
from test_world import make_world

from hvd_bert.config.command_line import parse
from hvd_bert.distributed.horovod_world import ready_for_timeline
from hvd_bert.monitoring.recording import Recording
from hvd_bert.monitoring.usage import GIB, GpuUsage, energy_j, process_usage
from hvd_bert.training.meter import Meter


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake the driver: cuda:0 is 40 % busy, cuda:1 is a MIG instance, and cuda:2 lacks NVML."""

    def utilization(gpu: torch.device) -> int:
        if gpu.index == 2:
            raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")
        if gpu.index == 1:
            raise RuntimeError("device 0 is not visible")
        return 40

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (GIB, 4 * GIB))
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda gpu: 250_500)


def read_usage(folder: Path, rank: int, *gpus: int) -> dict[str, float]:
    """Sample the GPUs once on rank `rank` of two and read the usage. The other rank's GPU is 90 % busy."""
    devices = [torch.device("cuda", gpu) for gpu in gpus]
    other = [{"device": "cuda:0", "gpu_util_percent": 90.0}]
    world = SimpleNamespace(
        rank=rank,
        gpus=devices,
        rank_infos=[SimpleNamespace(rank=number, host="a") for number in range(2)],
        allgather=lambda mine: [mine, other] if rank == 0 else [other, mine],
    )
    usage = GpuUsage(world, folder)  # type: ignore[arg-type]
    usage._end.set()
    usage._thread.join()
    read = usage.read(7)
    usage.close()
    return read


def test_usage_of_all_ranks(tmp_path):
    usage = {"gpu_util_percent": 40.0, "gpu_memory_gib": 3.0, "gpu_power_w": 250.5}
    assert read_usage(tmp_path, 0, 0, 1, 2) == usage
    lines = [json.loads(line) for line in (tmp_path / "gpu_usage.jsonl").read_text().splitlines()]
    assert undocumented(lines, "gpu_usage.jsonl") == undocumented(usage, "metrics.jsonl") == []
    assert all(line.pop("seconds") >= 0 for line in lines)
    assert lines == [
        {"step": 7, "rank": 0, "host": "a", "device": "cuda:0", **usage},
        # With --strategy dp, a rank has several GPUs.
        {"step": 7, "rank": 0, "host": "a", "device": "cuda:1", "gpu_memory_gib": 3.0},
        {"step": 7, "rank": 0, "host": "a", "device": "cuda:2", "gpu_memory_gib": 3.0},
        {"step": 7, "rank": 1, "host": "a", "device": "cuda:0", "gpu_util_percent": 90.0},
    ]


def test_other_ranks_read_the_usage_of_rank_0(tmp_path):
    assert read_usage(tmp_path, 1, 0) == {"gpu_util_percent": 90.0}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("numbers", "joules"),
    [([0], 1.5), ([0, 1], 4.0), ([0, 2], None), ([0, 3], None), ([], None)],
    ids=["one", "two", "MIG", "no counter", "no GPU"],
)
def test_energy_counters_of_gpus(monkeypatch, numbers, joules):
    def count(uuid: str) -> int:
        if uuid == "GPU-3":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return {"GPU-0": 1500, "GPU-1": 2500, "GPU-2": 9000}[uuid]

    def properties(gpu: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=gpu.index, name="NVIDIA A100 MIG 1g.5gb" if gpu.index == 2 else "NVIDIA A100")

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", count)
    found = energy_j([torch.device("cuda", number) for number in numbers])
    assert (None if math.isnan(found) else found) == joules


BASE = ["--config", "sample"]


def test_steps_to_record():
    assert parse([*BASE, "--timeline_steps", "3:5"]).profiling.steps_to_record == range(0)
    assert list(parse([*BASE, "--timeline", "t", "--timeline_steps", "3:5"]).profiling.steps_to_record) == [3, 4, 5]
    assert parse([*BASE, "--profile"]).profiling.steps_to_record == range(11, 31)


def test_timeline_keeps_the_users_variables():
    ready_for_timeline(environ := {"HOROVOD_TIMELINE": "mine.json"})
    assert environ == {"HOROVOD_TIMELINE": "mine.json", "HOROVOD_CACHE_CAPACITY": "0"}


def test_trace_of_each_rank(tmp_path):
    world = make_world(size=2)
    world.allgather = lambda value: [value, value]  # type: ignore[method-assign]
    meter = Meter(world)
    recording = Recording(parse([*BASE, "--profile", "--timeline_steps", "2:3"]).profiling, 4, meter, world, False)
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "rank-2.json.gz").touch()  # from an earlier start with more ranks
    for step in range(1, 5):
        recording.before(step)
        for _ in meter.timed("data", [1]):
            with meter.phase("compute"):
                pass
        recording.after(step, tmp_path)
    assert {path.name for path in (tmp_path / "trace").iterdir()} == {"rank-0.json.gz", "rank-1.json.gz"}
    trace = json.loads(gzip.decompress((tmp_path / "trace" / "rank-0.json.gz").read_bytes()))
    assert trace["distributedInfo"] == {"rank": 0, "world_size": 2}  # required by Holistic Trace Analysis
    marks = Counter(event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation")
    assert marks == {"ProfilerStep#0": 1, "ProfilerStep#1": 1, "data": 4, "compute": 2}


def test_durations_do_not_depend_on_the_system_clock(monkeypatch):
    backwards = itertools.count(10**9, -1)
    monkeypatch.setattr(time, "time", lambda: next(backwards))
    assert 0 < process_usage(torch.device("cpu"))["real_s"] < 24 * 3600
