"""`--fast_dev_run`: run two steps in a temporary folder, and estimate time, memory and disk space of the whole run."""

from __future__ import annotations

import math
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from hvd_bert.checkpoint.schedule import due
from hvd_bert.config.settings import Config, from_values
from hvd_bert.distributed import events
from hvd_bert.distributed.world import World
from hvd_bert.errors import EXIT_BAD_INPUT, log
from hvd_bert.machine import total_memory
from hvd_bert.output.callback import Callback, RunResult
from hvd_bert.storage.writing import OWN_PARTIAL, check_folder, first_existing
from hvd_bert.tasks.base import Task
from hvd_bert.training import loop
from hvd_bert.training.disk_space import checkpoint_bytes, gib, tensor_bytes

# Settings that are turned off: they would write outside the temporary folder, or do not apply to two steps.
OVERRIDES: dict[str, Any] = {"overwrite_output_dir": False, "report_to": "none", "timeline": None, "profile": False}


def run(config: Config, world: World, callbacks: Sequence[Callback] = (), own: type[Task] | None = None) -> RunResult:
    """Run two steps, evaluate, save, and log an estimate of the whole run. Called by all ranks.

    The key `estimate` of the returned `results` has the estimate. The returned `output_dir` no longer exists.
    """
    with _temporary_folder(config, world) as folder:
        changed = from_values(config.as_flat() | OVERRIDES | {"output_dir": str(folder)})
        estimate = Estimate(changed)
        result = loop.run(changed, world, [*callbacks, estimate], own)
        figures = world.broadcast(estimate.figures(result.results) if world.rank == 0 else None)
    return replace(result, results=result.results | {"estimate": figures})


@contextmanager
def _temporary_folder(config: Config, world: World) -> Iterator[Path]:
    """Context manager: yield a temporary folder on the output folder's disk. It is removed even if rank 0 is killed."""
    folder, guard = Path(config.train.output_dir or "runs"), None
    with world.writing("--output_dir", folder, EXIT_BAD_INPUT) as writes:
        if writes:
            check_folder(folder)
            folder = Path(tempfile.mkdtemp(OWN_PARTIAL, ".fast_dev_run-", first_existing(folder).absolute()))
            remove = ["sh", "-c", 'cat > /dev/null; rm -rf "$0"', str(folder)]
            guard = subprocess.Popen(remove, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield world.broadcast(folder)
    finally:
        world.process.last_state = None  # the next world of Horovod elastic must not resume this run
        events.end()
        if folder.resolve() in world.process.locks:  # NFS does not remove files that are open
            world.process.locks.pop(folder.resolve()).release()
        if guard:
            guard.communicate()


class Estimate(Callback):
    """Callback that collects measurements of the two steps and calculates the estimate from them."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def on_start(self, task: Task, world: World) -> None:
        assert task.plan
        self._plan, self._world, self._dev_share = task.plan, world, task.dev_share
        self._weights = tensor_bytes(task.model.state_dict().values())
        self._checkpoint = checkpoint_bytes(self._config, task.model)
        if world.rank == 0:
            self._free = shutil.disk_usage(str(self._config.train.output_dir)).free

    def on_log(self, step: int, metrics: dict[str, float]) -> None:
        self._metrics = metrics  # overwrites the first step's, which is warm-up

    def figures(self, results: dict[str, Any]) -> dict[str, float]:
        """Log and return the estimate on rank 0. `results`: train_results.json of the two steps."""
        plan, args, world = self._plan, self._config.train, self._world
        steps, step_s = args.total_steps(plan.steps_per_epoch), self._metrics["step_s"]
        if self._metrics["padding_share"] == 0:  # packed: a step's time depends on its tokens, so scale to the mean
            step_s = float(plan.lengths.mean()) * plan.global_batch / self._metrics["tokens_per_s"]
        evaluations, evaluation_s = 0, 0.0
        if "evaluations" in results:
            before = (due(n, steps, plan.steps_per_epoch, self._config).evaluate for n in range(1, steps))
            evaluations = 1 + sum(before)
            evaluation_s = results["evaluation_s"] / results["evaluations"] / self._dev_share
        run_s = steps * step_s + evaluations * evaluation_s
        peak = max(rank["memory_peak_bytes"] for rank in results["processes"])
        on_gpu = world.device.type == "cuda"
        memory = torch.cuda.mem_get_info(world.device)[1] if on_gpu else total_memory() / len(world.host_ranks)
        disk = self._most_disk(steps)
        log.info(
            f"A whole run takes about {timedelta(seconds=round(run_s))}: {steps:,} step(s) of {step_s:.2f} s and"
            f" {evaluations} evaluation(s) of {evaluation_s:.1f} s ({100 * self._dev_share:.3g} % measured)."
            f"\nMemory per rank: {gib(peak)} of {gib(memory)}. Disk space: {gib(disk)} of {gib(self._free)} free,"
            f" {gib(self._checkpoint)} per checkpoint."
        )
        if disk > self._free:
            log.warning(
                f"The run takes up to {gib(disk)}, but the disk of --output_dir has {gib(self._free)} free. Lower"
                " --save_total_limit, add --save_only_model, or use a folder on another disk."
            )
        times = {"steps": steps, "step_s": step_s, "evaluations": evaluations, "evaluation_s": evaluation_s}
        return {**times, "run_s": run_s, "memory_bytes": peak, "disk_bytes": disk}

    def _most_disk(self, steps: int) -> int:
        """Return the maximum disk space of the run in bytes.

        While a new checkpoint is written, the old one that it replaces still exists. The final model is written last.
        """
        args = self._config.checkpoint
        saves = math.ceil(steps / args.save_steps) if args.save_steps else 0
        if args.load_best_model_at_end:  # each evaluation may save a checkpoint
            saves = steps
        retained = args.save_total_limit + args.load_best_model_at_end
        return min(saves * self._checkpoint + self._weights, (retained + 1) * self._checkpoint)
