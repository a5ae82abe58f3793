"""The training's state in the memory of each rank, from which the next world of Horovod elastic resumes.

The weights change only in the optimizer's update, in which no rank waits for another one. So a rank that notices in a
collective that another one is lost has the whole state of its last finished step. Some ranks may have finished one step
more than others.
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

    What an earlier world left is dropped only here, since a rank may be lost while it is sent.
    """
    world.process.last_state = None
    try:
        yield
    except Exception:
        if world.elastic:
            world.process.last_state = state()
        raise


def newest(world: World) -> ResumePoint | None:
    """The newest state that a rank has kept, or None. Only that rank has its tensors. A collective."""
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
