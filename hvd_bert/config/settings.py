"""Settings: dataclasses that become the command line (`command_line.py`) and the record kept beside the model."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from hvd_bert.errors import UserError

PACKAGE = Path(__file__).resolve().parents[1]
DEFAULT_MODEL = "bert-base-uncased"
DEFAULT_DATASET = "squad"

# Those of transformers that need neither further arguments nor the loss at each step.
SCHEDULES = [
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
]


# How the ranks train together (hvd_bert.strategies.table); none: one process.
STRATEGIES = ["horovod", "ddp", "fsdp", "deepspeed", "dp", "none"]
# Flags that belong to one strategy -> that strategy.
OWNERS = {
    "zero_stage": "deepspeed",
    **dict.fromkeys(("fp16_allreduce", "gradient_predivide_factor", "num_groups"), "horovod"),
}


def _arg(default: Any, description: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": description, **extra})


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@dataclass
class ModelArguments:
    model_name_or_path: str | None = _arg(
        None,
        f"Pretrained BERT: a folder or a hub name. Default {DEFAULT_MODEL}; with --config_name alone: from scratch.",
    )
    config_name: str | None = _arg(None, "Model configuration (folder or hub name) if it is not the model's own.")
    tokenizer_name: str | None = _arg(None, "Tokenizer (folder or hub name) if it is not the model's own.")
    cache_dir: str | None = _arg(None, "Where models and data from the hub are kept.")
    model_revision: str = _arg("main", "Branch, tag or commit of the model on the hub.")
    dropout: float | None = _arg(None, "Dropout probability of hidden states and attention. Default: the model's own.")

    def __post_init__(self) -> None:
        if self.model_name_or_path is None and self.config_name is None:
            self.model_name_or_path = DEFAULT_MODEL
        if self.dropout is not None:
            _require(0.0 <= self.dropout < 1.0, f"--dropout {self.dropout}: give a probability, 0 <= dropout < 1.")

    @property
    def tokenizer(self) -> str:
        """Folder or hub name of the tokenizer: the one named, else the model's."""
        return self.tokenizer_name or self.model_name_or_path or str(self.config_name)


@dataclass
class DataArguments:
    dataset_name: str | None = _arg(
        None, f"Data set on the hub: squad or squad_v2. Default {DEFAULT_DATASET}, if no file is named."
    )
    dataset_config_name: str | None = _arg(None, "Configuration of the data set on the hub.")
    train_file: str | None = _arg(None, "Training questions in SQuAD's JSON.")
    validation_file: str | None = _arg(None, "Questions to score, in SQuAD's JSON.")
    version_2_with_negative: bool = _arg(False, "SQuAD 2.0: some questions have no answer.")
    max_seq_length: int = _arg(384, "Longest window, in tokens, question and special tokens included.")
    padding: str = _arg(
        "none",
        "How windows share a batch: none (end to end, nothing is padded), longest (padded to the longest of the batch)"
        " or max_length (to --max_seq_length). They differ by rounding, by dropout's draws, and in speed.",
        choices=["none", "longest", "max_length"],
    )
    pad_to_max_length: bool = _arg(False, "run_qa's name for --padding max_length.")
    doc_stride: int = _arg(128, "Overlap of neighbouring windows of a long passage, in tokens.")
    n_best_size: int = _arg(20, "How many answers to keep for each question.")
    max_answer_length: int = _arg(30, "Longest answer, in tokens.")
    null_score_diff_threshold: float = _arg(
        0.0, "v2.0: 'no answer' is chosen when its score exceeds the best span's by more than this."
    )
    max_train_samples: int | None = _arg(None, "Train on the first N questions only.")
    max_eval_samples: int | None = _arg(None, "Score the first N questions only.")
    preprocessing_num_workers: int | None = _arg(None, "Threads that tokenise. Default: the cores of this rank.")
    overwrite_cache: bool = _arg(False, "Tokenise again even if the cache has the windows.")

    def __post_init__(self) -> None:
        padding = "max_length" if self.pad_to_max_length else self.padding
        _require(
            self.padding in ("none", padding),
            f"--padding {self.padding} and --pad_to_max_length are both given: choose one.",
        )
        self.padding, self.pad_to_max_length = padding, padding == "max_length"
        files = [name for name in ("train_file", "validation_file") if getattr(self, name)]
        if self.dataset_name and files:
            raise UserError(f"--dataset_name and --{files[0]} are both given: choose one source of questions.")
        if not self.dataset_name and not files:
            self.dataset_name = "squad_v2" if self.version_2_with_negative else DEFAULT_DATASET
        if self.dataset_name == "squad_v2":
            self.version_2_with_negative = True
        for name in ("max_seq_length", "n_best_size", "max_answer_length"):
            _require(getattr(self, name) >= 1, f"--{name} {getattr(self, name)}: must be at least 1.")
        threshold = self.null_score_diff_threshold
        _require(not math.isnan(threshold), f"--null_score_diff_threshold {threshold}: must be a number.")
        _require(self.doc_stride >= 0, f"--doc_stride {self.doc_stride}: must not be negative.")
        for name in ("max_train_samples", "max_eval_samples", "preprocessing_num_workers"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"--{name} {value}: must be at least 1.")

    @property
    def pad_to(self) -> int | None:
        """Tokens of a padded window at least, None where nothing is padded; as `Collator` takes it."""
        return {"none": None, "longest": 0, "max_length": self.max_seq_length}[self.padding]


