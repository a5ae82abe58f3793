"""Whether all ranks have the same weights: a checksum of each, compared over the ranks."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from hvd_bert.distributed.logs import describe_ranks
from hvd_bert.distributed.world import CollectiveError, World
from hvd_bert.errors import EXIT_FAILURE

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MAX_NAMES = 5


def checksum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits as integers, modulo 2^64 (0-dim, on its device). One flipped bit always changes it."""
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)


def check_copies(model: nn.Module, world: World, step: int) -> None:
    """Raise CollectiveError if a weight differs between ranks. A collective."""
    weights = model.state_dict()
    mine = torch.stack([checksum(weight) for weight in weights.values()]).tolist()
    ranks = [tuple(sums) for sums in world.allgather(mine)]
    (most, count), *others = Counter(ranks).most_common()
    if not others:
        return
    differing = [rank for rank, sums in enumerate(ranks) if sums != most]
    names = [name for name, *sums in zip(weights, *ranks, strict=True) if len(set(sums)) > 1]
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    hosts = ", ".join(dict.fromkeys(world.rank_infos[rank].host for rank in differing))
    # Such as 1 of 2.
    tie = " No majority tells which are right." if 2 * count <= world.size else ""
    raise CollectiveError(
        f"The weights of {describe_ranks(differing)} on {hosts} differ from those of the other ranks after step {step},"
        f" in {', '.join(names[:MAX_NAMES])}{more}.{tie} A memory or a link may be faulty. Check these hosts, and"
        " rerun with the same --output_dir to resume from the last checkpoint, or with --resume_from_checkpoint from an"
        " earlier one.",
        status=EXIT_FAILURE,
    )
