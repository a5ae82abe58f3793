"""The training's state in the memory of each rank, from which the next world of Horovod elastic resumes.

Weights change only in the optimizer's update, during which no rank waits for another. So a rank that notices a lost
rank in a collective has the whole state of its last finished step. Some ranks may be one step ahead of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hvd_bert.checkpoint.files import Contents
from hvd_bert.checkpoint.resume import ResumePoint
from hvd_bert.distributed.world import World
from hvd_bert.errors import log


@contextmanager
def keep_on_failure(world: World, state: Callable[[], ResumePoint | None]) -> Iterator[None]:
    """Under Horovod elastic, keep `state()` for the next world if the training inside fails.

    The previous world's state is dropped only here, since a rank may be lost while that state is broadcast.
    """
    world.process.last_state = None
    try:
        yield
    except Exception:
        if world.elastic:
            world.process.last_state = state()
        raise


def newest(world: World) -> ResumePoint | None:
    """The state of the most steps in the memory of any rank, or None. Only its rank has the tensors. A collective."""
    if not world.elastic:
        return None
    mine: ResumePoint | None = world.process.last_state
    steps = world.allgather(mine.step if mine else -1)
    root = steps.index(max(steps))
    if steps[root] < 0:
        return None
    log.info("Resuming after step %d, kept by rank %d", steps[root], root)
    folder, state = world.broadcast((mine.folder, mine.state) if mine else None, root)
    tensors = dict(mine.contents.tensors) if mine and world.rank == root else {}
    return ResumePoint(folder, Contents(tensors, state), root)
