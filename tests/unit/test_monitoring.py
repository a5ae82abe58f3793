"""GPU usage through NVML, with a fake driver, and recordings of steps."""

from __future__ import annotations

import gzip
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace

import pytest
import torch
from documented import undocumented
from refusals import refused
from test_world import make_world

from hvd_bert.config.command_line import parse
from hvd_bert.distributed.devices import RankInfo
from hvd_bert.distributed.horovod_world import ready_for_timeline
from hvd_bert.monitoring import usage as module
from hvd_bert.monitoring.recording import Recording
from hvd_bert.monitoring.usage import GIB, GpuUsage, NvmlError, nvml, process_usage
from hvd_bert.training.meter import Meter


class FakeNvml(ModuleType):
    """pynvml with GPUs 0-a (40 % busy) and 0-b, which reports only its memory."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self):
        pass

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, name):
        if name not in ("GPU-0-a", "MIG-0-b"):
            raise self.NVMLError("Not Found")
        return name

    def nvmlDeviceGetUtilizationRates(self, gpu):
        if gpu.startswith("MIG"):
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=40, memory=10)

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return SimpleNamespace(used=3 * GIB, free=GIB, total=4 * GIB)

    def nvmlDeviceGetPowerUsage(self, gpu):
        if gpu.startswith("MIG"):
            raise self.NVMLError("Not Supported")
        return 250_500


@pytest.fixture
def driver(monkeypatch) -> FakeNvml:
    fake = FakeNvml("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=device))
    return fake


def fake_world(*gpus: str, rank: int = 0, further: Sequence[str] = ()) -> SimpleNamespace:
    """A world whose other ranks report a GPU that is 90 % busy. A GPU's UUID is also its name. `further`: of `rank`."""
    rank_infos = tuple(RankInfo(number, "a", number, gpu, gpu, frozenset({0})) for number, gpu in enumerate(gpus))

    def allgather(mine):
        other = {"gpu_util_percent": 90.0}
        return [mine if i.rank == rank else ([{"device": i.device} | other], "") for i in rank_infos]

    own = [gpus[rank], *further]
    return SimpleNamespace(rank=rank, size=len(rank_infos), rank_infos=rank_infos, allgather=allgather, gpus=own)


def test_no_nvml(monkeypatch, driver):
    monkeypatch.setattr(driver, "nvmlInit", lambda: (_ for _ in ()).throw(driver.NVMLError("no driver")))
    with pytest.raises(NvmlError, match=r"^no driver$"), nvml():
        pass
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlError, match="nvidia-ml-py is missing"), nvml():
        pass


def close_samplers(usage: GpuUsage) -> None:
    """After their first sample."""
    for sampler in usage._samplers.values():
        sampler.close()


def test_usage_of_all_ranks(tmp_path, driver):
    usage = GpuUsage(fake_world("0-a", "0-x", further=["0-b"]), tmp_path)  # type: ignore[arg-type]
    close_samplers(usage)
    own = {"gpu_util_percent": 40.0, "gpu_memory_gib": 3.0, "gpu_power_w": 250.5}
    assert usage.read(7) == own
    lines = [json.loads(line) for line in (tmp_path / "gpu_usage.jsonl").read_text().splitlines()]  # already on disk
    usage.close()
    assert undocumented(lines, "gpu_usage.jsonl") == undocumented(own, "metrics.jsonl") == []
    assert [line.pop("seconds") >= 0 for line in lines] == [True, True, True]
    assert lines == [
        {"step": 7, "rank": 0, "host": "a", "device": "0-a", **own},
        {"step": 7, "rank": 0, "host": "a", "device": "0-b", "gpu_memory_gib": 3.0},  # --strategy dp
        {"step": 7, "rank": 1, "host": "a", "device": "0-x", "gpu_util_percent": 90.0},
    ]


@pytest.mark.parametrize(
    ("world", "read", "said"),
    [
        (fake_world("0-x", "0-a", rank=1), {"gpu_util_percent": 90.0}, ""),  # rank 0's figures
        (fake_world("0-c"), {}, "GPU 0-c: Not Found"),
    ],
)
def test_rank_without_samples_of_its_own(tmp_path, driver, caplog, world, read, said):
    usage = GpuUsage(world, tmp_path)
    close_samplers(usage)
    assert usage.read(1) == read
    usage.close()
    assert said in caplog.text
    assert (tmp_path / module.FILE).exists() == (world.rank == 0)


BASE = ["--config", "sample"]


@pytest.mark.parametrize("steps", ["3", "0:4", "5:4", "a:b", "1:2:3", "1:999999999999"])
def test_invalid_steps_are_refused(steps):
    with refused(f"--timeline_steps {steps}"):
        parse([*BASE, f"--timeline_steps={steps}"])


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
    (tmp_path / "trace" / "rank-2.json.gz").touch()  # of an earlier start on more ranks
    for step in range(1, 5):
        recording.before(step)
        for _ in meter.timed("data", [1]):
            with meter.phase("compute"):
                pass
        recording.after(step, tmp_path)
    assert {path.name for path in (tmp_path / "trace").iterdir()} == {"rank-0.json.gz", "rank-1.json.gz"}
    trace = json.loads(gzip.decompress((tmp_path / "trace" / "rank-0.json.gz").read_bytes()))
    assert trace["distributedInfo"] == {"rank": 0, "world_size": 2}  # Holistic Trace Analysis needs it
    marks = Counter(event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation")
    assert marks == {"ProfilerStep#0": 1, "ProfilerStep#1": 1, "data": 4, "compute": 2}


def test_durations_do_not_depend_on_the_clock_of_the_day(monkeypatch):
    backwards = itertools.count(10**9, -1)
    monkeypatch.setattr(time, "time", lambda: next(backwards))
    assert 0 < process_usage(torch.device("cpu"))["real_s"] < 24 * 3600