@dataclass
class TrainArguments:
    output_dir: str | None = _arg(None, "Where everything is left. Default: runs/<date>-<time>.")
    overwrite_output_dir: bool = _arg(False, "Replace an earlier run's files in output_dir.")
    do_train: bool = _arg(True, "Train. With --no_do_train the model is only scored.")
    do_eval: bool = _arg(True, "Score the validation questions.")
    per_device_train_batch_size: int = _arg(8, "Windows of one rank in one forward pass.")
    per_device_eval_batch_size: int = _arg(8, "Windows of one rank in one forward pass when scoring.")
    gradient_accumulation_steps: int = _arg(1, "Forward and backward passes of a rank before one optimizer step.")
    learning_rate: float = _arg(5e-5, "Peak learning rate of AdamW for a global batch of --lr_base_batch_size.")
    lr_base_batch_size: int | None = _arg(
        None, "Windows of an optimizer step that --learning_rate is meant for (default: what one device takes)."
    )
    weight_decay: float = _arg(0.0, "AdamW's decay of weight matrices; biases and layer norms have none.")
    adam_beta1: float = _arg(0.9, "AdamW's beta1.")
    adam_beta2: float = _arg(0.999, "AdamW's beta2.")
    adam_epsilon: float = _arg(1e-8, "AdamW's epsilon.")
    max_grad_norm: float = _arg(1.0, "Clip the averaged gradient to this norm; 0: never.")
    num_train_epochs: float = _arg(3.0, "Passes over the training windows.")
    max_steps: int = _arg(-1, "Optimizer steps in all; overrides num_train_epochs if positive.")
    lr_scheduler_type: str = _arg("linear", "Schedule of the learning rate.", choices=SCHEDULES)
    # As BERT's own run_squad has it; run_qa has none, but does not scale the rate either.
    warmup_ratio: float = _arg(0.1, "Share of the steps in which the learning rate rises from 0.")
    warmup_steps: float = _arg(0, "The same as a number of steps (below 1: a share); overrides warmup_ratio.")
    lr_scaling: str = _arg(
        "linear",
        "How the learning rate grows with the global batch over --lr_base_batch_size, that is by default with the"
        " number of devices: in proportion (linear), as the root (sqrt), or not (none)."
        " --lr_scaling_limit ends it.",
        choices=["none", "sqrt", "linear"],
    )
    lr_scaling_limit: float = _arg(4.0, "The most that lr_scaling multiplies the learning rate by.")
    logging_steps: int = _arg(10, "Steps between two lines of metrics.jsonl.")
    eval_strategy: str = _arg(
        "epoch",
        "When to score while training: no, steps or epoch. The end is always scored.",
        choices=["no", "steps", "epoch"],
    )
    eval_steps: int | None = _arg(
        None, "Steps between two scorings (default: logging_steps); implies --eval_strategy steps."
    )
    seed: int = _arg(42, "Seed of weights, batch order and dropout.")
    bf16: bool = _arg(False, "Forward pass in bfloat16 autocast; weights and gradients stay fp32.")
    fp16: bool = _arg(False, "Forward pass in fp16 autocast with loss scaling.")
    deterministic: bool = _arg(
        False, "Equal to the bit from run to run, also on GPUs and with three ranks or more; slower."
    )
    torch_compile: bool = _arg(False, "Compile the layers that are trained; meant for GPUs, on CPUs it is slower.")
    tf32: bool = _arg(False, "fp32 matrix products in TF32 on GPUs that have it (A100 and later): faster, less exact.")

    def __post_init__(self) -> None:
        positive = (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "logging_steps",
        )
        for name in positive:
            _require(getattr(self, name) >= 1, f"--{name} {getattr(self, name)}: must be at least 1.")
        for name in ("eval_steps", "lr_base_batch_size"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"--{name} {value}: must be at least 1.")
        if self.eval_steps is not None:
            self.eval_strategy = "steps"
        _require(self.lr_scaling_limit >= 1, f"--lr_scaling_limit {self.lr_scaling_limit:g}: must be at least 1.")
        finite_positive = ("learning_rate", "adam_epsilon", "num_train_epochs")
        for name in finite_positive:
            value = getattr(self, name)
            _require(math.isfinite(value) and value > 0, f"--{name} {value}: must be a positive number.")
        for name in ("weight_decay", "max_grad_norm", "warmup_steps", "seed"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value >= 0, f"--{name} {value}: must not be negative.")
        for name in ("adam_beta1", "adam_beta2", "warmup_ratio"):
            _require(0 <= getattr(self, name) < 1, f"--{name} {getattr(self, name)}: must be in [0, 1).")
        _require(self.seed < 2**32, f"--seed {self.seed}: must be below 2^32.")
        _require(self.max_steps != 0, "--max_steps 0: give a positive number of steps, or leave it out.")
        _require(not (self.bf16 and self.fp16), "--bf16 and --fp16 are both given: choose one.")

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole training."""
        return self.max_steps if self.max_steps > 0 else math.ceil(self.num_train_epochs * steps_per_epoch)

    def evaluates_after(self, step: int, steps_per_epoch: int, total_steps: int) -> bool:
        """Whether to score after optimizer step `step` (1, 2, ...) before the last; what is left is scored anyway."""
        every = {"no": total_steps, "epoch": steps_per_epoch, "steps": self.eval_steps or self.logging_steps}[
            self.eval_strategy
        ]
        return step % every == 0 and step < total_steps

    def logs_after(self, step: int, total_steps: int) -> bool:
        """Whether metrics are logged after optimizer step `step`: the first and the last always are."""
        return step % self.logging_steps == 0 or step in (1, total_steps)

    @property
    def folder(self) -> Path:
        """output_dir as a path, once it is settled."""
        assert self.output_dir is not None
        return Path(self.output_dir)

    @property
    def precision(self) -> str:
        """Of the forward pass: "fp32", "bf16" or "fp16"."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"


