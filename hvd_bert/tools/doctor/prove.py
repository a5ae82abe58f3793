"""Prove that the ranks train as one process does: `hvd-bert doctor --prove`.

The trainer's loop takes a few steps on all ranks. After each step, rank 0 repeats the step in one process with plain
torch (`OneProcess`) and compares the results (`Proof`). Each repetition starts from the ranks' state before the step,
so errors do not add up.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvd_bert.config.settings import Config
from hvd_bert.data.batch_plan import BatchPlan, Ids
from hvd_bert.data.collate import Prefetcher
from hvd_bert.distributed.world import CollectiveError, World
from hvd_bert.errors import EXIT_FAILURE
from hvd_bert.model.precision import autocast
from hvd_bert.output import run_folder
from hvd_bert.output.callback import Callback
from hvd_bert.output.metrics_log import MetricsLogger
from hvd_bert.strategies.base import Strategy, optimizer_states
from hvd_bert.tasks.base import MicroBatch, Task
from hvd_bert.tools.doctor.lines import CheckResult, Report, failure, ok
from hvd_bert.training.loop import Training
from hvd_bert.training.optim import make_optimizer, make_schedule
from hvd_bert.training.start import Start, load, prepare
from hvd_bert.training.state import random_numbers, seed_ranks, set_random_numbers

# Maximum error of a tensor's gradient or update, relative to its norm. The bounds are well above 1e-5, because clipping
# by the total gradient norm alone adds an error of up to 1e-5, even in fp32.
BOUNDS = {"gradient": 1e-4, "gradient sent as fp16": 2e-3, "gradient sent as bf16": 1.6e-2, "update": 1e-4}
ROUNDING = 3e-7  # rounding error of adding a small gradient or update to a tensor, relative to the tensor's norm
# Share of the total gradient norm that is added to each tensor's norm to compute its bound: the gradients of key biases
# are only rounding errors.
FLOOR = 1e-2
CHECKS = {
    "Plan": "each window of a step is taken once, by the rank to which the batch plan assigns it",
    "Inputs": "every micro-batch has the content of its windows",
    "Seeds": "each rank's random numbers follow from the seed, and differ from the other ranks'",
    "Steps": "learning rate, loss and gradient norm are those of one process",
    "Gradients": "each tensor's averaged and clipped gradient is that of one process",
    "Updates": "each tensor's new weights and optimizer state are those of one process",
    "Copies": "weights and optimizer state have the same bits on all ranks",
}
Tensors = dict[str, Tensor]
Row = dict[str, Any]  # check -> facts about a rank's step


def digest(value: Any) -> str:
    """Hash an object that may contain tensors on any device."""

    def plain(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return vars(item)
        content = item.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return [str(item.dtype), item.shape, hashlib.blake2b(content, digest_size=16).hexdigest()]

    return hashlib.blake2b(json.dumps(value, default=plain).encode(), digest_size=8).hexdigest()


def record_batch(row: Row, ids: Ids, batch: MicroBatch, gpus: list[torch.device]) -> None:
    """Add a micro-batch's window ids to a rank's row, with hashes of its content and of the current random state.

    Called before the forward pass.
    """
    found = {"Plan": ids.tolist(), "Inputs": digest(batch), "Seeds": digest(random_numbers(gpus))}
    for check, value in found.items():
        row.setdefault(check, []).append(value)


class OneProcess:
    """Repeats the steps of all ranks in one process, without a strategy or collectives."""

    def __init__(self, task: Task, plan: BatchPlan, config: Config, world: World) -> None:
        self.task, self.args, self.device, self.gpus = task, config.train, world.device, world.gpus
        self.plan = BatchPlan(**vars(plan))
        self.model = copy.deepcopy(task.model).train()
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(self.model, self.args, world.size * world.devices)
        self.schedule = make_schedule(self.optimizer, self.args, self.args.max_steps)
        self.random: list[Tensors] = []  # random state of each rank
        for rank in range(world.size):
            other = copy.copy(world)
            other.rank = rank
            seed_ranks(self.args.seed, 0, other)
            self.random.append(random_numbers(self.gpus))

    def gradients(self, step: int) -> tuple[list[Row], dict[str, float]]:
        """Compute the averaged and clipped gradients of step `step` (0, 1, ...) into the parameters' `grad`.

        Returns the rows of all ranks, and the learning rate, loss and gradient norm.
        """
        own, size = random_numbers(self.gpus), len(self.random)
        rows: list[Row] = [{} for _ in range(size)]
        loss = 0.0
        for rank, row in enumerate(rows):
            set_random_numbers(self.random[rank], self.gpus)
            for ids in self.plan.rank_windows(step, rank):
                batch = self.task.batch(ids)
                record_batch(row, ids, batch, self.gpus)
                with autocast(self.device, self.args.precision):
                    losses = self.task.losses(self.model, batch)[: batch.num_windows]
                # Scale the loss by the ranks' factor: in bf16, the rounding errors depend on it.
                share = losses.sum() * (size / len(self.plan.step_windows(step)))
                share.backward()
                loss += float(share.detach()) / size
            self.random[rank] = random_numbers(self.gpus)
        set_random_numbers(own, self.gpus)
        for parameter in self.trained.values():
            if parameter.grad is not None:
                parameter.grad /= size
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm or float("inf"))
        return rows, {"learning_rate": self.schedule.get_last_lr()[0], "loss": loss, "grad_norm": float(norm)}

    def state(self) -> Tensors:
        """Copy the weights ("PARAMETER") and the optimizer state ("PARAMETER/exp_avg", ...) to the CPU."""
        slots = {f"{name}/{slot}": t for name, p in self.trained.items() for slot, t in self.optimizer.state[p].items()}
        return {name: t.detach().to("cpu", copy=True) for name, t in (self.trained | slots).items()}

    def load(self, weights: Tensors, slots: Tensors) -> None:
        """Load the ranks' weights and optimizer state."""
        self.model.load_state_dict(weights)
        for name, tensors in optimizer_states(slots).items():
            parameter = self.trained[name]
            self.optimizer.state[parameter] = {s: t.to(parameter.device, copy=True) for s, t in tensors.items()}


