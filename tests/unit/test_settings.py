"""The settings: properties of the flags, the number of steps, and which steps are evaluated and logged."""

from __future__ import annotations

from tables import each

from hvd_bert.config.command_line import parse
from hvd_bert.config.settings import FLAGS, STRATEGIES
from hvd_bert.tools.bench.points import SET_BY_SWEEP
from hvd_bert.tools.tune.__main__ import SET_BY_TUNE

# A resumed run must have the same values as its checkpoint.
FIXED_ON_RESUME = {
    *("dropout", "version_2_with_negative", "max_seq_length", "padding", "pad_to_max_length", "doc_stride"),
    *("max_train_samples", "do_train", "learning_rate", "lr_base_batch_size", "weight_decay", "adam_beta1"),
    *("adam_beta2", "adam_epsilon", "max_grad_norm", "num_train_epochs", "max_steps", "lr_scheduler_type"),
    *("warmup_ratio", "warmup_steps", "lr_scaling", "lr_scaling_limit", "seed", "bf16", "fp16", "deterministic"),
    *("question_column", "context_column", "answer_column", "bad_examples"),
    *("task_name", "text_column_names", "text_column_delimiter", "label_column_name", "do_regression"),
    *("task", "torch_compile", "tf32", "metric_for_best_model", "fp16_allreduce", "gradient_predivide_factor"),
}


@each("name", FLAGS)
def test_properties_of_a_flag(name):
    flag = FLAGS[name]
    assert flag.help.endswith(".") and "\n" not in flag.help and len(flag.help) <= 120
    assert flag.default is not None or flag.default_text, "--help must not show None"
    assert bool(flag.negated_help) == (flag.default is True)
    assert flag.owner in ("", *STRATEGIES)
    assert set(flag.replaces) <= FLAGS.keys() - {name}


def test_flags_that_may_change_on_resume():
    assert {name for name, flag in FLAGS.items() if not flag.may_change_on_resume} == FIXED_ON_RESUME


def test_flags_that_choose_where_a_run_starts_and_flags_of_one_strategy():
    starts = {name for name, flag in FLAGS.items() if flag.chooses_start}
    assert starts == {"overwrite_output_dir", "resume_from_checkpoint"}
    owned = {(flag.owner, name) for name, flag in FLAGS.items() if flag.owner}
    of_horovod = ("fp16_allreduce", "gradient_predivide_factor", "num_groups")
    assert owned == {("deepspeed", "zero_stage"), *(("horovod", name) for name in of_horovod)}


def test_flags_that_a_sweep_or_tuning_sets():
    assert SET_BY_SWEEP.keys() == SET_BY_TUNE.keys() == {
        *("strategy", "output_dir", "overwrite_output_dir", "max_steps", "num_train_epochs", "resume_from_checkpoint"),
        *("elastic", "profile", "timeline", "timeline_file", "do_train", "no_do_train"),
    }  # fmt: skip
    assert SET_BY_SWEEP["strategy"] == "name them with --strategies"
    assert SET_BY_TUNE["strategy"] == "only Horovod is tuned"
    assert SET_BY_TUNE["max_steps"] == SET_BY_SWEEP["max_steps"] == "give --steps"


@each(
    ("flags", "steps"),
    [([], 30), (["--num_train_epochs", "1.45"], 15), (["--max_steps", "7"], 7), (["--num_train_epochs", "0.01"], 1)],
)
def test_total_steps(flags, steps):
    assert parse(flags).train.total_steps(steps_per_epoch=10) == steps


@each(
    ("flags", "expected"),
    [
        ([], [10, 20]),
        (["--eval_strategy", "no"], []),
        (["--eval_steps", "12"], [12, 24]),
        (["--eval_steps", "12", "--eval_strategy", "no"], []),  # as in run_qa
        (["--eval_steps", "12", "--config", "sample_v2"], [12, 24]),  # a preset with --eval_strategy no
        (["--eval_strategy", "steps", "--logging_steps", "15"], [15]),
        (["--eval_steps", "30"], []),  # the final model is always evaluated
    ],
)
def test_steps_that_are_evaluated(flags, expected):
    train = parse(flags).train
    assert [step for step in range(1, 31) if train.evaluates_after(step, 10, 30)] == expected


def test_steps_that_are_logged():
    train = parse(["--logging_steps", "4"]).train
    assert [step for step in range(1, 11) if train.logs_after_step(step, 10)] == [1, 4, 8, 10]
