"""Records the CUDA graphs of a training (--cuda_graphs) before its first step, for the sizes that its batches have."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial

from hvd_bert.config.training import TrainArguments
from hvd_bert.data.batch_plan import BUCKET, BatchPlan, Ids
from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError, log, short_reason
from hvd_bert.model import cuda_graphs
from hvd_bert.model.cuda_graphs import CudaGraphs, parts_of
from hvd_bert.model.precision import autocast
from hvd_bert.tasks.base import Task
from hvd_bert.training.state import random_numbers, set_random_numbers

STEPS = 200  # whose sizes are looked at
MOST = 6  # graphs of a size take as much memory as the layers' gradients and outputs


def record(task: Task, plan: BatchPlan, step: int, args: TrainArguments, world: World) -> CudaGraphs | None:
    """Graphs for the most frequent sizes of the next steps; other sizes run eagerly. None without --cuda_graphs.

    Random numbers stay as they are. Raises UserError if the model or this GPU does not support it.
    """
    if not cuda_graphs.wanted(args, world.device):
        if args.cuda_graphs:
            log.info("--cuda_graphs: no effect without a GPU.")
        return None
    start, sizes, passes = time.perf_counter(), Counter[int](), dict[int, Ids]()
    for ids in (ids for later in range(step, step + STEPS) for ids in plan.rank_windows(later, world.rank)):
        size = -(-int(plan.lengths[ids].sum()) // BUCKET) * BUCKET
        if size:  # else the rank has no windows left
            sizes[size] += 1
            passes.setdefault(size, ids)
    chosen = dict(sizes.most_common(MOST))
    parts = parts_of(task.model, world.size == 1)
    before, training = random_numbers(world.gpus), task.model.training
    task.model.train()
    graphs = CudaGraphs(parts, partial(autocast, world.device, args.precision, keeps_casts=False))
    try:
        for size in sorted(chosen, reverse=True):  # the largest first: the others use its memory
            graphs.record(partial(task.losses, task.model, task.batch(passes[size])))
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"--cuda_graphs: recording failed: {short_reason(error)}. Omit the flag.") from error
    finally:
        task.model.train(training)
        set_random_numbers(before, world.gpus)
    log.info(
        "CUDA graphs: %d part(s) of the model for batches of %s tokens (%.0f%% of them), recorded in %.1f s.",
        len(parts),
        ", ".join(f"{size:,}" for size in sorted(chosen)),
        100 * sum(chosen.values()) / sizes.total(),
        time.perf_counter() - start,
    )
    return graphs
