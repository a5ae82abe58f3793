"""Settings of the training loop, of evaluation during training, and of the output folder."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from functools import partial

from hvd_bert.config.flag import LARGEST_FACTOR, flag, require
from hvd_bert.config.parser import AUTO, LARGEST, name_or_path, shortened

# transformers' learning-rate schedules that take no further arguments and do not depend on the loss.
SCHEDULES = [
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
]

REDUCE_OVERHEAD = "reduce-overhead"  # the mode of torch.compile that captures CUDA graphs
# Name in --report_to, also the package's name -> MODULE:CLASS of the reporter, and its files in the output folder.
REPORTERS = {
    "tensorboard": ("hvd_bert.output.reporters.tensorboard:TensorBoard", ["tb"]),
    "wandb": ("hvd_bert.output.reporters.wandb:Wandb", ["wandb", "tracking.json"]),
}


def _reporters(names: str) -> list[str]:
    return [] if names == "none" else list(dict.fromkeys(names.split(",")))


def _known_reporters(text: str) -> str:
    if not REPORTERS.keys() >= {*_reporters(text)}:
        known = f"must be none, or names of {', '.join(REPORTERS)} with commas between them"
        raise argparse.ArgumentTypeError(f"{shortened(repr(text))} {known}")
    return text


_training = partial(flag, "training")
_evaluation = partial(flag, "evaluation", may_change_on_resume=True)
_output = partial(flag, "output", may_change_on_resume=True)


@dataclass(frozen=True)
class TrainArguments:
    output_dir: str | None = _output(
        None,
        "Folder for all output files.",
        default_text="a new folder runs/DATE-TIME",
        metavar="FOLDER",
        parse=name_or_path,
    )
    overwrite_output_dir: bool = _output(
        False, "Delete the earlier run's files in --output_dir and train from the start.", chooses_start=True
    )
    do_train: bool = _training(True, "Train.", negated_help="Do not train; only evaluate.")
    fast_dev_run: bool = _output(
        False,
        "Print the time, memory and disk space of the whole run, from two steps, an evaluation and a checkpoint.",
    )
    do_eval: bool = _evaluation(
        True, "Evaluate on the validation data, if there are any.", negated_help="Do not evaluate."
    )
    per_device_train_batch_size: int = _training(
        8,
        "Windows per rank in one forward pass (per GPU with --strategy dp); auto: as many as fit into memory.",
        may_change_on_resume=True,
        minimum=1,
        auto=True,
    )
    per_device_eval_batch_size: int = _evaluation(
        8, "Windows per rank in one forward pass of an evaluation.", minimum=1
    )
    gradient_accumulation_steps: int = _training(
        1, "Micro-batches (forward and backward passes) per rank and step.", may_change_on_resume=True, minimum=1
    )
    global_batch: int = _training(
        -1,
        "Windows per step over all ranks, in as many micro-batches as --per_device_train_batch_size needs.",
        default_text="--per_device_train_batch_size x --gradient_accumulation_steps x devices",
        may_change_on_resume=True,
        minimum=1,
    )
    optim: str = _training(
        "adamw_torch_fused",
        "Optimizer. LAMB and LARS, for large global batches, come from the package pytorch_optimizer.",
        choices=("adamw_torch_fused", "lamb", "lars"),
    )
    learning_rate: float = _training(
        5e-5, "Peak learning rate, on any number of devices.", above=0, maximum=LARGEST_FACTOR
    )
    layerwise_lr_decay: float = _training(
        1.0,
        "Factor of the learning rate from each layer to the one below; the head has the full rate.",
        above=0,
        maximum=1,
    )
    ema_decay: float = _training(
        0.0,
        "Evaluate and save an exponential moving average of the weights, with this decay per step; 0: none.",
        minimum=0,
        below=1,
    )
    weight_decay: float = _training(
        0.0, "Weight decay; biases and layer norms have none.", minimum=0, maximum=LARGEST_FACTOR
    )
    adam_beta1: float = _training(0.9, "AdamW's and LAMB's beta1, LARS's momentum.", minimum=0, below=1)
    adam_beta2: float = _training(0.999, "AdamW's and LAMB's beta2.", minimum=0, below=1)
    adam_epsilon: float = _training(1e-8, "AdamW's and LAMB's epsilon.", above=0, maximum=LARGEST_FACTOR)
    max_grad_norm: float = _training(
        1.0, "Clip the averaged gradient to this norm; 0: do not clip.", minimum=0, maximum=LARGEST_FACTOR
    )
    num_train_epochs: float = _training(3.0, "Number of epochs.", above=0, maximum=1_000_000)
    max_steps: int = _training(
        -1,
        "Total number of optimizer steps; overrides --num_train_epochs.",
        default_text="given by --num_train_epochs",
        minimum=1,
    )
    lr_scheduler_type: str = _training(
        "linear", f"Learning-rate schedule: {', '.join(SCHEDULES)}.", choices=tuple(SCHEDULES), metavar="NAME"
    )
    # The default is that of BERT's original run_squad; run_qa's default is 0.
    warmup_ratio: float = _training(
        0.1, "Share of the steps in which the learning rate rises from 0.", minimum=0, below=1
    )
    warmup_steps: float = _training(
        0,
        "Number of warm-up steps, or their share if below 1; overrides --warmup_ratio.",
        default_text="given by --warmup_ratio",
        minimum=0,
        maximum=LARGEST_FACTOR,
    )
    lr_scaling: str = _training(
        "none",
        "How the learning rate grows with the global batch relative to --lr_base_batch_size.",
        choices=("none", "sqrt", "linear"),
    )
    lr_base_batch_size: int | None = _training(
        None,
        "Windows per step that --learning_rate is meant for, for --lr_scaling.",
        default_text="--global_batch, else the windows per step of one device",
        minimum=1,
    )
    lr_scaling_limit: float = _training(
        4.0, "Maximum factor by which --lr_scaling raises the learning rate.", minimum=1
    )
    logging_steps: int = _output(
        10, "Steps between two lines of metrics.jsonl; the first and the last step are always logged.", minimum=1
    )
    report_to: str = _output(
        "tensorboard",
        "Trackers of metrics, settings and sample answers: tensorboard and wandb, or none.",
        metavar="NAME,...",
        parse=_known_reporters,
    )
    eval_strategy: str = _evaluation(
        "epoch",
        "When to evaluate during training; the final model is always evaluated unless --no_do_eval is given.",
        choices=("no", "steps", "epoch"),
    )
    eval_steps: int | None = _evaluation(
        None,
        "Steps between two evaluations; implies --eval_strategy steps, except with --eval_strategy no.",
        default_text="the value of --logging_steps",
        replaces=("eval_strategy",),
        minimum=1,
    )
    seed: int = _training(42, "Seed of new weights, batch order and dropout.", minimum=0, maximum=LARGEST)
    bf16: bool = _training(False, "Forward pass in bfloat16 autocast; weights and gradients stay in fp32.")
    fp16: bool = _training(False, "Forward pass in fp16 autocast with loss scaling.")
    gradient_checkpointing: bool = _training(
        False,
        "Compute each layer again in the backward pass instead of keeping its activations: less memory, slower.",
        may_change_on_resume=True,
    )
    deterministic: bool = _training(
        False, "Make runs reproducible bit for bit, also on GPUs and on 3 or more ranks; slower."
    )
    torch_compile: bool = _training(False, "Compile the model's layers with torch.compile; slower on CPUs.")
    torch_compile_mode: str | None = _training(
        None,
        "torch.compile's mode; implies --torch_compile. reduce-overhead captures CUDA graphs for few sizes of batches.",
        default_text="no --torch_compile, else default",
        choices=("default", REDUCE_OVERHEAD),
    )
    cpu_kernels: str = _training(
        "auto",
        "On CPUs, use the fastest kernels for the CPU model (auto), or only torch's own (torch).",
        choices=("auto", "torch"),
        may_change_on_resume=True,
    )
    tf32: bool = _training(False, "Use TF32 for fp32 matrix products on A100 and later GPUs: faster, less exact.")

    def __post_init__(self) -> None:
        require(not (self.bf16 and self.fp16), "--bf16 and --fp16 are both given: choose one.")

    def refuse_auto(self, command: str) -> None:
        """Raise UserError if the per-device batch size is auto. `command`: the command or flag that needs a number."""
        known = self.per_device_train_batch_size != AUTO
        require(known, f"--per_device_train_batch_size auto does not work with {command}. Give a number.")

    @property
    def captures_graphs(self) -> bool:
        """Whether torch.compile's mode is the one that captures CUDA graphs. On CPUs, it captures none."""
        return self.torch_compile_mode == REDUCE_OVERHEAD

    @property
    def rank_batch(self) -> int:
        """Number of windows per device and step, unless --global_batch is given."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    def windows_per_step(self, devices: int) -> int:
        """Return the global batch, in windows, for `devices` GPUs (or processes on CPUs)."""
        return self.global_batch if self.global_batch > 0 else devices * self.rank_batch

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the number of optimizer steps of the whole training, including steps before a resume."""
        return self.max_steps if self.max_steps > 0 else math.ceil(self.num_train_epochs * steps_per_epoch)

    @property
    def reporters(self) -> list[str]:
        """The names in --report_to without duplicates; empty for none."""
        return _reporters(self.report_to)

    @property
    def precision(self) -> str:
        """The precision of the forward pass: "fp32", "bf16" or "fp16"."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"
