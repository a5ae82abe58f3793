"""The interface between the training loop and a task: model, data, loss and evaluation.

For a custom task, start with `DatasetTask` (dataset.py), which implements most of it for independent examples.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import isabstract
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Literal

import safetensors.torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hvd_bert.config.data import QUESTION_ANSWERING
from hvd_bert.config.parser import AUTO
from hvd_bert.config.settings import Config
from hvd_bert.config.strategies import STRATEGIES
from hvd_bert.config.training import TrainArguments
from hvd_bert.data.batch_plan import BatchPlan, Ids, Lengths, Mixture
from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError
from hvd_bert.model.flops import ForwardFlops, forward_flops
from hvd_bert.model.lora import add_adapters, merge

QUESTION_ANSWERING_CLASS = "hvd_bert.tasks.question_answering:QuestionAnswering"


@dataclass(frozen=True)
class MicroBatch:
    """A batch for one forward and backward pass. `content`: the task's batch, on the rank's device.

    `num_tokens`: without padding. `num_positions`: including padding. If `num_windows` is 0, the rank's share is empty:
    `content` then holds one window whose loss must not count, so that all ranks run the same number of passes.
    """

    content: Any
    num_windows: int
    num_tokens: int
    num_positions: int


@dataclass(frozen=True)
class EvaluationResult:
    """Metrics of an evaluation and a one-line summary for the log, on every rank.

    Only on rank 0: `files` maps names of output files (of `run_folder.RUN_FILES`) to JSON content, and `outputs` is the
    argument of `score`.
    """

    metrics: dict[str, float]
    summary: str
    files: dict[str, Any] = field(default_factory=dict)
    outputs: Any = None


class Task(ABC):
    """A model with its data. The constructor loads and checks both, without collectives. Raises UserError.

    Attributes:
        unit: Name of the examples in messages. The code says "window" for all tasks.
        trained_as: The value of --task for the trained model, if another task evaluates it and answers with it.
        metrics: Name of each metric for --metric_for_best_model and reports -> "max" if higher is better, else "min".
            `evaluate` returns these metrics. The first is the default. The constructor may set them.
        model: The model, initially on the CPU. Its weights are equal on all ranks.
        tokenizer: The tokenizer to save with the model, or None.
        plan: The assignment of training windows to steps and ranks; None without training.
        padding: The value of --padding that the model needs; None if it supports the given value.
        evaluates: Whether the run evaluates and has validation data.
        dev_share: The fraction of the validation data that --fast_dev_run evaluates.
        forward_flops: FLOP of the model's forward pass; None if unknown.
        lora: peft's wrapper of `model` until the adapters are merged; None without --lora_rank.
        adapter_files: peft's files of the trained adapters, by name; empty until the adapters are merged.
    """

    unit: ClassVar[str] = "windows"
    trained_as: ClassVar[str | None] = None
    metrics: Mapping[str, Literal["max", "min"]] = {"eval_loss": "min"}
    model: nn.Module
    tokenizer: Any = None
    plan: BatchPlan | None = None
    padding: str | None = None
    evaluates: bool = False
    dev_share: float = 1.0
    forward_flops: ForwardFlops | None = None
    lora: Any = None
    adapter_files: Mapping[str, bytes] = {}

    @abstractmethod
    def __init__(self, config: Config, world: World) -> None: ...

    @abstractmethod
    def batch(self, ids: Ids) -> MicroBatch:
        """Make a micro-batch of the training windows `ids` on this rank's device. Runs in a background thread.

        The batch must depend on `ids` only, or a resumed run differs. For random numbers, use a generator seeded by the
        ids, since the global generators' state in a checkpoint depends on which batches were prefetched.
        """

    @abstractmethod
    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        """Compute the loss of each window of a batch. `model`: the model as wrapped by the strategy."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> EvaluationResult:
        """Evaluate the model on the validation data, and restore its training mode. A collective."""

    @abstractmethod
    def fingerprint(self) -> dict[str, object]:
        """Return facts, besides the settings, that must be equal on all ranks, such as a hash of the data."""

    def facts(self) -> dict[str, object]:
        """Return further entries for train_results.json; none by default. Called on rank 0."""
        return {}

    @abstractmethod
    def identity(self) -> dict[str, object]:
        """Return facts, besides settings and model shape, that must not change on resume, such as the data's hash."""

    def window_names(self, ids: Ids) -> list[str]:
        """Return names for messages, by which a user can find the training windows `ids`; by default, their numbers."""
        return [f"number {id_}" for id_ in ids.tolist()]

    def flops(self, lengths: Lengths, micro_batches: int) -> float | None:
        """Return the FLOP of training on windows of these lengths, without padding; None if unknown."""
        return self.forward_flops.training(lengths, micro_batches) if self.forward_flops else None

    def compile(self, model: nn.Module, mode: str | None) -> None:
        """Compile `model` in place, for --torch_compile. `mode`: value of --torch_compile_mode."""
        model.compile(dynamic=True, mode=mode)

    def save_description(self, folder: Path) -> None:
        """Write the configuration and tokenizer, which transformers needs to load weights from `folder`."""
        if isinstance(self.model, PreTrainedModel):
            self.model.config.save_pretrained(folder)
        self._save_tokenizer(folder)

    def save(self, folder: Path) -> None:
        """Write the trained model, its adapters and its tokenizer into an empty folder.

        `from_pretrained` loads a transformers model. Other models are saved as weights for `load_state_dict`.
        """
        for name, content in self.adapter_files.items():
            (folder / "adapter").mkdir(exist_ok=True)
            (folder / "adapter" / name).write_bytes(content)
        if isinstance(self.model, PreTrainedModel):
            self.model.save_pretrained(folder)
        else:
            # Under DeepSpeed, weights are views of one tensor, which safetensors refuses.
            weights = {name: value.clone().contiguous() for name, value in self.model.state_dict().items()}
            safetensors.torch.save_file(weights, folder / "model.safetensors")
        self._save_tokenizer(folder)

    def add_adapters(self, config: Config) -> None:
        """When training with --lora_rank, freeze the encoder and add adapters to it. Raises UserError if that fails."""
        if self.plan and config.model.lora_rank:
            self.lora = add_adapters(self.model, config.model, config.train.seed)
            self.forward_flops = self.forward_flops and forward_flops(self.model)

    def merge_adapters(self) -> None:
        """Add the trained adapters, if any, to the model's weights, and set `adapter_files`."""
        if self.lora:
            self.adapter_files, self.lora = merge(self.lora), None

    def _save_tokenizer(self, folder: Path) -> None:
        """Save the tokenizer, if any. Its `model_input_names` list token types only if the model takes them."""
        if self.tokenizer is None:
            return
        types, inputs = "token_type_ids", self.tokenizer.model_input_names
        takes = getattr(self.model, "takes_token_types", types in inputs)
        if takes != (types in inputs):
            names = [*inputs, types] if takes else [name for name in inputs if name != types]
            # save_pretrained writes only names that are in init_kwargs.
            self.tokenizer.model_input_names = self.tokenizer.init_kwargs["model_input_names"] = names
        self.tokenizer.save_pretrained(folder, save_jinja_files=False)  # it could overwrite a user's template


