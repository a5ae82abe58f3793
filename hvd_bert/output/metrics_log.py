"""Output of a run's metrics and progress on rank 0: metrics.jsonl, the reporters of --report_to, and the terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hvd_bert.config.data import other_rules
from hvd_bert.errors import log, short_reason
from hvd_bert.output.callback import Callback
from hvd_bert.output.reporters.base import Reporter, Samples
from hvd_bert.storage.writing import JsonLines

LINE_EVERY_S = 10.0  # minimum seconds between progress lines if there is no terminal for a progress bar


class MetricsLogger:
    """Records metrics, shows progress and calls callbacks. If not `enabled` (ranks other than 0), calls callbacks only.

    `finished`: whether the run is complete, for `Reporter.close`.
    """

    def __init__(
        self,
        folder: Path,
        enabled: bool,
        reporters: Sequence[Reporter] = (),
        unit: str = "windows",
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Open metrics.jsonl. Raises OSError. `unit`: name of the training examples in messages (`Task.unit`)."""
        self.enabled, self.reporters, self.unit, self.callbacks = enabled, [*reporters], unit, callbacks
        self.step = self.first_step = self.total_steps = 0
        self.steps_per_epoch = 1
        self.finished = False
        self.rules = ""  # see `other_rules`
        if not enabled:
            return
        self.jsonl = JsonLines(folder / "metrics.jsonl")
        self.bar = tqdm(disable=True)

    def started(self, settings: Mapping[str, Any], resumed_step: int | None) -> None:
        """Pass the settings to the reporters. `resumed_step`: step from which the run resumes; None: a new run."""
        self.rules = other_rules(settings["answer_language"])
        if resumed_step is not None:
            self._report("resumed", resumed_step)
        given = ((name, value) for name, value in settings.items() if value is not None)
        self._report("settings", {name: " ".join(v) if isinstance(v, tuple) else v for name, v in given})

    def begin(self, total_steps: int, step: int, steps_per_epoch: int) -> None:
        """Start the progress display of a training. `step`: the number of steps that are already done."""
        self.total_steps = total_steps
        self.step = self.first_step = step
        self.steps_per_epoch = steps_per_epoch
        self.start = self.last_line = time.monotonic()
        if self.enabled:  # disable=None: no bar without a terminal
            self.bar = tqdm(total=total_steps, initial=step, unit="step", disable=None, dynamic_ncols=True)

    def logged(self, step: int, metrics: dict[str, float]) -> None:
        """Record and show a log line's metrics. docs/reference/output-files.md describes the keys."""
        if self.enabled:
            self._record(step, metrics)
        self.show_progress(step, metrics)
        self.notify("on_log", step, metrics)

    def show_progress(self, step: int, metrics: dict[str, float]) -> None:
        """Show a log line's metrics without recording them."""
        self.step = step
        if not self.enabled:
            return
        shown = {
            "loss": f"{metrics['loss']:.3f}",
            "lr": f"{metrics['learning_rate']:.2e}",
            f"{self.unit}/s": f"{metrics['windows_per_s']:.1f}",
        }
        now = time.monotonic()
        if not self.bar.disable:
            self.bar.set_postfix(shown, refresh=False)
            self.bar.update(self.step - self.bar.n)
        elif now - self.last_line >= LINE_EVERY_S or step in (self.first_step + 1, self.total_steps):
            self.last_line = now
            done = self.step - self.first_step
            eta = tqdm.format_interval((now - self.start) / done * (self.total_steps - self.step))
            values = "  ".join(f"{name} {value}" for name, value in shown.items())
            log.info(f"step {self.step}/{self.total_steps} ({self.step / self.total_steps:.0%})  {values}  ETA {eta}")

    def evaluated(self, metrics: dict[str, float], summary: str, step: int, samples: Samples = ()) -> None:
        """Record an evaluation's metrics and sample answers, and show its `summary`. `step`: the model's step."""
        if self.enabled:
            named = {name if name.startswith("eval_") else f"eval_{name}": value for name, value in metrics.items()}
            self._record(step, {"epoch": step / self.steps_per_epoch, **named})
            if samples:
                self._report("samples", step, samples)
            after = f"step {step}/{self.total_steps}: " if step else ""
            by = f"  (--answer_language {self.rules})" if self.rules else ""
            log.info(f"{after}{summary}{by}")
        self.notify("on_evaluate", step, metrics)

    def notify(self, method: str, *arguments: Any) -> None:
        """Call a method of all callbacks. Their exceptions are not caught, so they end the run."""
        for callback in self.callbacks:
            getattr(callback, method)(*arguments)

    def _record(self, step: int, values: dict[str, float]) -> None:
        # The gradient norm may be infinite or NaN, as after an fp16 overflow, which JSON cannot represent.
        row = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self.jsonl.write({"step": step, **row})
        self._report("scalars", step, dict(self._scalar(name, value) for name, value in values.items()))

    def _report(self, method: str, *arguments: Any) -> None:
        """Call a method of all reporters. If a reporter fails, warn, close it and remove it."""
        for reporter in [*self.reporters]:
            try:
                getattr(reporter, method)(*arguments)
            except Exception as error:
                reason = getattr(error, "strerror", None) or short_reason(error)
                effect = "Its last values may be missing." if method == "close" else "Training continues."
                log.warning("%s cannot be written: %s. %s", reporter.title, reason, effect)
                self.reporters.remove(reporter)
                if method != "close":
                    with suppress(Exception):  # the warning above has the cause
                        reporter.close(False)

    def _scalar(self, name: str, value: float) -> tuple[str, float]:
        """Return a metric's name as GROUP/NAME, by which reporters group metrics, and its value, with seconds in ms.

        Evaluations with other rules than SQuAD's have a group of their own.
        """
        if name.endswith("_share"):
            return f"share/{name.removesuffix('_share')}", value
        if name.endswith("_s") and not name.endswith("_per_s"):
            return f"time_ms/{name.removesuffix('_s')}", 1000 * value
        if not name.startswith("eval_"):
            return f"train/{name}", value
        group = f"eval_{self.rules}" if self.rules else "eval"
        return f"{group}/{name.removeprefix('eval_')}", value

    def close(self) -> None:
        """Close the progress bar, metrics.jsonl and the reporters, which receive `finished`."""
        if self.enabled:
            self.bar.close()
            self.jsonl.close()
        self._report("close", self.finished)