class Proof(Callback):
    """Compares each step of the ranks with the same step in one process, on rank 0.

    `failures`: check -> its first failure. `steps`: described in docs/reference/output-files.md.
    """

    def __init__(self, strategy: Strategy, reference: OneProcess | None, config: Config, world: World) -> None:
        """`reference`: repeats the steps in one process; None on all ranks except 0."""
        self.strategy, self.reference, self.world = strategy, reference, world
        self.failures: dict[str, str] = {}
        self.compared: set[str] = set()  # checks that had something to compare
        self.steps: list[dict[str, Any]] = []
        self._row: Row = {}  # this rank's row of the current step
        self._prefetched: deque[Ids] = deque()
        self._share = 1 - config.train.adam_beta1  # weight of the new gradient in AdamW's first moment
        sent = [f" sent as {name}" for name in ("fp16", "bf16") if getattr(config.parallel, f"{name}_allreduce")]
        self._bound = BOUNDS["gradient" + "".join(sent)]

    def make_batch(self, task: Task, ids: Ids) -> MicroBatch:
        """Make a micro-batch of this rank, and queue its window ids for `on_batch`."""
        self._prefetched.append(ids)
        return task.batch(ids)

    def on_batch(self, batch: MicroBatch) -> None:
        record_batch(self._row, self._prefetched.popleft(), batch, self.world.gpus)

    def on_log(self, step: int, metrics: dict[str, float]) -> None:
        """Compare step `step` (1, 2, ...), which the ranks have finished, with the same step in one process."""
        weights, slots, _ = self.strategy.state()
        hashes = {name: digest(t) for name, t in {**self.strategy.gather_model().state_dict(), **slots}.items()}
        rows = self.world.gather(self._row | {"Copies": hashes})
        self._row = {}
        if self.reference:
            expected, figures = self.reference.gradients(step - 1)
            short = [row | {"Copies": digest(row["Copies"])} for row in rows]
            self.steps.append({"figures": figures, "hashes": hashes, "ranks": short, "errors": {}})
            for name, value in figures.items():
                self._bounded("Steps", name, abs(metrics[name] - value), self._bound * abs(value))
            self._compare_rows(self.reference.plan.step_windows(step - 1), expected, rows)
            self._compare_tensors(self.reference, {n: t.detach().cpu() for n, t in {**weights, **slots}.items()})
            self.reference.load(weights, slots)
        self.world.allgather(None)  # wait for rank 0 here: a wait within the next step would trigger the watchdog

    def _compare_rows(self, windows: Ids, expected: list[Row], rows: list[Row]) -> None:
        taken = sorted(window for row in rows for ids in row["Plan"] for window in ids)
        self._expect("Plan", taken == sorted(windows.tolist()), "not every window of the step is taken once")
        for rank, row in enumerate(rows):
            for check, value in expected[rank].items():
                self._expect(check, row[check] == value, f"rank {rank} differs")
            # Compare only tensors of this rank: sharding strategies gather the optimizer state only on rank 0.
            others = [name for name, hashed in row["Copies"].items() if hashed != rows[0]["Copies"].get(name)]
            self._expect("Copies", not others, f"rank {rank} differs in {len(others)} tensors: {others[:1]}")
        self._expect("Seeds", len({tuple(row["Seeds"]) for row in rows}) == len(rows), "two ranks have the same")

    def _compare_tensors(self, reference: OneProcess, ranks: Tensors) -> None:
        """Compare the ranks' gradients and updates with one process's.

        The ranks' gradients are computed from the change of AdamW's first moment. The reference then takes its step
        with these gradients, so that errors of the gradients do not count as errors of the updates.
        """
        before = reference.state()
        expected = {name: p.grad.cpu() for name, p in reference.trained.items() if p.grad is not None}
        whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
        for name, gradient in expected.items():
            past, now = (state.get(f"{name}/exp_avg", torch.zeros_like(gradient)) for state in (before, ranks))
            found = (now - (1 - self._share) * past) / self._share
            bound = self._bound * (gradient.norm() + FLOOR * whole) + ROUNDING * past.norm() / self._share
            self._bounded("Gradients", name, (found - gradient).norm(), bound)
            reference.trained[name].grad = found.to(reference.device)
        reference.optimizer.step()
        reference.schedule.step()
        reference.optimizer.zero_grad()
        for name, value in reference.state().items():
            past, now = (state.get(name, torch.zeros_like(value)) for state in (before, ranks))
            bound = BOUNDS["update"] * (value - past).norm() + ROUNDING * value.norm()
            self._bounded("Updates", name, (now - value).norm(), bound)

    def _bounded(self, check: str, name: str, error: float | Tensor, bound: float | Tensor) -> None:
        times = float(error / bound) if bound else float("inf") if error else 0.0
        self.steps[-1]["errors"].setdefault(check, {})[name] = times
        self._expect(check, times <= 1, f"the error of {name} is {times:.3g} times its bound")

    def _expect(self, check: str, holds: bool, found: str) -> None:
        self.compared.add(check)
        if not holds:
            self.failures.setdefault(check, f"step {len(self.steps)}: {found}")

    def results(self) -> Iterator[CheckResult]:
        """Yield the result of each check. Called on rank 0."""
        for check, text in CHECKS.items():
            if check not in self.compared:
                self.failures[check] = "nothing was compared"
            errors = [(e, name) for step in self.steps for name, e in step["errors"].get(check, {}).items()]
            if errors:
                text += " (error / bound at most {:.2g}, of {})".format(*max(errors))
            yield failure(check, self.failures[check]) if check in self.failures else ok(check, text)