def task_name(task: type[Task]) -> str:
    """Return the value of --task for commands that use the trained model, even if a script defines `task`."""
    script = task.__module__ == "__main__" and getattr(sys.modules["__main__"], "__file__", None)
    return task.trained_as or f"{Path(script).stem if script else task.__module__}:{task.__qualname__}"


def task_class(name: str, custom: type[Task] | None = None) -> type[Task]:
    """Import the class that --task names. Raises UserError if that fails or it is not a complete subclass of Task.

    `custom`: the class, if a program passes it directly. Then it is only checked.
    """
    try:
        found = custom or resolve_name(QUESTION_ANSWERING_CLASS if name == QUESTION_ANSWERING else name)
    except (Exception, SystemExit) as error:
        # Question answering is part of the package, so a failure needs a traceback. A UserError has its own message.
        if name == QUESTION_ANSWERING or isinstance(error, UserError):
            raise
        raise UserError(
            f"--task {name}: cannot be imported ({type(error).__name__}: {error}). {_import_remedy(name, error)}"
        ) from None
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise UserError(f"--task {name}: no subclass of Task. Name a class that is one.")
    if isabstract(found):
        raise UserError(
            f"--task {name}: it lacks the methods {', '.join(sorted(found.__abstractmethods__))}. Add them."
        )
    return found


