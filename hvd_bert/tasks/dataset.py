"""Base class of tasks with independent examples. A subclass supplies the model, the examples and the loss."""

from __future__ import annotations

import hashlib
import json
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import PreTrainedModel

from hvd_bert.config.data import QUESTION_ANSWERING, DataArguments
from hvd_bert.config.settings import Config
from hvd_bert.data.batch_plan import Ids, Lengths, Mixture, balanced_partition, window_costs
from hvd_bert.distributed.world import World
from hvd_bert.errors import EXIT_FAILURE, UserError, short_reason
from hvd_bert.evaluation.evaluator import batch_outputs
from hvd_bert.hub import DEFAULT_MODEL
from hvd_bert.model.precision import evaluating
from hvd_bert.tasks.base import EvaluationResult, MicroBatch, Task, make_plan
from hvd_bert.tasks.trained import as_trained, load_weights

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True, eq=False)
class Examples:
    """The examples of a training or validation set.

    Attributes:
        collate: Makes a batch from one or more example ids, on the CPU or the rank's device. See `Task.batch` for
            random numbers.
        lengths: Tokens per example, or another integer measure of an example's cost.
        digest: A hash of the content. It must be equal on all ranks and on resume.
        mixture: See `BatchPlan.mixture`, for training on several files.
        groups: Group number of each example, from 0. All examples of a group, such as the windows of a question, are
            evaluated on the same rank. None: each example is its own group.
    """

    collate: Callable[[Ids], Any]
    lengths: Lengths
    digest: str
    mixture: Mixture = ()
    groups: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of_tensors(cls, *tensors: Tensor) -> Examples:
        """Make one example per row of the tensors. All examples have length 1."""
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.contiguous().numpy().tobytes())
        ones = np.ones(len(tensors[0]), dtype=np.int32)
        return cls(lambda ids: tuple(tensor[torch.from_numpy(ids)] for tensor in tensors), ones, digest.hexdigest())

    @classmethod
    def of_dataset(cls, dataset: Any, digest: str, lengths: Lengths | None = None) -> Examples:
        """Make one example per item of a map-style data set, with batches from torch's default_collate.

        `lengths`: 1 per example by default.
        """
        lengths = np.ones(len(dataset), dtype=np.int32) if lengths is None else lengths
        return cls(lambda ids: default_collate([dataset[int(i)] for i in ids]), lengths, digest)


Result = TypeVar("Result")
Share = tuple[Ids, Tensor, Any]  # a rank's validation ids, their losses, and the result of `collect`


