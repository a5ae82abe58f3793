"""Make 100 wrong trainings, which `hvd-bert doctor --prove` must find: `horovodrun -np 2 python mutations.py FOLDER N`.

Makes every Nth mutation. Rank 0 writes FOLDER/found.json: for each mutation, whether it changed the weights, and which
checks failed; "none" is the correct training. Then the command `doctor --prove` checks a wrong training, and must fail.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvd_bert.config.strategies import STRATEGIES
from hvd_bert.data.batch_plan import BatchPlan, Ids
from hvd_bert.distributed.runner import run_as_rank
from hvd_bert.distributed.world import World
from hvd_bert.strategies.horovod import HorovodStrategy
from hvd_bert.tasks import base
from hvd_bert.tasks.base import MicroBatch, load_task
from hvd_bert.tasks.question_answering import QuestionAnswering
from hvd_bert.tools.doctor import __main__ as doctor
from hvd_bert.tools.doctor import prove
from hvd_bert.training.start import Start

ALL = ", on all ranks"


def flip(tensor: Tensor, bit: int) -> Tensor:
    """Flip a bit of the element with the largest magnitude. Returns the tensor."""
    flat = tensor.detach().view(-1)
    flat.view(torch.int32)[int(flat.abs().argmax())] ^= 1 << bit
    return tensor


# Kind -> the moment in a step at which the mutation is made, and the function that makes it: it changes an argument
# in place, or returns a replacement for the last one.
KINDS: dict[str, tuple[str, Callable[..., Any]]] = {
    "gradient scaled": ("gradient", lambda mutant, gradient: gradient.mul_(1.01)),
    "bit of a gradient": ("gradient", lambda mutant, gradient: flip(gradient, 24)),
    "gradient of the step before": ("gradient", lambda mutant, gradient: gradient.copy_(mutant.last)),
    f"mean per rank{ALL}": ("losses", lambda total, losses: losses * (total / (2 * len(losses)))),
    f"sum in place of mean{ALL}": ("average", lambda mutant, average: average.mul_(2)),
    f"not averaged{ALL}": ("average", lambda mutant, average: average.copy_(mutant.last)),
    "averaged gradient scaled": ("average", lambda mutant, average: average.mul_(1.01)),
    "bit of an averaged gradient": ("average", lambda mutant, average: flip(average, 24)),
    f"not clipped{ALL}": ("average", lambda mutant, _: mutant.clip_to(0.0)),
    "no update": ("update", lambda mutant, _: mutant.optimizer.zero_grad()),
    f"no update{ALL}": ("update", lambda mutant, _: mutant.optimizer.zero_grad()),
    f"learning rate{ALL}": ("update", lambda mutant, _: mutant.add("lr", 1e-5)),
    f"weight decay{ALL}": ("update", lambda mutant, _: mutant.add("weight_decay", 0.09)),
    f"second moment lost{ALL}": ("after", lambda mutant, weight: mutant.optimizer.state[weight]["exp_avg_sq"].zero_()),
    "lowest bit of a weight": ("after", lambda mutant, weight: flip(weight, 0)),
    "seed": ("after", lambda mutant, _: torch.manual_seed(Now.step)),
    f"weight of a file{ALL}": ("plan", lambda other, ids: other),
    "window dropped": ("plan", lambda other, ids: ids[:-1]),
    "window twice": ("plan", lambda other, ids: np.append(ids[:-1], ids[0])),
    "bit of a token": ("batch", lambda row: row.__ixor__(1)),
}
LAYER = "bert.encoder.layer.1."
TARGETS = (  # (rank, step counted from 1, tensor)
    (0, 1, "bert.embeddings.position_embeddings.weight"),
    (1, 2, LAYER + "attention.self.value.weight"),
    (0, 3, LAYER + "output.dense.bias"),
    (1, 4, LAYER + "intermediate.dense.weight"),
    (1, 5, "qa_outputs.weight"),
)
MUTATIONS = [(kind, target) for kind in KINDS for target in TARGETS]
FILES, OTHER_FILES = ((5, 3), (7, 14)), ((5, 5), (7, 12))  # weights 0.6 and 2; the third step ends an epoch
# A step has 4 and 3 windows on the two ranks, so the mean of the ranks' means is not the mean over all windows.
CLIP = 0.1
FLAGS = f"--prove --warmup_ratio=0 --max_grad_norm={CLIP} --per_device_train_batch_size=4 --global_batch=7".split()


class Now:
    """The current mutation, and the number of the ranks' current step, from 1."""

    kind = "none"
    rank, step, tensor = TARGETS[0]
    number = 1

    @classmethod
    def mutated(cls, moment: str, rank: int, number: int, *values: Any) -> Any:
        """Return the last of `values`, which the current mutation changes if it is due."""
        when, change = KINDS.get(cls.kind, ("never", None))
        last_step = 4 if cls.kind == "seed" else 5  # a new seed changes only the next step
        due = (when, min(cls.step, last_step)) == (moment, number) and (cls.kind.endswith(ALL) or rank == cls.rank)
        return change(*values) if change and due else values[-1]


