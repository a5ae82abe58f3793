"""Settings of checkpoints: when they are written, and from which one a run resumes."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_bert.config.flag import flag, require


@dataclass
class CheckpointArguments:
    save_steps: int = flag(
        "checkpoints",
        500,
        "Write a checkpoint every N steps and at the end; 0: only when a signal stops the run.",
        may_change_on_resume=True,
    )
    save_total_limit: int = flag(
        "checkpoints",
        2,
        "Number of newest checkpoints to keep; --load_best_model_at_end keeps the best one in addition.",
        may_change_on_resume=True,
    )
    save_only_model: bool = flag(
        "checkpoints",
        False,
        "Save only the model, a third of the size; it cannot be resumed. A stop by a signal still saves everything.",
        may_change_on_resume=True,
    )
    resume_from_checkpoint: str | None = flag(
        "checkpoints",
        None,
        "Resume from this checkpoint folder, or from the newest in --output_dir (latest).",
        default_text="the newest in --output_dir if the run there is unfinished",
        metavar="FOLDER|latest",
        may_change_on_resume=True,
        chooses_start=True,
        sweep_hint="an interrupted point is trained again from the start",
        tune_hint="each run is short and starts from scratch",
    )
    load_best_model_at_end: bool = flag(
        "checkpoints",
        False,
        "Keep the model of the best evaluation instead of the last one.",
        may_change_on_resume=True,
    )
    metric_for_best_model: str | None = flag(
        "checkpoints",
        None,
        "Metric that decides which model is best, for example f1, exact_match, accuracy or eval_loss.",
        default_text="f1; with --task text-classification accuracy",
    )
    early_stopping_patience: int | None = flag(
        "checkpoints",
        None,
        "Stop after N evaluations in a row without an improvement.",
        default_text="never",
        may_change_on_resume=True,
    )

    elastic: bool = flag(
        "distributed",
        False,
        "Horovod elastic: continue when hosts are lost or added (needs its elastic launcher).",
        may_change_on_resume=True,
        sweep_hint="the ranks of a point must not change",
        tune_hint="the ranks must not change",
    )

    def __post_init__(self) -> None:
        require(self.save_steps >= 0, f"--save_steps {self.save_steps}: must not be negative.")
        require(self.save_total_limit >= 1, f"--save_total_limit {self.save_total_limit}: must be at least 1.")
        patience = self.early_stopping_patience
        require(patience is None or patience >= 1, f"--early_stopping_patience {patience}: must be at least 1.")
        both = self.load_best_model_at_end and self.save_steps == 0
        require(not both, "--load_best_model_at_end needs checkpoints: --save_steps must not be 0.")