@dataclass
class CheckpointArguments:
    save_steps: int = _arg(500, "Steps between two checkpoints, one more at the end; 0: only at a stop by a signal.")
    save_total_limit: int = _arg(2, "Checkpoints to keep, the newest; the best model's is kept beside them.")
    save_only_model: bool = _arg(False, "Checkpoints without what is needed to go on from them: a third of the size.")
    resume_from_checkpoint: str | None = _arg(
        None,
        "Go on from this checkpoint's folder, or from output_dir's newest (latest). Without the flag an unfinished run"
        " in output_dir is gone on with.",
    )
    load_best_model_at_end: bool = _arg(False, "Leave the model that scored best, and not the last one.")
    metric_for_best_model: str = _arg(
        "f1", "What counts as best: f1, exact_match or eval_loss.", choices=["f1", "exact_match", "eval_loss"]
    )
    early_stopping_patience: int | None = _arg(
        None, "End after this many scorings in a row that were no better than the best."
    )

    elastic: bool = _arg(
        False, "Go on when hosts are lost or come (horovodrun --min-np N --host-discovery-script ...)."
    )

    def __post_init__(self) -> None:
        _require(self.save_steps >= 0, f"--save_steps {self.save_steps}: must not be negative.")
        _require(self.save_total_limit >= 1, f"--save_total_limit {self.save_total_limit}: must be at least 1.")
        patience = self.early_stopping_patience
        _require(patience is None or patience >= 1, f"--early_stopping_patience {patience}: must be at least 1.")
        both = self.load_best_model_at_end and self.save_steps == 0
        _require(not both, "--load_best_model_at_end needs checkpoints: give --save_steps other than 0.")


@dataclass
class ParallelArguments:
    strategy: str = _arg(
        "horovod",
        "How the ranks train together: horovod, torch's ddp or fsdp, deepspeed (ZeRO), dp (one process, several GPUs),"
        " or none (one process, the baseline of a speed-up).",
        choices=STRATEGIES,
    )
    zero_stage: int = _arg(2, "DeepSpeed: what the ranks share out: optimizer (1), gradients too (2), weights too (3).")
    fp16_allreduce: bool = _arg(
        False, "Send gradients as fp16. Half the bytes; steps whose gradients overflow are skipped."
    )
    gradient_predivide_factor: float = _arg(
        1.0,
        "Divide gradients by this before the allreduce and by world size / this after it; the mean stays the same.",
    )
    num_groups: int = _arg(
        0,
        "Send gradients in this many groups, each when all that is in it is ready. 0: each gradient when it is ready.",
    )
    num_threads: int | None = _arg(None, "CPU threads of a rank. Default: OMP_NUM_THREADS, or its share of the cores.")

    def __post_init__(self) -> None:
        _require(self.zero_stage in (1, 2, 3), f"--zero_stage {self.zero_stage}: must be 1, 2 or 3.")
        for f in fields(self):
            others = OWNERS.get(f.name, self.strategy) != self.strategy and getattr(self, f.name) != f.default
            _require(not others, f"--{f.name} is of --strategy {OWNERS.get(f.name)}: not with {self.strategy}.")
        factor = self.gradient_predivide_factor
        _require(
            math.isfinite(factor) and factor > 0,
            f"--gradient_predivide_factor {factor}: must be a positive number.",
        )
        _require(self.num_groups >= 0, f"--num_groups {self.num_groups}: must not be negative.")
        # Horovod leaves the factor out where gradients are grouped: nothing would keep sums small on the wire.
        _require(
            self.num_groups == 0 or factor == 1.0,
            f"--num_groups {self.num_groups}: Horovod groups no gradients with --gradient_predivide_factor.",
        )
        _require(
            self.num_threads is None or self.num_threads >= 1,
            f"--num_threads {self.num_threads}: must be at least 1.",
        )