class DatasetTask(Task):
    """A task with independent examples.

    A subclass creates `model`, `train` and `dev` in `load`, and defines `forward` and `score`. `trained`: the output
    folder of the training to evaluate, whose weights are loaded after `load`; None when training.
    """

    train: Examples | None = None
    dev: Examples | None = None
    trained: str | None = None
    crossover: int = 1  # see `window_costs`

    def __init__(self, config: Config, world: World) -> None:
        name = config.model.model_name_or_path
        # Question answering loads trained weights in its own `load`.
        evaluates = not config.train.do_train and config.data.task != QUESTION_ANSWERING
        of_training = as_trained(config) if evaluates else None
        self.config, self.world = of_training or config, world
        self.trained = name if of_training else None
        torch.manual_seed(self.config.train.seed)  # so that new weights are equal on all ranks
        self.load(self.config)
        if evaluates and (self.trained or not isinstance(self.model, PreTrainedModel)):
            if name in (None, DEFAULT_MODEL):
                raise UserError("--no_do_train: name the output folder of a training with --model_name_or_path.")
            load_weights(self.model, str(name))
        self.limit(config.data)
        if self.train is not None and config.train.do_train:
            self.plan = make_plan(self.train.lengths, config.train, self.crossover, world, self.train.mixture)
        self.evaluates = self.dev is not None and config.train.do_eval
        if self.evaluates:
            self._check_not_empty("`dev`")

    def _check_not_empty(self, source: str) -> None:
        if not self.dev:
            raise UserError(f"--task {self.config.data.task}: {source} has no examples. Give data with examples.")

    def limit(self, data: DataArguments) -> None:
        """Apply --max_train_samples. Raise UserError if `load` has not applied --max_eval_samples.

        Only `load` can apply --max_eval_samples, since `score` may use further data about the examples of `dev`.
        """
        count = data.max_train_samples
        if self.train is not None and count is not None:
            self.train = replace(self.train, lengths=self.train.lengths[:count], mixture=())
        limit = data.max_eval_samples
        if self.dev is not None and limit is not None and len(self.dev) > limit:
            raise UserError(f"--max_eval_samples {limit}: --task {data.task} does not support it. Remove it.")

    @abstractmethod
    def load(self, config: Config) -> None:
        """Create `model`, `train` (for training) and `dev` (for evaluation). Every rank calls it, without collectives.

        When a trained model is evaluated, `config` has the settings of its training, such as --model_name_or_path and
        --train_file, and the trained weights are loaded afterwards.
        """

    @abstractmethod
    def forward(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Compute a batch's losses, [n], and outputs, [n, ...], such as predicted classes, for its n examples."""

    @abstractmethod
    def score(self, outputs: Any) -> dict[str, float]:
        """Compute the metrics from the outputs of all examples of `dev`, in their order. Called on rank 0 only."""

    def predictions(self, outputs: Any) -> Any:
        """Return the content of eval_predictions.json, or None for no file. Tensors become lists. Called on rank 0.

        `hvd-bert predict` needs a list with one value per example, or a dict of such lists.
        """
        return None

    def inputs(self, rows: Dataset) -> Examples:
        """Make examples from a file's rows, for `hvd-bert predict`. Override this: the default raises UserError.

        Labels may be arbitrary, since losses are ignored.
        """
        raise UserError(f"--task {self.config.data.task}: to predict, it needs a method `inputs`. Add it.")

    def predict(self, rows: Dataset) -> Any:
        """Return the `predictions` for the rows of a file, as lists; None on ranks other than 0. A collective.

        The rows replace `dev`.
        """
        with self.world.raise_on_all_ranks():
            self.dev = self.inputs(rows)
            self._check_not_empty("the result of `inputs`")
        vars(self).pop("_share", None)  # cached for the previous `dev`
        self.world.check_same(self.fingerprint())
        return self._on_rank_0(self.model, lambda shares: as_lists(self.predictions(self._joined(shares)[0])))

    def positions(self, batch: Any, tokens: int) -> int:
        """Return a batch's number of token positions, with padding. Default: `tokens`, its number without padding."""
        return tokens

    def batch(self, ids: Ids) -> MicroBatch:
        assert self.train is not None
        return self._batch(self.train, ids)

    def _batch(self, examples: Examples, ids: Ids) -> MicroBatch:
        content = to_device(examples.collate(ids if len(ids) else np.zeros(1, np.int64)), self.world.device)
        tokens = int(examples.lengths[ids].sum())
        return MicroBatch(content, len(ids), tokens, self.positions(content, tokens) if len(ids) else 0)

    def losses(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        losses = self.forward(model, batch.content)[0]
        if losses.ndim != 1:
            raise UserError(
                f"--task {self.config.data.task}: `forward` must return a loss for each example, but the shape is"
                f' {[*losses.shape]}. For one of torch\'s losses, set reduction="none".'
            )
        return losses

    def evaluate(self, model: nn.Module) -> EvaluationResult:
        result = self._on_rank_0(model, self._scored)
        metrics = self.world.broadcast(result and result.metrics)
        return result or EvaluationResult(metrics, self.summary(metrics))

    def _on_rank_0(self, model: nn.Module, use: Callable[[list[Share]], Result]) -> Result | None:
        """Evaluate `dev`, and return `use(shares of all ranks)` on rank 0, None on all other ranks. A collective.

        Forward passes run no collectives, so ranks may have different numbers of batches, or none.
        """
        with self.world.raise_on_all_ranks(EXIT_FAILURE):  # a user error on one rank, such as NaN weights
            share = self._evaluate_share(model)
        shares = self.world.gather(share)
        with self.world.raise_on_all_ranks(EXIT_FAILURE):
            made = use(shares) if self.world.rank == 0 else None
        return made

    @cached_property
    def _share(self) -> Ids:
        """Ids of this rank's examples of `dev`, longest first. All ranks' shares have nearly the same cost.

        This order puts examples of similar length into a batch, and an out-of-memory error occurs in the first batch.
        """
        assert self.dev is not None
        costs = window_costs(self.dev.lengths, self.crossover)
        groups = np.arange(len(costs)) if self.dev.groups is None else self.dev.groups
        of_groups = np.zeros(groups.max() + 1, dtype=np.int64)
        np.add.at(of_groups, groups, costs)
        mine = np.flatnonzero(np.isin(groups, balanced_partition(of_groups, self.world.size)[self.world.rank]))
        return mine[np.argsort(-self.dev.lengths[mine], kind="stable")]

    def _evaluate_share(self, model: nn.Module) -> Share:
        dev, ids, args, all_losses = self.dev, self._share, self.config.train, [torch.empty(0)]
        assert dev is not None
        batches = batch_outputs(
            lambda batch: self.forward(model, batch.content),
            lambda part: self._batch(dev, part),
            ids,
            args.per_device_eval_batch_size,
            self.world.device,
            args.precision,
            show_progress=self.world.rank == 0 and sys.stderr.isatty(),
        )

        def predict_batches() -> Iterator[tuple[Ids, Tensor]]:
            for part, losses, outputs in batches:
                all_losses.append(losses)
                yield part, outputs

        with evaluating(model, eager=self.config.train.captures_graphs):  # no CUDA graphs: batch shapes vary
            collected = self.collect(predict_batches()) if len(ids) else None
        return ids, torch.cat(all_losses), collected

    def collect(self, outputs: Iterable[tuple[Ids, Tensor]]) -> Any:
        """Concatenate this rank's outputs, to be sent to rank 0. `outputs`: (ids, outputs) of each batch."""
        return self._concatenated([values for _, values in outputs])

    def join(self, collected: Sequence[Any], order: Tensor) -> Any:
        """Join all ranks' results of `collect` for `score`. `order`: permutation that sorts examples by id."""
        return self._concatenated(collected)[order]

    def _concatenated(self, outputs: Sequence[Tensor]) -> Tensor:
        shapes = sorted({str([*values.shape[1:]]) for values in outputs})
        if len(shapes) > 1:
            raise UserError(
                f"--task {self.config.data.task}: the outputs of `forward` have different shapes per example,"
                f" {shapes[0]} and {shapes[1]}. Give them one shape, or override `collect` and `join`."
            )
        return torch.cat(tuple(outputs))

    def _scored(self, shares: list[Share]) -> EvaluationResult:
        outputs, losses = self._joined(shares)
        scores = as_lists(self.score(outputs))
        if not isinstance(scores, dict):
            raise UserError(self._wrong("score", f"it returns {scores!r:.80}", "a dict of names and numbers"))
        for name, value in scores.items():
            if not isinstance(name, str) or not isinstance(value, int | float):
                raise UserError(self._wrong("score", f"{name!r} is {value!r:.80}", "a dict of names and numbers"))
        metrics = scores | {"eval_loss": float(losses.mean(dtype=torch.float64))}
        missing = self.metrics.keys() - metrics
        if missing:
            raise UserError(
                f"--task {self.config.data.task}: `score` does not return {', '.join(sorted(missing))}. Add it, or"
                " remove it from `metrics`."
            )
        return EvaluationResult(metrics, self.summary(metrics), self.files(outputs), outputs)

    def _joined(self, shares: list[Share]) -> tuple[Any, Tensor]:
        """Join the shares of all ranks. Returns the outputs and losses of all examples, in the order of `dev`."""
        ids, losses, collected = zip(*(share for share in shares if len(share[0])), strict=True)
        order = torch.from_numpy(np.argsort(np.concatenate(ids)))
        return self.join(collected, order), torch.cat(losses)[order]

    def files(self, outputs: Any) -> dict[str, Any]:
        """Return the output files for `EvaluationResult.files`: file name -> JSON content. Called on rank 0."""
        predictions = as_lists(self.predictions(outputs))
        if predictions is None:
            return {}
        for name, values in predictions.items() if isinstance(predictions, dict) else [("", predictions)]:
            try:
                json.dumps({name: values})
            except (TypeError, ValueError) as error:
                problem = f"{name!r}: {short_reason(error)}" if name else short_reason(error)
                raise UserError(self._wrong("predictions", problem, "values that JSON can hold")) from None
        return {"eval_predictions.json": predictions}

    def _wrong(self, method: str, problem: str, needed: str) -> str:
        return f"--task {self.config.data.task}: `{method}` must return {needed}, but {problem}."

    def summary(self, metrics: dict[str, float]) -> str:
        """Format the metrics of an evaluation in one line."""
        assert self.dev is not None
        scores = [f"{name} {metrics[name]:.4f}" for name in self.metrics if not name.startswith("eval_loss")]
        return "  ".join([*scores, f"loss {metrics['eval_loss']:.3f}", f"on {len(self.dev)} {self.unit}"])

    def fingerprint(self) -> dict[str, object]:
        sets = {"training": self.train, "validation": self.dev}
        return {
            f"the {name} data": f"{part.digest[:12]}, {len(part)} {self.unit}, total length {part.lengths.sum()}"
            for name, part in sets.items()
            if part is not None
        }

    def identity(self) -> dict[str, object]:
        assert self.train is not None
        return {"the training data": self.train.digest[:12]}


def as_lists(content: Any) -> Any:
    """Convert tensors and arrays, including nested ones, to lists."""
    if isinstance(content, dict):
        return {key: as_lists(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [as_lists(value) for value in content]
    return content.tolist() if hasattr(content, "tolist") else content


def to_device(content: Any, device: torch.device) -> Any:
    """Copy tensors, including nested ones, to the device."""
    if isinstance(content, Tensor):
        if device.type == "cuda" and content.device.type == "cpu":
            content = content.pin_memory()  # a copy from unpinned memory would block this thread
        return content.to(device, non_blocking=True)
    if isinstance(content, dict):
        return {key: to_device(value, device) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        make = getattr(content, "_make", type(content))  # a named tuple's constructor takes its fields one by one
        return make(to_device(value, device) for value in content)
    return content