def _import_remedy(name: str, error: BaseException) -> str:
    """Return what to do if the class that --task names cannot be imported."""
    module = name.partition(":")[0]
    missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    is_module = all(map(str.isidentifier, module.split(".")))
    if not is_module or (missing and f"{module}.".startswith(f"{missing}.")):
        folder = "Run in the folder of the module, or add that folder to PYTHONPATH."
        return f"Give MODULE:CLASS, such as digits:Digits. {folder}"
    package = missing.partition(".")[0]
    if package and package != module.partition(".")[0]:
        return (
            f"{module} needs {package}: install it for {sys.executable} with `pip install {package}` (pip's name for it"
            " may differ) or, if it is a module of your own, add its folder to PYTHONPATH."
        )
    if module in sys.modules:
        return f"Name a class of {module}."
    return f"Fix the module; `python -c 'import {module}'` shows the line."


def load_task(config: Config, world: World, custom: type[Task] | None = None) -> Task:
    """Create and check the task that --task names, with its model and data, without collectives. Raises UserError.

    `custom`: see `task_class`.
    """
    name, metric = config.data.task, config.checkpoint.metric_for_best_model
    task = task_class(name, custom)(config, world)
    task.add_adapters(config)
    if task.plan and not any(parameter.requires_grad for parameter in task.model.parameters()):
        raise UserError(f"--task {name}: all parameters of its model are frozen. Set requires_grad on those to train.")
    for key, best in task.metrics.items():
        if best not in ("max", "min"):
            raise UserError(f'--task {name}: `metrics`: {key!r} must be "max" or "min", not {best!r}.')
    if metric not in (None, *task.metrics):
        raise UserError(
            f"--metric_for_best_model {metric}: --task {name} does not give it. Choose one of"
            f" {', '.join(task.metrics)}."
        )
    return task


def make_plan(lengths: Lengths, args: TrainArguments, crossover: int, world: World, mixture: Mixture = ()) -> BatchPlan:
    """Make the batch plan from the settings. Raises UserError if they do not fit the data or the ranks.

    --global_batch need not be a multiple of the world size: the ranks' window counts may then differ by one.
    """
    if not len(lengths):
        raise UserError("The training data have no examples. Give data with examples.")
    accumulation = args.gradient_accumulation_steps
    if accumulation > len(lengths):
        raise UserError(
            f"--gradient_accumulation_steps {accumulation}: a step would have more micro-batches than the"
            f" {len(lengths)} windows of the training data. Use a smaller number or more data."
        )
    rank_batch = args.per_device_train_batch_size * world.devices or 1  # 0 (auto): training/batch_size.py sets it later
    global_batch = rank_batch * accumulation * world.size
    plan = BatchPlan(lengths, global_batch, accumulation, world.size, args.seed, crossover, mixture)
    if args.global_batch == -1:
        return plan
    devices = world.size * world.devices
    if args.global_batch < devices:
        raise UserError(
            f"--global_batch {args.global_batch}: fewer windows than the {devices} devices. Use fewer ranks."
        )
    plan = plan.with_global_batch(args.global_batch)
    if args.per_device_train_batch_size != AUTO and accumulation not in (1, plan.accumulation):
        raise UserError(
            f"--gradient_accumulation_steps {accumulation}: --global_batch {args.global_batch} takes"
            f" {plan.accumulation} micro-batch(es) of at most {rank_batch} windows on each of {world.size} rank(s)."
            " Omit the flag, or change --per_device_train_batch_size."
        )
    return plan


def weight_copies(trains: bool, strategy: str, world: World) -> int:
    """Return how many arrays of the weights' size must fit into this host's free memory per rank."""
    if world.process.generation > 0:
        return 0  # the memory of its previous world, which it reuses, does not count as free
    whole = not STRATEGIES[strategy].shards
    return 4 if whole and trains and world.device.type == "cpu" else 1  # weights, gradients and AdamW's two moments
