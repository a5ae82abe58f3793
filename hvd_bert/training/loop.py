"""A training run from the settings to the output files. Read this file first; `__main__.py` is the command."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from hvd_bert.checkpoint import resume
from hvd_bert.checkpoint.resume import ResumePoint
from hvd_bert.config.settings import Config
from hvd_bert.data.collate import Prefetcher
from hvd_bert.distributed import events
from hvd_bert.distributed.signals import StopRequests
from hvd_bert.distributed.world import World, log
from hvd_bert.errors import EXIT_BAD_INPUT
from hvd_bert.model.flops import peak_flops
from hvd_bert.model.precision import autocast
from hvd_bert.monitoring.recording import Recording
from hvd_bert.monitoring.usage import GpuUsage, process_usage
from hvd_bert.output import output_dir, run_folder
from hvd_bert.output.callback import Callback, RunResult
from hvd_bert.output.metrics_log import MetricsLogger
from hvd_bert.output.reporters import base as reporters
from hvd_bert.tasks.base import EvaluationResult, Task
from hvd_bert.training import elastic
from hvd_bert.training.breakdown import Breakdown, describe_steps
from hvd_bert.training.health import Health
from hvd_bert.training.optim import effective_settings, large_batch_note
from hvd_bert.training.saving import Checkpoints, restore
from hvd_bert.training.start import load
from hvd_bert.training.state import Best, TrainState


def run(config: Config, world: World, callbacks: Sequence[Callback] = ()) -> RunResult:
    """A whole run: load, train, evaluate, write. Called by all ranks, under Horovod elastic in each world."""
    task, resume_point = load(config, world)
    evaluations = Evaluations(task) if task.evaluates else None
    training = Training(task, resume_point, evaluations, config, world) if task.plan else None
    # A run that only evaluates does so first: an earlier evaluation stays until there is a new one.
    evaluation = evaluations.evaluate(task.model) if evaluations and not training else None

    effective = training.effective if training else {}
    facts, metrics_logger = _begin_output(config, task, effective, resume_point, world)
    metrics_logger.callbacks = callbacks
    results: dict[str, Any] = {}
    with closing(metrics_logger):
        metrics_logger.started(config.as_flat() | effective, resume_point.step if resume_point else None)
        metrics_logger.notify("on_start", task, world)
        with elastic.keep_on_failure(training.state, config.train) if training else nullcontext():
            if training:
                results = _train(training, metrics_logger)
                evaluation = training.evaluate_final()
            elif evaluations and evaluation:
                evaluations.record(evaluation, metrics_logger, 0)
            results |= facts | (evaluations.results() if evaluations else {})
            _write_output(config, task, evaluation, results, world)
        metrics_logger.finished = True
        result = RunResult(config.train.folder, evaluation.metrics if evaluation else {}, results)
        metrics_logger.notify("on_end", result)
    if results.get("breakdown"):
        log.info("%s", "\n".join(describe_steps(results)))
    log.info("%s", run_folder.describe(config.train.folder))
    events.end()
    return result


def _begin_output(
    config: Config, task: Task, effective: dict[str, float], resume_point: ResumePoint | None, world: World
) -> tuple[dict[str, Any], MetricsLogger]:
    """Take over the output folder. Returns facts about the run, and the logger."""
    settings = config.as_flat()
    output_dir.begin(config.train, settings, resume_point, world)
    folder, settings = config.train.folder, config.as_flat()  # which has the folder's name now
    facts = run_folder.of_task(task) | run_folder.facts(settings, config.train.precision, world)
    with run_folder.writing(folder, world, EXIT_BAD_INPUT) as writes:
        events.begin(folder, writes, {"launcher": world.launcher} | facts | effective)
        started = reporters.start(config.train.reporters, folder) if writes else []
        metrics_logger = MetricsLogger(folder, writes, started, task.unit)
    return facts, metrics_logger


def _train(training: Training, metrics_logger: MetricsLogger) -> dict[str, Any]:
    """Train, and save the model. Returns the results for train_results.json."""
    folder = training.config.train.folder
    with training.stop_requests.watched():  # until the model is saved, or a signal would lose it
        results = training.run(metrics_logger)
        with run_folder.writing(folder, training.world) as writes:
            if writes:
                run_folder.save_model(folder, training.task)
    return results


def _write_output(
    config: Config, task: Task, evaluation: EvaluationResult | None, results: dict[str, Any], world: World
) -> None:
    """Write the scores and, after a training, its results. A collective."""
    folder, settings = config.train.folder, config.as_flat()
    results |= {"processes": world.gather({"rank": world.rank} | process_usage(world.device))}
    with run_folder.writing(folder, world) as writes:
        if writes and evaluation:
            run_folder.write_evaluation(folder, evaluation)
        if writes and task.plan:
            results |= task.facts() | {"work": resume.identity(settings, task)}
            run_folder.write_results(folder, results, settings, evaluation)


class Evaluations:
    """Evaluates a task's models, counts and times it, and keeps the best score of a training."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.best: Best | None = None
        self._last_s = 0.0
        self._totals = {"evaluations": 0, "evaluation_s": 0.0}

    def evaluate(self, model: nn.Module) -> EvaluationResult:
        """A collective."""
        start = time.perf_counter()
        evaluation = self.task.evaluate(model)
        self._last_s = time.perf_counter() - start
        self._totals["evaluations"] += 1
        self._totals["evaluation_s"] += self._last_s
        return evaluation

    def record(self, evaluation: EvaluationResult, metrics_logger: MetricsLogger, step: int) -> None:
        """Record and show the last evaluation, which is of the model of step `step`."""
        metrics = evaluation.metrics | {"eval_s": self._last_s}
        metrics_logger.evaluated(metrics, evaluation.summary, step, evaluation.files.get("eval_samples.json", ()))

    def results(self) -> dict[str, Any]:
        """For train_results.json."""
        return self._totals | ({"best": self.best.state()} if self.best else {})


