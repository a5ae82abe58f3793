"""A run from its settings to the output files. Start reading here; hvd_bert/train.py is the command."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from typing import Any, NoReturn

from hvd_bert.checkpoint import resume, schedule
from hvd_bert.checkpoint.files import Contents, checkpoint_name
from hvd_bert.checkpoint.resume import ResumePoint
from hvd_bert.config.settings import Config, from_values
from hvd_bert.distributed import events
from hvd_bert.distributed.signals import StopRequests
from hvd_bert.distributed.world import HostsChanged, World
from hvd_bert.errors import EXIT_BAD_INPUT, log
from hvd_bert.model.precision import autocast
from hvd_bert.monitoring.peaks import peak_flops
from hvd_bert.monitoring.usage import GpuUsage, process_usage
from hvd_bert.output import card, output_dir, run_folder
from hvd_bert.output.callback import Callback, RunResult
from hvd_bert.output.metrics_log import MetricsLogger
from hvd_bert.output.reporters.base import open_reporters
from hvd_bert.output.run_folder import SAMPLES
from hvd_bert.storage.writing import write_json
from hvd_bert.tasks.base import EvaluationResult, Task
from hvd_bert.training import disk_space, elastic
from hvd_bert.training.breakdown import Breakdown, describe_steps
from hvd_bert.training.evaluations import Evaluations, Trained
from hvd_bert.training.health import Health
from hvd_bert.training.optim import large_batch_note
from hvd_bert.training.saving import Checkpoints
from hvd_bert.training.start import Prepared, Start, load, prepare

LONG_S = 60.0  # minimum training time in seconds for which the step-time summary is printed


def run(config: Config, world: World, callbacks: Sequence[Callback] = (), own: type[Task] | None = None) -> RunResult:
    """Load, train, evaluate and write the output. Called by all ranks, under Horovod elastic once per world.

    `own`: the class of a custom task, if a program gives it to `train`.
    """
    start = load(config, world, own)
    task = start.task
    prepared = prepare(start, world) if task.plan else None
    effective = prepared.effective if prepared else {}
    with world.raise_on_all_ranks():
        # The first world of Horovod elastic checks for later ones. After the last step, only the model is written.
        checks = world.rank == 0 and world.process.generation == 0
        if prepared and checks and prepared.state.step < effective["train_steps"]:
            disk_space.check(start.config, task.model, prepared.state.step)
    evaluations = Evaluations(task) if task.evaluates else None
    # Without training, evaluate before acquiring the folder: if this fails, the earlier evaluation's files remain.
    evaluation = evaluations.evaluate(task.model) if evaluations and not prepared else None

    facts = run_folder.task_facts(task) | run_folder.environment_facts(start.config, world)
    start = start.in_folder(output_dir.acquire(start.settings, start.resume_point, world))
    with closing(_open_logs(start, facts | effective, callbacks, world)) as metrics_logger:
        metrics_logger.started(start.settings | effective, start.resume_point.step if start.resume_point else None)
        metrics_logger.notify("on_start", task, world)
        trained = _train(Training(start, prepared, evaluations, metrics_logger, world)) if prepared else None
        del prepared  # frees the optimizer's memory for the evaluation
        with elastic.keep_on_failure(world, lambda: trained.to_resume if trained else None):
            if trained and evaluations:
                evaluation = evaluations.evaluate_trained(trained, metrics_logger)
            elif evaluation and evaluations:
                evaluations.record(evaluation, metrics_logger, 0)
            results = trained.results | effective if trained else {}
            results |= facts | (evaluations.results() if evaluations else {})
            results = _write_output(start, evaluation, results, world)
        metrics_logger.finished = True
        result = RunResult(start.folder, evaluation.metrics if evaluation else {}, results)
        metrics_logger.notify("on_end", result)
    if results.get("train_runtime", 0) >= LONG_S and results["breakdown"]:
        log.info("%s", "\n".join(describe_steps(results, start.resume_point is not None)))
        if evaluation:
            log.info("%s", evaluation.summary)  # repeated, since the long table may have scrolled it away
    if not config.train.fast_dev_run:
        log.info("%s", run_folder.describe(start.folder))
    events.end()
    return result


def train_only(config: Config, world: World, callbacks: Sequence[Callback], own: type[Task] | None = None) -> Task:
    """Train for a measurement, without progress bar, signal handling, evaluations or saved model. Called by all ranks.

    Returns the task with the trained model. Of the `callbacks`, only on_batch, on_step, on_log and on_save are called.
    `own`: see `run`.
    """
    with tempfile.TemporaryDirectory() as folder:  # only rank 0's is used, for example by GpuUsage
        changed = {"output_dir": world.broadcast(folder), "resume_from_checkpoint": None, "elastic": False}
        changed["early_stopping_patience"] = None  # early stopping needs evaluations
        start = load(from_values(config.as_flat() | changed), world, own)
        metrics_logger = MetricsLogger(start.folder, enabled=False, callbacks=callbacks)
        Training(start, prepare(start, world), None, metrics_logger, world).run()
    return start.task


def _open_logs(start: Start, facts: dict[str, Any], callbacks: Sequence[Callback], world: World) -> MetricsLogger:
    """Open events.jsonl, metrics.jsonl and the reporters on rank 0. A collective."""
    with world.writing("--output_dir", start.folder, EXIT_BAD_INPUT) as writes:
        events.begin(start.folder, writes, {"launcher": world.launcher, "decided": start.decided} | facts)
        started = open_reporters(start.config.train.reporters, start.folder) if writes else []
        return MetricsLogger(start.folder, writes, started, start.task.unit, callbacks)


def _write_output(
    start: Start, evaluation: EvaluationResult | None, results: dict[str, Any], world: World
) -> dict[str, Any]:
    """Write the evaluation's files and, after training, the model card and train_results.json. A collective.

    Returns `results` with the added keys, most of which only rank 0 has.
    """
    task, folder, settings = start.task, start.folder, start.settings
    results = results | {"processes": world.gather({"rank": world.rank} | process_usage(world.device))}
    with world.writing("--output_dir", folder) as writes:
        if writes and evaluation:
            run_folder.write_evaluation(folder, evaluation, settings["answer_language"])
        if writes and task.plan:
            results |= task.facts() | {"work": resume.identity(settings, task.model, task.identity(), task.plan)}
            card.write(folder, settings, results, evaluation.metrics if evaluation else {})
            write_json(folder / "train_results.json", results)  # last, since this file marks a run as finished
    return results


class Training:
    """The training loop with its components. After `run`, task.model has the weights of step `model_step`."""

    def __init__(
        self,
        start: Start,
        prepared: Prepared,
        evaluations: Evaluations | None,
        metrics_logger: MetricsLogger,
        world: World,
    ) -> None:
        """Create the components. A collective. `start`: must have the final output folder (`Start.in_folder`)."""
        config, task, folder = start.config, start.task, start.folder
        state, plan, args = prepared.state, prepared.state.plan, config.train
        self.task, self.config, self.world = task, config, world
        self.state, self.plan, self.effective = state, plan, prepared.effective
        self.batches, self.recording = prepared.batches, prepared.recording
        self.folder, self.evaluations, self.metrics_logger = folder, evaluations, metrics_logger
        self.total_steps = args.total_steps(plan.steps_per_epoch)
        if args.fast_dev_run:  # two steps, because the first is warm-up; the schedule still covers the whole run
            self.total_steps = min(2, self.total_steps)
        peak = peak_flops(args, config.profiling.peak_tflops, world)
        self.breakdown = Breakdown(state.meter, plan, task.flops, peak, state.step)
        self.checkpoints = Checkpoints(state, task, folder, config.checkpoint, start.settings, start.facts)
        if not start.names_folder:
            self.checkpoints.rerun_with = f" with --output_dir {folder}"
        self.checkpoints.on_save = partial(metrics_logger.notify, "on_save")
        fp16 = args.fp16 or config.parallel.fp16_allreduce
        self.health = Health(state.meter, plan, world, state.step, task.window_names, fp16)
        self.stop_requests = StopRequests(world)
        with world.writing("--output_dir", folder, EXIT_BAD_INPUT):
            self.gpus = GpuUsage(world, folder)
        self.logs_late = world.device.type == "cuda"  # log a line while the GPU computes the next step
        self._line: dict[str, float] | None = None  # a log line that has ended but is not logged yet
        self.model_step = state.step
        self.evaluation: EvaluationResult | None = None  # the final model's evaluation, if it was evaluated
        self._final: Contents | None = None  # under Horovod elastic: the state after the last step
        if evaluations:
            evaluations.best = state.best

    def run(self) -> dict[str, Any]:
        """Train to the end. Returns the results for train_results.json.

        If a signal arrives inside `stop_requests.watched()`, saves a checkpoint and raises CollectiveError. If only the
        hosts of Horovod elastic have changed, raises HostsChanged.
        """
        state, checkpoints, effective = self.state, self.checkpoints, self.effective
        log.info("Training: %s", ", ".join(f"{name} {value:g}" for name, value in effective.items()))
        note = large_batch_note(self.config.train, self.plan.global_batch, effective["learning_rate"])
        if note:
            log.info("%s", note)
        state.strategy.module.train()
        self.metrics_logger.begin(self.total_steps, state.step, self.plan.steps_per_epoch)
        parts: list[Any] = [checkpoints, self.gpus, self.batches, self.recording, self.health]
        with ExitStack() as closed:
            for part in parts:
                closed.enter_context(closing(part))
            due = self._due()
            if state.eval_pending and self.evaluations and (due.evaluate or not due.ends):
                self._evaluate()  # the interrupted run stopped before this evaluation
            while not self._due().ends:
                self.recording.before(state.step + 1)
                learning_rate = self._step()
                stops = self.stop_requests.any_rank_stops()  # the vote is part of a recorded step
                self.recording.after(state.step, self.folder)
                self._after_step(learning_rate, stops)
            self._finish()
        state.meter.on_applied = None  # the weights' hooks hold the meter, which would keep the optimizer in memory
        return state.meter.results() | {"breakdown": self.breakdown.results()} | checkpoints.totals

    def _finish(self) -> None:
        """Finish after the last step: stop if a signal arrived, else load the final weights into task.model."""
        state = self.state
        self._start_vote()  # a signal may have arrived since the last step, for example during an evaluation
        if self.stop_requests.any_rank_stops():
            self._stop()
        self.health.check_end()
        if self.world.elastic:
            self._final = state.local_snapshot()  # before averaged or best weights replace those of the last step
        state.strategy.gather_model()  # copies the trained weights to task.model
        if state.average:
            state.average.swap()
        if state.step < self.total_steps:
            log.info("Early stopping: no %s better than at step %d.", state.best.metric, state.best.step)
        self.model_step = self.checkpoints.load_best()
        self.task.merge_adapters()
        if self.model_step != state.step:
            self.evaluation = None  # it belongs to the last step's weights

    def to_resume(self) -> ResumePoint:
        """Return this rank's state after its last finished step, for the next world of Horovod elastic."""
        contents = self._final or self.state.local_snapshot()
        contents.state["rank_batch"] = self.config.train.rank_batch
        return ResumePoint(self.folder / checkpoint_name(self.state.step), contents)

    def _step(self) -> float:
        """Run one optimizer step. Returns its learning rate."""
        state, strategy, meter = self.state, self.state.strategy, self.state.meter
        step_windows = len(self.plan.step_windows(state.step))
        with strategy.micro_batches():
            for batch in meter.timed("data", self.batches.micro_batches(state.step)):
                self.metrics_logger.notify("on_batch", batch)
                with meter.phase("compute"):
                    with autocast(self.world.device, self.config.train.precision):
                        losses = self.task.losses(strategy.module, batch)[: batch.num_windows]
                    # The strategy averages over the ranks. This factor turns that into the mean over all windows.
                    loss = losses.sum() * (self.world.size / step_windows)
                    strategy.backward(loss)
                meter.add(loss, batch)
        with meter.phase("other"):  # this work overlaps with the allreduce of the last gradients
            self.checkpoints.check_write()
            self._start_vote()
            self.breakdown.count(state.step)
        with meter.phase("exposed_comm"):
            strategy.synchronize()
        with meter.phase("optimizer"):
            meter.settle()  # advances the schedule if the previous step was applied; DeepSpeed's clip needs that first
            grad_norm = strategy.clip()
            learning_rate: float = state.schedule.get_last_lr()[0]
            strategy.step()
            if state.average:
                state.average.update(grad_norm)
            meter.end_step(grad_norm)
            state.step += 1
        return learning_rate

    def _start_vote(self) -> None:
        if self.checkpoints.output_dir_missing:
            self.stop_requests.stop_without_folder()
        self.stop_requests.start_vote()

    def _stop(self) -> NoReturn:
        """Save and stop. If only the hosts have changed, raise HostsChanged: training continues in the next world."""
        reason = self.stop_requests.reason()
        if reason is None:
            raise HostsChanged
        self.checkpoints.save_and_stop(reason)

    def _after_step(self, learning_rate: float, stops: bool) -> None:
        """Log, stop, evaluate and save, as far as each is due after this step."""
        state, due = self.state, self._due()
        state.eval_pending = self.evaluations is not None and (due.evaluate or due.ends)
        self.metrics_logger.notify("on_step", state.step)
        self._log()  # a line that ended with the previous step
        if due.log:
            self.breakdown.end_line(state.step)
            self._line = {"epoch": state.step / self.plan.steps_per_epoch, "learning_rate": learning_rate}
            if stops or due.evaluate or due.save or due.ends or not self.logs_late:
                state.meter.settle()
                self._log()
        elif self.breakdown.taken == 1:  # after a resume. Not recorded: metrics.jsonl must equal an uninterrupted run's
            shown = state.meter.so_far(state.step) | {"learning_rate": learning_rate}
            self.metrics_logger.show_progress(state.step, shown)
        if due.ends:  # before saving, so that no checkpoint has untrained weights
            self.health.check_end()
        if stops:
            self._stop()
        if due.evaluate:
            self._evaluate()
        if self._due().save:  # decided again, since the evaluation may end the training early
            self.checkpoints.save()
        state.meter.end_interval("other")

    def _due(self) -> schedule.Due:
        steps = self.state.step, self.total_steps, self.plan.steps_per_epoch
        return schedule.due(*steps, self.config, self.evaluations is not None, self.state.best.since)

    def _log(self) -> None:
        """Log the line that has ended, if any, and check its loss and the output folder. A collective."""
        if self._line is None:
            return
        means, meter = self.breakdown.read(), self.state.meter
        step, now, self._line = meter.last_step, self._line | {"grad_norm": meter.grad_norm}, None
        self.health.check(step)
        self.metrics_logger.logged(step, now | means | self.gpus.read(step) | self.checkpoints.metrics())
        self.checkpoints.is_output_dir_missing()  # once per line, not per step: the file system may be slow

    def _evaluate(self) -> None:
        assert self.evaluations is not None
        with self.state.meter.paused(), self.state.averaged():
            evaluation = self.evaluations.evaluate(self.state.strategy.gather_model())
        step = self.state.step
        self.evaluations.record(evaluation, self.metrics_logger, step)
        with self.world.writing("--output_dir", self.folder) as writes:
            if writes and not self.checkpoints.is_output_dir_missing() and SAMPLES in evaluation.files:
                write_json(self.folder / SAMPLES, evaluation.files[SAMPLES])  # to show answers during training
        self.state.eval_pending = False
        is_best = self.state.best.update(step, evaluation.metrics)
        if is_best and self.config.checkpoint.load_best_model_at_end:
            self.checkpoints.save()
        self.evaluation = evaluation if self._due().ends else None  # its answers take much memory


def _train(training: Training) -> Trained:
    """Run the training and save the model. A collective."""
    # A fast dev run has nothing to save, so a signal terminates it immediately.
    stops = nullcontext() if training.config.train.fast_dev_run else training.stop_requests.watched()
    with elastic.keep_on_failure(training.world, training.to_resume), stops:
        results = training.run()
        with training.world.writing("--output_dir", training.folder) as writes:
            if writes:
                run_folder.save_model(training.folder, training.task)
        last = training.to_resume() if training.world.elastic else None
    return Trained(results, training.model_step, training.evaluation, training.state.eval_pending, last)
