"""Fine-tune BERT on SQuAD over every rank of the world: the page to read first.

    python -m hvd_bert.train --config sample                                 one process
    horovodrun -np 4 -H a100-01:2,a100-02:2 python -m hvd_bert.train         four ranks on two hosts
    srun --mpi=pmix python -m hvd_bert.train                                 every task of a Slurm job

Exit status: 0 done, 1 failure, 2 bad input (said once, before any training).
"""

from __future__ import annotations

import math

import torch

from hvd_bert import command_line, output
from hvd_bert.config import Config
from hvd_bert.data.batches import Collator
from hvd_bert.engines.horovod import HorovodEngine
from hvd_bert.errors import EXIT_FAILURE
from hvd_bert.evaluation import Evaluator
from hvd_bert.gpu_usage import GpuUsage
from hvd_bert.inputs import Inputs, TrainingSet, load_inputs
from hvd_bert.model import autocast, window_losses
from hvd_bert.optim import make_optimizer, make_schedule
from hvd_bert.telemetry import Meter, Telemetry
from hvd_bert.world import AgreedError, World, log, run_as_rank


def main(world: World) -> None:
    """The whole way of a run, from the command line to the files it leaves."""
    with world.together():
        config = command_line.parse(show_help=world.rank == 0)
    world.set_threads(config.horovod.num_threads)
    torch.set_float32_matmul_precision("high" if config.train.tf32 else "highest")
    where = ", ".join(world.hosts)
    log.info("%d rank(s) on %s, %s, controller %s", world.size, where, world.device.type, world.controller)
    for line in world.describe():
        log.info("%s", line)
    with world.together():
        if world.rank == 0:
            output.check(config)
        inputs = load_inputs(config, world)
    world.check_same(inputs.fingerprint() | {f"--{name}": value for name, value in config.as_flat().items()})
    with world.together():
        if world.rank == 0:
            output.make_ready(config)
    config.train.output_dir = world.broadcast(config.train.output_dir)
    folder = config.train.folder
    inputs.model.to(device=world.device)  # type: ignore[call-arg]  # transformers hides the signature

    telemetry = Telemetry(folder, enabled=world.rank == 0)
    evaluator = Evaluator(inputs, config, world) if inputs.dev else None
    if inputs.train:
        train(inputs, inputs.train, evaluator, telemetry, config, world)
    if evaluator:
        evaluation = evaluator(inputs.model)
        telemetry.evaluated(evaluation.metrics)
        if world.rank == 0:
            output.write_evaluation(folder, evaluation)
    telemetry.close()
    log.info("%s", output.describe(folder))


def train(
    inputs: Inputs,
    data: TrainingSet,
    evaluator: Evaluator | None,
    telemetry: Telemetry,
    config: Config,
    world: World,
) -> None:
    """Train `inputs.model`; leave it, the metrics and train_results.json in the output folder."""
    args, plan, model, folder = config.train, data.plan, inputs.model, config.train.folder
    total_steps = args.total_steps(plan.steps_per_epoch)
    engine = HorovodEngine(model, make_optimizer(model, args, world.size), plan.accumulation, config, world)
    schedule = make_schedule(engine.optimizer, args, total_steps)
    collate = Collator(data.windows, world.device)
    meter = Meter(world)
    gpus = GpuUsage(world, folder)
    effective = output.effective_settings(config, plan, world)
    log.info("Training: %s", ", ".join(f"{name} {value:g}" for name, value in effective.items()))
    torch.manual_seed(args.seed + world.rank)  # the ranks' dropout must differ; their weights were broadcast
    model.train()
    telemetry.begin(total_steps)

    for step in range(1, total_steps + 1):
        step_windows = len(plan.step_windows(step - 1))
        for ids in plan.rank_windows(step - 1, world.rank):
            batch = collate(ids)
            with autocast(world.device, args.precision):
                losses = window_losses(model, batch)[: batch.num_windows]
            # Horovod takes the mean over the ranks; this makes it the mean over the windows of the step.
            loss = losses.sum() * (world.size / step_windows)
            engine.backward(loss)
            meter.add(loss, batch)
        grad_norm = engine.clip()
        learning_rate = schedule.get_last_lr()[0]
        if engine.step():
            schedule.step()

        evaluates = evaluator is not None and args.evaluates_after(step, plan.steps_per_epoch, total_steps)
        if evaluates or args.logs_after(step, total_steps):
            means = meter.read(step)
            check_finite(step, means["loss"])
            now = {
                "epoch": step / plan.steps_per_epoch,
                "learning_rate": learning_rate,
                "grad_norm": float(grad_norm),
            }
            telemetry.logged(step, now | means | gpus.read(step))
        if evaluator is not None and evaluates:
            with meter.paused():
                telemetry.evaluated(evaluator(model).metrics)

    gpus.close()
    if world.rank == 0:
        output.save_model(folder, model, inputs.tokenizer)
        results = meter.results() | {"skipped_steps": engine.skipped_steps} | effective | output.facts(config, world)
        output.write_json(folder / "train_results.json", results)


def check_finite(step: int, loss: float) -> None:
    """End the run, on all ranks alike, when the mean loss is no number any more."""
    if math.isfinite(loss):
        return
    raise AgreedError(
        f"The loss is {loss} at step {step}: training has diverged. Lower --learning_rate, lengthen the warm-up"
        " (--warmup_ratio 0.1), or clip (--max_grad_norm 1).",
        status=EXIT_FAILURE,
    )


if __name__ == "__main__":
    run_as_rank(main)
