"""The device and the CPU threads of a rank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_bert.errors import UserError
from hvd_bert.machine import MAX_THREADS


def choose_device(num_devices: int, local_rank: int, local_size: int) -> str:
    """The device of a rank, "cpu" or "cuda:i", from the number of visible GPUs. Raises UserError if there are too few.

    A scheduler may make only one GPU visible to each task, as number 0. `check_devices` refuses one that is shared.
    """
    if num_devices == 0:
        return "cpu"
    if num_devices == 1:
        return "cuda:0"
    if local_rank >= num_devices:
        raise UserError(
            f"{local_size} ranks on this host, but only {num_devices} GPUs are visible. Start at most"
            f" {num_devices} ranks per host, or request more GPUs (Slurm: --gres=gpu:N)."
        )
    return f"cuda:{local_rank}"


def share_cores(mine: frozenset[int], on_this_host: Sequence[frozenset[int]], limit: float | None = None) -> int:
    """Number of threads for a rank that may use the cores `mine`, shared by the ranks with overlapping sets.

    `limit`: the cgroup's limit of CPU time for all ranks of this host, in cores. More threads than that would stop
    each other: with 2 on a limit of 1 a small model trained 4 to 9 times slower than with 1.
    """
    sharers = sum(1 for cores in on_this_host if cores & mine)
    share = len(mine) // max(1, sharers)
    if limit is not None:
        share = min(share, int(limit / len(on_this_host)))
    return max(1, share)


def choose_threads(environ: Mapping[str, str], share: int) -> int:
    """Threads per rank: OMP_NUM_THREADS, else its `share` of the cores, at most Slurm's --cpus-per-task.

    A value that is no number, or above MAX_THREADS, is ignored.
    """
    chosen = _parse_threads(environ.get("OMP_NUM_THREADS", "").split(",")[0])
    allotted = _parse_threads(environ.get("SLURM_CPUS_PER_TASK", ""))
    return chosen or min(share, allotted or share)


def _parse_threads(text: str) -> int | None:
    found = re.fullmatch(r" *([0-9]{1,9}) *", text)
    return int(found[1]) if found and 1 <= int(found[1]) <= MAX_THREADS else None


@dataclass(frozen=True)
class RankInfo:
    """Host, device and cores of a rank. `device_id`: identifies the GPU in all processes; None on a CPU."""

    rank: int
    host: str
    local_rank: int
    device: str
    device_id: str | None
    cores: frozenset[int]


def physical_id(gpu: Any) -> str:
    """The UUID of a GPU, from torch's properties; for a MIG instance the PCI address of its GPU."""
    if "MIG" in gpu.name and hasattr(gpu, "pci_bus_id"):  # older versions of torch lack it
        return f"PCI {gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}"
    return str(gpu.uuid)


def check_devices(rank_infos: Sequence[RankInfo]) -> None:
    """Raise UserError if two ranks share a GPU, or only some ranks have one."""
    if len({info.device == "cpu" for info in rank_infos}) > 1:
        without = dict.fromkeys(info.host for info in rank_infos if info.device == "cpu")
        raise UserError(
            f"Some ranks have a GPU, but those on {', '.join(without)} have none. Run `nvidia-smi` there, leave that"
            " host out, or request a GPU per rank."
        )
    taken = Counter((info.host, info.device_id) for info in rank_infos if info.device_id is not None)
    for (host, device_id), times in taken.items():
        if times > 1:
            raise UserError(
                f"{times} ranks on {host} would share one GPU ({device_id}), which NCCL refuses, also with a MIG"
                " instance for each. Start one rank per GPU, or request more GPUs (Slurm: --gres=gpu:N, with"
                " --gpus-per-task=1 or all of them visible to each task)."
            )
