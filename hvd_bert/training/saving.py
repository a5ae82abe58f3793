"""Checkpoints during training: training pauses while its state is copied, then a thread writes the copy to disk."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import safetensors.torch

from hvd_bert.checkpoint import files
from hvd_bert.checkpoint.files import Contents
from hvd_bert.checkpoint.resume import ResumePoint
from hvd_bert.config.settings import CheckpointArguments
from hvd_bert.config.training import TrainArguments
from hvd_bert.distributed import slurm
from hvd_bert.distributed.signals import CTRL_C, FOLDER
from hvd_bert.distributed.world import CollectiveError
from hvd_bert.errors import EXIT_FAILURE, EXIT_STOPPED, UserError, log
from hvd_bert.output import output_dir
from hvd_bert.tasks.base import Task
from hvd_bert.training.state import TrainState


class Checkpoints:
    """Saves a TrainState. All ranks call each method; rank 0 writes."""

    def __init__(
        self,
        state: TrainState,
        task: Task,
        folder: Path,
        args: CheckpointArguments,
        settings: dict[str, Any],
        facts: dict[str, Any],
    ) -> None:
        """`folder`: the output folder. `settings`: all settings by flag name. `facts`: `Start.facts`."""
        self.state, self.folder, self.args = state, folder, args
        self._task, self._settings, self._facts = task, settings, facts
        self._writer = ThreadPoolExecutor(1, "checkpoint writer")  # at exit, Python waits for its pending writes
        self._running: Future[tuple[int, Exception | None, float]] | None = None  # result of `_write`
        self._first_step = state.step
        self._last_saved = -1  # not the resumed step: its checkpoint may be in another run's folder
        self._diverged = False
        self.output_dir_missing = False  # result of rank 0's last check; False on other ranks
        self.rerun_with = ""  # flags to add to the command to resume the run
        self.on_save: Callable[[int, Path], None] = lambda step, folder: None  # called on rank 0 if a write succeeds
        self._new: dict[str, float] = {}  # the seconds of `totals` since the last log line
        # The number of checkpoints, the seconds that training was paused, and the seconds that the writes took.
        self.totals = {"checkpoints": 0, "checkpoint_pause_s": 0.0, "checkpoint_write_s": 0.0}

    def save(self, whole: bool = False) -> None:
        """Copy the state while training pauses; the writer thread writes the copy during the next steps.

        Saves nothing if this step is already saved or, with a warning, if the loss is NaN or infinite. Waits for the
        previous write, so a killed run repeats at most --save_steps steps plus the steps that ran during one write.
        `whole`: save the optimizer's state even with --save_only_model.
        """
        model_only = self.args.save_only_model and not whole
        if self.state.step == self._last_saved and not (whole and self.args.save_only_model):
            return
        with self._pause():
            self._finish_write(warns=True)
            # Other ranks wait here for rank 0's write. At the next allreduce, a slow write would look like a stall.
            self.state.world.allgather(None)
            snapshot = self.state.snapshot()
        self._last_saved = self.state.step
        if snapshot:
            self._diverged = not all(math.isfinite(loss) for loss, *_ in snapshot.state["since_last_look"])
            if self._diverged:
                log.warning("No checkpoint is saved at step %d: the loss is NaN or infinite.", self.state.step)
                return
            self.totals["checkpoints"] += 1
            best = files.checkpoint_name(self.state.best.step)
            keep = {best} if self.args.load_best_model_at_end else set()
            self._running = self._writer.submit(self._write, snapshot, model_only, keep)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Context manager: count the block's time as a checkpoint pause."""
        self.state.meter.end_interval("other")
        with self.state.meter.phase("checkpoint"):
            start = time.perf_counter()
            yield
            self._count("checkpoint_pause_s", time.perf_counter() - start)

    def _count(self, name: str, seconds: float) -> None:
        self._new[name] = self._new.get(name, 0.0) + seconds
        self.totals[name] += seconds

    @cached_property
    def _description(self) -> dict[str, bytes]:
        """Names and contents of the model's small files, such as config.json, which are equal in all checkpoints."""
        with tempfile.TemporaryDirectory() as folder:
            self._task.save_description(Path(folder))
            return {file.name: file.read_bytes() for file in Path(folder).iterdir()}

    def _write(self, snapshot: Contents, model_only: bool, keep: set[str]) -> tuple[int, Exception | None, float]:
        """Write a checkpoint and prune old ones, in the writer thread. Returns its step, error or None, and seconds."""
        start, failure = time.perf_counter(), None
        step, tensors, state = snapshot.state["step"], snapshot.tensors, snapshot.state | self._facts
        if model_only:
            tensors, state = {"model": tensors["model"]}, {"step": step, "model_only": True}
        try:
            files.write(self.folder, step, Contents(tensors, state, self._description))
            try:
                files.prune(self.folder, self.args.save_total_limit, keep)
            except OSError as error:
                log.warning("An old checkpoint in %s could not be removed: %s.", self.folder, error)
        except Exception as error:
            failure = error
        return step, failure, time.perf_counter() - start

    def check_write(self) -> None:
        """If the running write has ended, count its time, and call `on_save` or warn that it failed. Does not wait.

        Training continues after a failed write, since the next write may succeed.
        """
        if self._running is not None and self._running.done():
            self._finish_write(warns=True)

    def _finish_write(self, warns: bool = False) -> Exception | None:
        """Wait for the running write, if any. Count its time and, if it succeeded, call `on_save`.

        Returns its error or None. `warns`: log the error, unless the output folder is missing.
        """
        if self._running is None:
            return None
        step, error, seconds = self._running.result()
        self._running = None
        self._count("checkpoint_write_s", seconds)
        if error is None:
            self.on_save(step, self.folder / files.checkpoint_name(step))
        elif warns and not self.is_output_dir_missing():
            log.warning("A checkpoint could not be written in %s: %s. Training continues.", self.folder, error)
        return error

    def is_output_dir_missing(self) -> bool:
        """Check on rank 0 whether the output folder was moved or removed. Other ranks return False.

        Stores the result in `output_dir_missing`, which makes `Training` stop.
        """
        if self.state.world.rank == 0:
            try:
                self.folder.stat()
            except OSError as error:  # errors other than FileNotFoundError may be temporary, as on a slow file system
                self.output_dir_missing = isinstance(error, FileNotFoundError)
        return self.output_dir_missing

    def close(self) -> None:
        """Wait for a running write. If other ranks failed, the launcher may kill this rank before the write ends."""
        self._writer.shutdown()

    def metrics(self) -> dict[str, float]:
        """Return the pause and write seconds since the last call, by their keys in metrics.jsonl."""
        new, self._new = self._new, {}
        return new

    def wait_for_write(self) -> None:
        """Wait for the last write. Raises CollectiveError on all ranks if it failed or the loss was not finite."""
        with self.state.world.raise_on_all_ranks(EXIT_FAILURE):
            with self._pause():
                error = self._finish_write()
            if self._diverged:
                raise UserError(f"The loss is NaN or infinite at step {self._last_saved}: training has diverged.")
            if error is not None:
                raise UserError(f"The checkpoint of step {self._last_saved} could not be written: {error}.")

    def save_and_stop(self, reason: str) -> NoReturn:
        """Save a checkpoint with the optimizer's state, then raise CollectiveError with EXIT_STOPPED to stop the run.

        Creates the output folder again if it was moved or removed. After a scheduler's signal, requeues the Slurm job
        if --requeue and the job allow it. `reason`: `StopRequests.reason`.
        """
        if self.state.world.broadcast(self.is_output_dir_missing()):
            self._last_saved = -1
            if self.state.world.rank == 0:
                output_dir.make_again(self.folder, self._settings)
        self.save(whole=True)
        self.wait_for_write()
        where = self.folder / files.checkpoint_name(self.state.step)
        message = f"Stopped by {reason} after step {self.state.step}, saved in {where}"
        by_hand = FOLDER in reason or CTRL_C in reason  # no scheduler stopped the run, so do not requeue
        why_not = "" if by_hand else self._requeue()
        if why_not is not None:
            without = " without --overwrite_output_dir" if self._settings["overwrite_output_dir"] else ""
            message += f". {why_not} Rerun" if why_not else "; rerun"
            message += f" the command{self.rerun_with}{without} to resume"
        raise CollectiveError(f"{message}.", status=EXIT_STOPPED)

    def _requeue(self) -> str | None:
        """Requeue the Slurm job from rank 0. Returns None if it is requeued, else why not (see `slurm.requeue`).

        A collective: other ranks wait for rank 0, since srun would terminate it once one of them exits.
        """
        world, step = self.state.world, self.state.step
        why_not: str | None = None
        if world.rank == 0:
            progress = f"step {step}" if step > self._first_step else ""
            why_not = slurm.requeue(os.environ, self.args.requeue, progress, log.info)
        why_not = world.broadcast(why_not)
        return why_not

    def load_best(self) -> int:
        """Wait for the last write; with --load_best_model_at_end, load the best weights. Call this after the training.

        Returns the step of the model's weights: the best step if its checkpoint was loaded, else the last step.
        """
        best, world = self.state.best, self.state.world
        self.wait_for_write()
        if not self.args.load_best_model_at_end or best.step in (0, self.state.step):
            return self.state.step
        folder = Path(best.folder or self.folder, files.checkpoint_name(best.step))
        model, usable = self._task.model, True
        if world.rank == 0:
            try:
                files.verify(folder)
                model.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))
            except (files.CorruptCheckpoint, OSError) as error:
                log.warning("The best model, of step %d, cannot be loaded: %s. The last one is kept.", best.step, error)
                usable = False
        if not world.broadcast(usable):
            return self.state.step
        world.broadcast_tensors(model.state_dict())
        log.info("The model is the best one, of step %d (%s %.4g).", best.step, best.metric, best.value)
        return best.step


def restore(state: TrainState, resume_point: ResumePoint | None, args: TrainArguments) -> None:
    """Restore `state` from the resume point, if any, and free its tensors. A collective: only one rank has the tensors.

    Also sets `state.best.folder` if the best checkpoint is in another run's folder.
    """
    root = state.world.broadcast((resume_point.owner_rank or 0) if resume_point else None)
    if root is None:
        return
    contents = resume_point.contents if resume_point else Contents({}, {})
    state.restore(contents, args.seed, root)
    origin = resume_point.folder.parent.resolve() if resume_point else None
    if origin and not (args.output_dir and origin == Path(args.output_dir).resolve()):
        state.best.folder = state.best.folder or str(origin)
    contents.tensors.clear()  # frees gigabytes for a large model
