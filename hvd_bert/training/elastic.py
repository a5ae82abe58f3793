"""The training state that each rank keeps in memory, from which the next world of Horovod elastic resumes.

Weights change only in the optimizer's update, which has no collectives. A rank notices that another rank is lost only
in a collective, so it then has the complete state of its last finished step. Ranks may differ by one step.
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
    """Context manager: under Horovod elastic, keep `state()` for the next world if the block raises an exception.

    The state from the previous world is dropped only on entry, since a rank may be lost while that state is broadcast.
    """
    world.process.last_state = None
    try:
        yield
    except Exception:
        if world.elastic:
            world.process.last_state = state()
        raise


def newest(world: World) -> ResumePoint | None:
    """Return the most advanced state in any rank's memory, or None. Only that rank gets the tensors. A collective."""
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