@dataclass
class ProfilingArguments:
    # horovodrun on Python 3.11 stops at --timeline, wherever it stands, for it begins two flags of its own.
    timeline: str | None = _arg(
        None,
        "Record Horovod's timeline of --timeline_steps into this file, on rank 0's host. After horovodrun:"
        " --timeline_file, for it takes --timeline for its own.",
        aliases=["--timeline_file", "--timeline-file"],
    )
    timeline_steps: str = _arg("11:30", "The first and the last step to record, both included.")
    timeline_mark_cycles: bool = _arg(False, "Mark the cycles of Horovod's thread in the timeline.")
    profile: bool = _arg(
        False, "Record those steps with torch's profiler, too: output_dir/trace.json.gz has all ranks on one clock."
    )
    peak_tflops: float | None = _arg(
        None,
        "What one device can do at most, in TFLOP/s of this training's precision, for the MFU. Default: the vendor's"
        " figure for GPUs that are known, none for CPUs.",
    )

    def __post_init__(self) -> None:
        fits = re.fullmatch(r"[1-9]\d*:[1-9]\d*", self.timeline_steps) and self._steps()
        _require(bool(fits), f"--timeline_steps {self.timeline_steps}: give the first and the last step, as in 11:30.")
        unused = self.timeline_mark_cycles and not (self.timeline or self.profile)
        _require(not unused, "--timeline_mark_cycles: give --timeline_file FILE, too.")
        peak = self.peak_tflops
        _require(
            peak is None or (math.isfinite(peak) and peak > 0), f"--peak_tflops {peak}: must be a positive number."
        )

    def _steps(self) -> range:
        first, last = self.timeline_steps.split(":")
        return range(int(first), int(last) + 1)

    @property
    def steps_to_record(self) -> range:
        """Which steps (1, 2, ...) are to be recorded; empty without --timeline_file and --profile."""
        return self._steps() if self.timeline or self.profile else range(0)


@dataclass
class Config:
    """Everything a run is made of; one dataclass per owner."""

    model: ModelArguments
    data: DataArguments
    train: TrainArguments
    checkpoint: CheckpointArguments
    parallel: ParallelArguments
    profiling: ProfilingArguments

    def __post_init__(self) -> None:
        without_horovod = self.profiling.timeline is not None and self.parallel.strategy != "horovod"
        strategy = self.parallel.strategy
        _require(not without_horovod, f"--timeline_file is Horovod's: not with --strategy {strategy}. Give --profile.")
        fp16_on_zero = self.parallel.strategy == "deepspeed" and self.train.fp16
        _require(not fp16_on_zero, "--fp16: not with --strategy deepspeed here; give --bf16.")
        ordered = self.train.deterministic and self.parallel.num_groups > 1
        _require(not ordered, "--num_groups: --deterministic sends all gradients as one group; leave one of them out.")

    def scores_after(self, step: int, steps_per_epoch: int, total_steps: int) -> bool:
        """Whether to score after optimizer step `step`; the last one counts where the best model is wanted."""
        last = self.checkpoint.load_best_model_at_end and step == total_steps
        return last or self.train.evaluates_after(step, steps_per_epoch, total_steps)

    def as_flat(self) -> dict[str, Any]:
        """All settings under their flag names."""
        return {name: value for part in asdict(self).values() for name, value in part.items()}

    def save(self, path: Path) -> None:
        """Write the resolved settings as YAML that `--config` reads back."""
        path.write_text(yaml.safe_dump(self.as_flat(), sort_keys=False), encoding="utf-8")


SECTIONS: list[Any] = [
    ModelArguments,
    DataArguments,
    TrainArguments,
    CheckpointArguments,
    ParallelArguments,
    ProfilingArguments,
]
FLAGS = {f.name for section in SECTIONS for f in fields(section)}