class Mutant(HorovodStrategy):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        Now.number = 1
        self.weight = dict(self.model.named_parameters())[Now.tensor]
        self.last = torch.zeros_like(self.weight)  # this rank's previous gradient
        self.weight.register_hook(self.before_average)

    def mutate(self, moment: str, value: Any) -> Any:
        return Now.mutated(moment, self._world.rank, Now.number, self, value)

    def before_average(self, gradient: Tensor) -> Any:
        sent, self.last = self.mutate("gradient", gradient.clone()), gradient.clone()
        return sent

    def synchronize(self) -> None:
        super().synchronize()
        self.mutate("average", self.weight.grad)

    def clip_to(self, norm: float) -> None:
        self.clipping.limit = norm

    def add(self, key: str, value: float) -> None:
        for group in self.optimizer.param_groups:
            group[key] += value

    def step(self) -> bool:
        before = [dict(group) for group in self.optimizer.param_groups]
        self.mutate("update", self.weight)
        super().step()
        self.mutate("after", self.weight)
        for group, settings in zip(self.optimizer.param_groups, before, strict=True):
            group.update(settings)
        self.clip_to(CLIP)
        Now.number += 1
        return True


class MutantPlan(BatchPlan):
    def rank_windows(self, step: int, rank: int) -> list[Ids]:
        (other,) = BatchPlan(**vars(self) | {"mixture": OTHER_FILES}).rank_windows(step, rank)
        return [Now.mutated("plan", rank, step + 1, other, ids) for ids in super().rank_windows(step, rank)]


class MutantTask(QuestionAnswering):
    def batch(self, ids: Ids) -> MicroBatch:
        batch = super().batch(ids)
        assert self.plan
        (expected,) = self.plan.rank_windows(Now.step - 1, self.world.rank)
        # Skip the single-process reference, which makes batches in the main thread.
        if np.array_equal(ids, expected) and threading.current_thread() is not threading.main_thread():
            Now.mutated("batch", self.world.rank, Now.step, batch.content.input_ids[0, 1])
        return batch

    def losses(self, model: Any, batch: MicroBatch) -> Any:
        losses = super().losses(model, batch)
        if model is not self.model or not self.plan:  # the single-process reference
            return losses
        total = len(self.plan.step_windows(Now.number - 1))
        return Now.mutated("losses", self.world.rank, Now.number, total, losses)


def main(world: World) -> None:
    folder, stride = Path(sys.argv[1]), int(sys.argv[2])
    sys.argv[1:] = FLAGS
    STRATEGIES["horovod"] = replace(STRATEGIES["horovod"], path="mutations:Mutant")
    base.QUESTION_ANSWERING_CLASS = "mutations:MutantTask"
    _, config = doctor.parse_proof(sys.argv[1:])
    loaded, found, right = load_task(config, world), {}, None
    for kind, (Now.rank, Now.step, Now.tensor) in [("none", TARGETS[0]), *MUTATIONS[::stride]]:
        Now.kind = kind
        task = copy.copy(loaded)
        task.model, task.plan = copy.deepcopy(loaded.model), MutantPlan(**vars(loaded.plan) | {"mixture": FILES})
        proof = prove.prove(Start(config, task), world)
        after = [[row["Copies"] for row in step["ranks"]] for step in proof.steps[-1:]]
        right = right or after
        found[f"{kind}: rank {Now.rank}, step {Now.step}"] = {"changed": after != right, "failures": proof.failures}
    if world.rank == 0:
        (folder / "found.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    Now.kind = f"sum in place of mean{ALL}"
    doctor.prove(world)


if __name__ == "__main__":
    sys.modules["mutations"] = sys.modules["__main__"]  # the trainer imports the classes from this module name
    run_as_rank(main)
