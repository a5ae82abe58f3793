"""The world: hosts, devices, the check that ranks have equal data, and the limits of cgroups."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import psutil
import torch
from refusals import refused

from hvd_bert import machine
from hvd_bert.distributed.devices import RankInfo
from hvd_bert.distributed.world import CollectiveError, World
from hvd_bert.tasks.dataset import Examples
from hvd_bert.tasks.question_answering import QuestionAnswering


def make_world(rank: int = 0, size: int = 1) -> World:
    """Make a world without collectives. For `size` > 1, `heard` adds an allgather."""
    numbers = {"rank": rank, "size": size, "local_rank": rank, "local_size": size, "cross_rank": 0}
    world = World()
    for name, value in numbers.items():
        setattr(world, name, value)
    return world


def heard(world: World, messages: Sequence[object]) -> World:
    """Replace `world.allgather`: other ranks send their item of `messages`. Returns `world`."""

    def allgather(mine):
        return [mine if rank == world.rank else message for rank, message in enumerate(messages)]

    world.allgather = allgather  # type: ignore[method-assign]
    return world


def on_hosts(*hosts: str) -> tuple[RankInfo, ...]:
    return tuple(RankInfo(rank, host, 0, "device", None, frozenset({0})) for rank, host in enumerate(hosts))


def test_description_of_the_world(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    world = make_world(size=3)
    world.rank_infos = on_hosts("b", "a", "b")
    threads = f"{torch.get_num_threads()} thread(s) per rank"
    assert world.hosts == ["b", "a"]
    assert world.describe()[1:] == [f"b: rank 0 device, rank 2 device; {threads}", f"a: rank 1 device; {threads}"]
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert world.describe()[1].startswith("Slurm job id 17")


def test_training_files_that_differ_between_hosts():
    def values(path: str, digest: str) -> dict[str, object]:
        task = QuestionAnswering.__new__(QuestionAnswering)
        task.tokenizer = SimpleNamespace(backend_tokenizer=SimpleNamespace(to_str=lambda: "rules"))
        task.train = Examples(list, np.array([3, 4]), digest)
        return {"--train_file": path} | task.fingerprint()

    here = values("/a/train.json", "1" * 12)
    for there, named in (
        (values("/b/train.json", "1" * 12), ["--train_file", "/a/train.json on a (rank 0)", "/b/train.json on b"]),
        (values("/a/train.json", "2" * 12), ["the training data", "1" * 12, "2 windows", "2" * 12]),
        (here | {"the added tokens": 2}, ["the added tokens", "None on a", "2 on b"]),
    ):
        world = heard(make_world(size=2), [None, there])
        world.rank_infos = on_hosts("a", "b")
        with refused(*named, error=CollectiveError):
            world.check_same(here)


def test_limits_of_the_cgroup_and_its_parents(tmp_path, monkeypatch):
    task = tmp_path / "pod" / "task"
    task.mkdir(parents=True)
    (task.parent / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    monkeypatch.setattr(machine, "_cgroup", lambda: task)
    assert machine.cpu_limit() == 0.5
    assert 1000 < machine.free_memory() <= machine.total_memory() == psutil.virtual_memory().total
    for folder, maximum, used, cached in ((task, "max", 10, 0), (tmp_path, 1000, 400, 100)):
        (folder / "memory.max").write_text(f"{maximum}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 9\nactive_file {cached}\ninactive_file {cached}\n")
    assert (machine.free_memory(), machine.total_memory()) == (800, 1000)  # the page cache counts as free
