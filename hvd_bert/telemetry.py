"""What a run tells while it runs: metrics.jsonl, TensorBoard, and progress on the terminal, all from rank 0."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from hvd_bert.data.batches import Batch
from hvd_bert.world import World

# Without a terminal (a job's log file, a launcher's pipe) a progress line at most this often.
LINE_EVERY_S = 10.0


class Telemetry:
    """Writes what it is given; on ranks other than 0 (`enabled` false) every method does nothing."""

    def __init__(self, folder: Path, enabled: bool, resumed_step: int | None = None) -> None:
        """`resumed_step`: TensorBoard is to forget what it was told of later steps."""
        self.enabled = enabled
        self.step = self.first_step = self.total_steps = 0
        self.epoch = 0.0
        if not enabled:
            return
        self.jsonl = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        purge = None if resumed_step is None else resumed_step + 1
        self.board = SummaryWriter(str(folder / "tb"), purge_step=purge)
        self.bar = tqdm(disable=True)

    def begin(self, total_steps: int, step: int, steps_per_epoch: int) -> None:
        """Training starts, for `total_steps` steps in all; after `step` of them, if it goes on from a checkpoint."""
        self.total_steps = total_steps
        self.step = self.first_step = step
        self.epoch = step / steps_per_epoch
        self.start = self.last_line = time.monotonic()
        if self.enabled:
            shown = sys.stderr.isatty()
            self.bar = tqdm(total=total_steps, initial=step, unit="step", disable=not shown, dynamic_ncols=True)

    def logged(self, step: int, metrics: dict[str, float]) -> None:
        """Record and show a step's metrics (keys: docs/output.md)."""
        self.step, self.epoch = step, metrics["epoch"]
        if self.enabled:
            self._record(metrics)
            self._show_progress(metrics)

    def evaluated(self, metrics: dict[str, float]) -> None:
        """Record and show the scores of the model as it is after the last step logged."""
        if not self.enabled:
            return
        named = {name if name.startswith("eval_") else f"eval_{name}": value for name, value in metrics.items()}
        self._record({"epoch": self.epoch, **named})
        after = f"step {self.step}/{self.total_steps}: " if self.step else ""
        scores = f"EM {metrics['exact_match']:.2f}  F1 {metrics['f1']:.2f}  loss {metrics['eval_loss']:.3f}"
        self.say(f"{after}{scores}  on {metrics['total']:.0f} questions")

    def _record(self, values: dict[str, float]) -> None:
        # An overflow (fp16) may leave an infinite norm, which JSON cannot hold.
        row = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self.jsonl.write(json.dumps({"step": self.step, **row}, allow_nan=False) + "\n")
        self.jsonl.flush()
        for name, value in values.items():
            group = "eval" if name.startswith("eval_") else "train"
            self.board.add_scalar(f"{group}/{name.removeprefix('eval_')}", value, self.step)

    def _show_progress(self, metrics: dict[str, float]) -> None:
        shown = {
            "loss": f"{metrics['loss']:.3f}",
            "lr": f"{metrics['learning_rate']:.2e}",
            "windows/s": f"{metrics['windows_per_s']:.1f}",
        }
        now = time.monotonic()
        if not self.bar.disable:
            self.bar.set_postfix(shown, refresh=False)
            self.bar.update(self.step - self.bar.n)
        elif now - self.last_line >= LINE_EVERY_S or self.step in (1, self.total_steps):
            self.last_line = now
            done = self.step - self.first_step
            eta = tqdm.format_interval((now - self.start) / done * (self.total_steps - self.step))
            said = "  ".join(f"{name} {value}" for name, value in shown.items())
            self.say(f"step {self.step}/{self.total_steps} ({self.step / self.total_steps:.0%})  {said}  ETA {eta}")

    def say(self, line: str) -> None:
        """A line on standard output that does not break the bar, in one write: launchers tag every write."""
        if self.enabled:
            with self.bar.external_write_mode(file=sys.stdout, nolock=True):
                sys.stdout.write(line + "\n")
                sys.stdout.flush()

    def close(self) -> None:
        """Flush and close the files."""
        if self.enabled:
            self.bar.close()
            self.board.close()
            self.jsonl.close()


_TOTALS = ("last_step", "train_s", "loss_sum", "windows", "tokens")


class Meter:
    """Sums up the work and the loss between two looks, without looking at the device in between.

    Times leave evaluations out.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.last_step = 0
        self.train_s = self.loss_sum = 0.0
        self.windows = self.tokens = 0
        self._forget()

    def _forget(self) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=self.world.device)
        self._windows = self._tokens = 0
        self._since = time.perf_counter()

    def add(self, loss: torch.Tensor, batch: Batch) -> None:
        """Count one forward pass; `loss`: this rank's share of its step's loss, as given to the engine."""
        self._loss += loss.detach()
        self._windows += batch.num_windows
        self._tokens += batch.num_tokens

    def read(self, step: int) -> dict[str, float]:
        """Means since the last look, over all ranks: loss, windows_per_s, tokens_per_s, step_s. A collective."""
        counts = torch.tensor([0.0, self._windows, self._tokens], dtype=torch.float64)
        counts[0] = self._loss.cpu() / self.world.size
        loss, windows, tokens = self.world.sum(counts).tolist()
        seconds = time.perf_counter() - self._since
        steps = step - self.last_step
        self.last_step = step
        self.train_s += seconds
        self.loss_sum += loss
        self.windows += round(windows)
        self.tokens += round(tokens)
        self._forget()
        return {
            "loss": loss / steps,
            "windows_per_s": windows / seconds,
            "tokens_per_s": tokens / seconds,
            "step_s": seconds / steps,
        }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time spent inside does not count; call right after `read`."""
        yield
        self._since = time.perf_counter()

    def state(self) -> dict[str, float]:
        """The totals up to the last look, which are the same on all ranks, and the time since."""
        totals = {name: getattr(self, name) for name in _TOTALS}
        return totals | {"seconds": time.perf_counter() - self._since}

    def since_last_look(self) -> list[float]:
        """This rank's sums since the last look: loss, windows, tokens. Waits for the device."""
        return [float(self._loss), self._windows, self._tokens]

    def restore(self, state: dict[str, float], since_last_look: list[float]) -> None:
        """Take over what `state` and `since_last_look` gave, in this or another process."""
        for name in _TOTALS:
            setattr(self, name, state[name])
        loss, windows, tokens = since_last_look
        self._loss.fill_(loss)
        self._windows, self._tokens = int(windows), int(tokens)
        self._since = time.perf_counter() - state["seconds"]

    def results(self) -> dict[str, float]:
        """The whole training, in run_qa's names: samples are windows, train_runtime (s) is without evaluations."""
        return {
            "train_runtime": self.train_s,
            "train_samples": self.windows,
            "train_samples_per_second": self.windows / self.train_s,
            "train_steps_per_second": self.last_step / self.train_s,
            "train_tokens_per_second": self.tokens / self.train_s,
            "train_loss": self.loss_sum / self.last_step,
        }