def prove(start: Start, world: World) -> Proof:
    """Train, and compare each step with the same step in one process. A collective; only rank 0's proof has results."""
    task, config = start.task, start.config
    assert task.plan is not None
    if not task.plan.mixture:  # a mixture of files is not shortened
        # The third step, the last of the epoch, has world size + 1 windows, so the ranks' shares differ.
        lengths = task.plan.lengths[: 2 * task.plan.global_batch + world.size + 1]
        task.plan = replace(task.plan, lengths=lengths)
    reference = OneProcess(task, task.plan, config, world) if world.rank == 0 else None
    prepared = prepare(start, world)
    prepared.batches.close()
    proof = Proof(prepared.state.strategy, reference, config, world)
    batches = Prefetcher(prepared.state.plan, partial(proof.make_batch, task), world.rank, 0)
    metrics_logger = MetricsLogger(Path(), enabled=False, callbacks=[proof])
    with tempfile.TemporaryDirectory() as folder:
        start = start.in_folder(Path(folder))
        training = Training(start, replace(prepared, batches=batches), None, metrics_logger, world)
        training.logs_late = False  # log before the next step, which changes the weights to compare
        training.run()
    return proof


def run(flags: argparse.Namespace, config: Config, world: World) -> None:
    """Run the proof and print its report. A collective. Raises CollectiveError on all ranks if a comparison fails."""
    start = load(config, world)
    settings, launcher = start.config.as_flat(), world.launcher
    proof, report = prove(start, world), Report(flags.json, shown=world.rank == 0)
    report.print_details(f"{world.size} rank(s), --strategy {settings['strategy']}, launcher {launcher}\n")
    if world.rank == 0:
        report.add(*proof.results())
    report.data = {"settings": settings, "launcher": launcher, "bounds": BOUNDS, "steps": proof.steps}
    report.data |= run_folder.environment_facts(start.config, world)
    if world.broadcast(report.close("Proved: the ranks do the work of one process", EXIT_FAILURE)):
        raise CollectiveError("The ranks do not do the work of one process.", status=EXIT_FAILURE)
