"""Choose the device and the number of CPU threads of a rank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_bert.errors import UserError
from hvd_bert.machine import MAX_THREADS


def choose_device(num_devices: int, local_rank: int, local_size: int) -> str:
    """Return a rank's device, "cpu" or "cuda:i". `num_devices`: number of visible GPUs.

    If one GPU is visible, every rank gets number 0, because a scheduler may give each task a GPU of its own; ranks that
    share one fail in `check_devices`. Raises UserError if several GPUs are visible, but fewer than ranks on this host.
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
    """Return the number of threads for a rank that may use the cores `mine`: its equal share of these cores.

    `on_this_host`: the cores of each rank on this host; ranks whose cores overlap share them. `limit`: the cgroup's CPU
    limit in cores, for all ranks together. The kernel pauses processes that exceed it: with a limit of 1 core, a small
    model trained 4 to 9 times slower with 2 threads than with 1.
    """
    sharers = sum(1 for cores in on_this_host if cores & mine)
    share = len(mine) // max(1, sharers)
    if limit is not None:
        share = min(share, int(limit / len(on_this_host)))
    return max(1, share)


def choose_threads(environ: Mapping[str, str], share: int) -> int:
    """Return OMP_NUM_THREADS or, if it is not set, the smaller of `share` and Slurm's --cpus-per-task.

    A variable is ignored if it is not a number from 1 to MAX_THREADS.
    """
    chosen = _parse_threads(environ.get("OMP_NUM_THREADS", "").split(",")[0])
    allotted = _parse_threads(environ.get("SLURM_CPUS_PER_TASK", ""))
    return chosen or min(share, allotted or share)


def _parse_threads(text: str) -> int | None:
    found = re.fullmatch(r" *([0-9]{1,9}) *", text)
    return int(found[1]) if found and 1 <= int(found[1]) <= MAX_THREADS else None


@dataclass(frozen=True)
class RankInfo:
    """Host, device and cores of a rank. `device_id`: the GPU's `physical_id`, equal in all processes; None on a CPU."""

    rank: int
    host: str
    local_rank: int
    device: str
    device_id: str | None
    cores: frozenset[int]


def physical_id(gpu: Any) -> str:
    """Return the UUID of a GPU or, for a MIG instance, the PCI address of its GPU. `gpu`: torch's device properties."""
    if "MIG" in gpu.name and hasattr(gpu, "pci_bus_id"):  # older versions of torch lack pci_bus_id
        return f"PCI {gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}"
    return str(gpu.uuid)


def check_devices(rank_infos: Sequence[RankInfo]) -> None:
    """Raise UserError if two ranks share a GPU, or if only some ranks have a GPU."""
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
