"""The training's state in the memory of each rank, from which the next world of Horovod elastic resumes.

The weights change only in the optimizer's update, in which no rank waits for another one. So a rank that notices in a
collective that another one is lost has the whole state of its last finished step. Some ranks may have finished one step
more than others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hvd_bert.checkpoint.files import Contents, name_of
from hvd_bert.checkpoint.resume import ResumePoint, rank_batch
from hvd_bert.config.settings import TrainArguments
from hvd_bert.distributed.world import World, log
from hvd_bert.training.state import TrainState

LAST_STATE: list[ResumePoint] = []  # at most one, of this process


@contextmanager
def keep_on_failure(state: TrainState, args: TrainArguments) -> Iterator[None]:
    """Under Horovod elastic, keep `state` for the next world if the training inside fails.

    What an earlier world left is dropped only here, since a rank may be lost while it is sent.
    """
    LAST_STATE.clear()
    try:
        yield
    except Exception:
        if state.world.elastic:
            tensors, rest = state.local_snapshot()
            rest |= {"rank_batch": rank_batch(args)}
            LAST_STATE.append(ResumePoint(args.folder / name_of(state.step), Contents(tensors, rest)))
        raise


def newest(world: World) -> ResumePoint | None:
    """The newest state that a rank has kept, or None. Only that rank has its tensors. A collective."""
    if not world.elastic:
        return None
    steps = world.allgather(LAST_STATE[0].step if LAST_STATE else -1)
    root = steps.index(max(steps))
    if steps[root] < 0:
        return None
    log.info("Resuming after step %d, kept by rank %d", steps[root], root)
    folder, state = world.broadcast((LAST_STATE[0].folder, LAST_STATE[0].state) if world.rank == root else None, root)
    tensors = dict(LAST_STATE[0].contents.tensors) if world.rank == root else {}
    return ResumePoint(folder, Contents(tensors, state), root)