class Training:
    """The parts of a training, and its loop. After `run`, task.model is the model of step `model_step`."""

    def __init__(
        self,
        task: Task,
        resume_point: ResumePoint | None,
        evaluations: Evaluations | None,
        config: Config,
        world: World,
    ) -> None:
        """A collective that makes the last checks and writes nothing. `resume_point`: on rank 0, the checkpoint to
        resume from."""
        args, metric = config.train, config.checkpoint.metric_for_best_model or next(iter(task.metrics))
        assert task.plan is not None
        self.task, self.config, self.world, self.evaluations = task, config, world, evaluations
        self.plan = resume.keep_global_batch(task.plan, resume_point, world)
        self.total_steps = args.total_steps(self.plan.steps_per_epoch)
        self.state = TrainState.fresh(
            task.model, self.plan, Best(metric, task.metrics[metric]), args, config.parallel, world
        )
        if args.torch_compile:
            with world.raise_on_all_ranks():
                task.compile(self.state.strategy.trained)
        restore(self.state, resume_point, args)
        self.batches = Prefetcher(self.plan, task.batch, world.rank, self.state.step)
        peak = peak_flops(args, config.profiling.peak_tflops, world)
        self.breakdown = Breakdown(self.state.meter, self.plan, task.flops, peak, self.state.step)
        self.checkpoints = Checkpoints(self.state, config.checkpoint, args, config.as_flat(), task)
        fp16 = args.fp16 or config.parallel.fp16_allreduce
        self.health = Health(self.state.meter, self.plan, world, self.state.step, task.window_names, fp16)
        self.recording = Recording(config.profiling, args, self.total_steps, self.state.meter, world)
        self.effective = effective_settings(args, self.plan, self.state.schedule.base_lrs[0], world)
        self.stop_requests = StopRequests(world)
        self.model_step = self.state.step
        self.evaluation: EvaluationResult | None = None  # of the model that training leaves
        if evaluations:
            evaluations.best = self.state.best

    def run(self, metrics_logger: MetricsLogger) -> dict[str, Any]:
        """Train to the end. Returns the results for train_results.json.

        Where `stop_requests` watches, a signal saves a checkpoint and raises CollectiveError.
        """
        self.metrics_logger = metrics_logger
        with run_folder.writing(self.config.train.folder, self.world, EXIT_BAD_INPUT):
            gpus = self.gpus = GpuUsage(self.world, self.config.train.folder)
        state, checkpoints, effective = self.state, self.checkpoints, self.effective
        checkpoints.on_save = partial(metrics_logger.notify, "on_save")
        log.info("Training: %s", ", ".join(f"{name} {value:g}" for name, value in effective.items()))
        note = large_batch_note(self.config.train, self.plan.global_batch, effective["learning_rate"])
        if note:
            log.info("%s", note)
        state.strategy.module.train()
        self.metrics_logger.begin(self.total_steps, state.step, self.plan.steps_per_epoch)
        with closing(checkpoints), closing(gpus), closing(self.batches), closing(self.recording), closing(self.health):
            if state.eval_pending and self.evaluations and not self._is_final:  # a signal stopped the run before it
                self._evaluate()
            while state.step < self.total_steps and not checkpoints.patience_is_over:
                self.recording.before(state.step + 1)
                learning_rate, grad_norm = self._step()
                stops = self.stop_requests.any_rank_stops()  # the vote is the last message of a recorded step
                self.recording.after(state.step)
                self._after_step(learning_rate, grad_norm, stops)
            self._finish()
        sums = {"breakdown": self.breakdown.results()}
        return state.meter.results() | sums | checkpoints.totals | effective

    def _finish(self) -> None:
        """After the last step: a last vote and check, then the model of `model_step` in task.model."""
        state, checkpoints = self.state, self.checkpoints
        self._start_vote()  # for a signal since the last step, for example during an evaluation
        if self.stop_requests.any_rank_stops():
            checkpoints.save_and_stop(self.stop_requests.reason())
        self.health.check_end()
        if self.world.elastic:
            state.last = state.local_snapshot(copies=True)  # before the model gets other weights
        state.strategy.gather_model()  # from here on task.model has the trained weights
        if state.average:
            state.average.swap()
        self.model_step = checkpoints.load_best()
        self.task.merge_adapters()
        if self.model_step != state.step:
            self.evaluation = None  # it is the last model's, and an earlier one is the best

    def evaluate_final(self) -> EvaluationResult | None:
        """Evaluate the model that `run` left, if it was not. Frees the optimizer."""
        state, evaluations = self.state, self.evaluations
        state.meter.on_applied = None  # it would keep the schedule, and with it the optimizer
        del state.strategy, state.schedule, state.copies, state.average
        if evaluations is None:
            return None
        if self.evaluation is None:
            self.evaluation = evaluations.evaluate(self.task.model)
            evaluations.record(self.evaluation, self.metrics_logger, self.model_step)
        if state.eval_pending:
            state.best.update(self.model_step, self.evaluation.metrics)
        return self.evaluation

    def _step(self) -> tuple[float, Tensor]:
        """One optimizer step. Returns its learning rate and the norm of its gradient."""
        state, strategy, meter = self.state, self.state.strategy, self.state.meter
        step_windows = len(self.plan.step_windows(state.step))
        with strategy.passes():
            for batch in meter.timed("data", self.batches.of_step(state.step)):
                with meter.phase("compute"):
                    with autocast(self.world.device, self.config.train.precision):
                        losses = self.task.losses(strategy.module, batch)[: batch.num_windows]
                    # The strategy averages over the ranks. The factor makes that the mean over the step's windows.
                    loss = losses.sum() * (self.world.size / step_windows)
                    strategy.backward(loss)
                meter.add(loss, batch)
        with meter.phase("other"):  # what does not need the step's gradients, while the last of them are averaged
            self.checkpoints.check_write()
            self._start_vote()
            self.breakdown.count(state.step)
        with meter.phase("exposed_comm"):
            strategy.synchronize()
        with meter.phase("optimizer"):
            meter.settle()  # before DeepSpeed steps: advances the schedule if the last step was applied
            grad_norm = strategy.clip()
            learning_rate = state.schedule.get_last_lr()[0]
            strategy.step()
            if state.average:
                state.average.update(grad_norm)
            meter.end_step(grad_norm)
            state.step += 1
        return learning_rate, grad_norm

    def _start_vote(self) -> None:
        if self.checkpoints.folder_is_lost:
            self.stop_requests.stop_without_folder()
        self.stop_requests.start_vote()

    def _after_step(self, learning_rate: float, grad_norm: Tensor, stops: bool) -> None:
        """Log, stop, evaluate, save: whatever is due after this step."""
        state, checkpoints, total_steps = self.state, self.checkpoints, self.total_steps
        per_epoch = self.plan.steps_per_epoch
        evaluates = state.step == total_steps or self.config.train.evaluates_after(state.step, per_epoch, total_steps)
        state.eval_pending = self.evaluations is not None and evaluates
        self.metrics_logger.notify("on_step", state.step)
        logs = state.step % self.config.train.logging_steps == 0 or state.step in (1, total_steps)
        if state.eval_pending or logs:
            means = self.breakdown.read(state.step)
            self.health.check(state.step)
            now = {"epoch": state.step / per_epoch, "learning_rate": learning_rate, "grad_norm": float(grad_norm)}
            self.metrics_logger.logged(state.step, now | means | self.gpus.read(state.step) | checkpoints.metrics())
            checkpoints.folder_was_lost()  # not at each step: its file system may be slow
        if state.step == total_steps:  # before a checkpoint holds the untrained weights
            self.health.check_end()
        if stops:
            checkpoints.save_and_stop(self.stop_requests.reason())
        if state.eval_pending and not self._is_final:
            self._evaluate()
        if checkpoints.due(total_steps):
            checkpoints.save()
        state.meter.lap("other")

    @property
    def _is_final(self) -> bool:
        """Whether this step's model is the final one, which is evaluated once it is saved."""
        return self.state.step == self.total_steps and not self.config.checkpoint.load_best_model_at_end

    def _evaluate(self) -> None:
        assert self.evaluations is not None
        with self.state.meter.paused(), self.state.averaged():
            evaluation = self.evaluations.evaluate(self.state.strategy.gather_model())
        step = self.state.step
        self.evaluations.record(evaluation, self.metrics_logger, step)
        with run_folder.writing(self.config.train.folder, self.world) as writes:
            if writes and not self.checkpoints.folder_was_lost():
                run_folder.write_samples(self.config.train.folder, evaluation)
        self.state.eval_pending = False
        self.checkpoints.evaluated(evaluation.metrics)
        is_last = step == self.total_steps or self.checkpoints.patience_is_over
        self.evaluation = evaluation if is_last else None  # the answers are large
