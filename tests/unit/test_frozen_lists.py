"""The names of all flags and modules. A commit that adds a name must extend these lists and give the reason."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from test_settings import TOOLS

from hvd_bert.config.settings import FLAGS, PACKAGE

# The trainer's flags whose values a resumed run must share with its checkpoint.
FIXED_ON_RESUME = """
dropout attention_dropout version_2_with_negative max_seq_length padding pad_to_max_length doc_stride max_train_samples
do_train learning_rate lr_base_batch_size weight_decay layerwise_lr_decay ema_decay lora_rank lora_alpha adam_beta1
adam_beta2 adam_epsilon max_grad_norm num_train_epochs max_steps lr_scheduler_type warmup_ratio warmup_steps lr_scaling
lr_scaling_limit seed bf16 fp16 deterministic question_column context_column answer_column bad_examples answer_language
task optim torch_compile torch_compile_mode tf32 metric_for_best_model fp16_allreduce bf16_allreduce
"""
MAY_CHANGE_ON_RESUME = """
model_name_or_path config_name tokenizer_name cache_dir model_revision dataset_name dataset_config_name train_file
validation_file n_best_size max_answer_length null_score_diff_threshold max_eval_samples output_dir overwrite_output_dir
do_eval per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps global_batch logging_steps
report_to eval_strategy eval_steps gradient_checkpointing cpu_kernels save_steps save_total_limit save_only_model
resume_from_checkpoint load_best_model_at_end early_stopping_patience requeue elastic strategy zero_stage num_groups
num_threads timeline timeline_steps profile peak_tflops fast_dev_run
"""
# Flags and positional arguments per command, except the trainer.
OTHERS = {
    "hvd-bert bench": "model steps repeats json overwrite",
    "hvd-bert bench sweep": """
        strategies ranks repeats seeds steps epochs scaling global_batch out launcher H launcher_flag timeout
        requeue report overwrite
    """,
    "hvd-bert doctor": "json verbose size output_dir hosts hostfile ssh_port ssh_identity_file slots timeout prove log",
    "hvd-bert evaluate": "model compare mistakes json keep_threshold overwrite",
    "hvd-bert predict": """
        model context question input output overwrite overwrite_columns n_best question_column context_column
        answer_column cpu_kernels per_device_eval_batch_size max_seq_length doc_stride n_best_size max_answer_length
        null_score_diff_threshold bf16 version_2_with_negative
    """,
    "hvd-bert report": "runs out overwrite baseline",
    "hvd-bert timeline": "file json html overwrite ranks",
    "hvd-bert tune": "range trials pruner ranks minutes out launcher H launcher_flag timeout",
}
# Modules per folder in hvd_bert.
MODULES = {
    ".": "__main__ errors hub machine startup streams train version",
    "checkpoint": "files resume schedule",
    "config": "arguments command_line data data_files flag other_names parser settings strategies training",
    "data": "batch_plan cache collate counts window_cutting window_table",
    "data/sources": "entries files questions squad",
    "distributed": """
        devices events horovod_rendezvous horovod_world interfaces launch launchers logs mpi rendezvous
        runner signals slurm torch_world watchdog world
    """,
    "evaluation": "evaluator forward postprocess samples squad_metric",
    "model": "attention bert families flops layers loading lora precision unlisted",
    "model/cpu": "attention fused kernels linear malloc",
    "monitoring": "peaks recording usage",
    "output": "callback card metrics_log output_dir run_folder",
    "output/reporters": "base tensorboard wandb",
    "predict": "__main__ answerer answering reading rows writing",
    "storage": "locks reading writing",
    "strategies": "base ddp deepspeed dp fsdp horovod word_rows",
    "tasks": "base dataset encoder question_answering rows tokenizer trained",
    "tools/bench": "__main__ host_time points speed sweep",
    "tools/doctor": "__main__ checks collective diagnosis hosts launch_line lines probes prove ranks",
    "tools/evaluate": "__main__ evaluation_page paired running slices",
    "tools/rendering": "charts figures page report_files",
    "tools/report": "__main__ comparability comparison curves plots run_page runs_page setup tables",
    "tools/runs": "failure finding launching one_run out_folder record tolerant trainer_flags",
    "tools/timeline": "__main__ events findings operations summary",
    "tools/tune": "__main__ search",
    "training": """
        api batch_size breakdown disk_space elastic evaluations fast_dev_run health loop meter optim saving start
        state
    """,
}


def check(found: Iterable[str], listed: str) -> None:
    new, gone = set(found) - set(listed.split()), set(listed.split()) - set(found)
    remedy = "Remove an old name, or give the reason in the commit; then change this file's list."
    assert not new | gone, f"new: {', '.join(sorted(new))}; gone: {', '.join(sorted(gone))}. {remedy}"


def test_flags_of_the_trainer():
    check(FLAGS, FIXED_ON_RESUME + MAY_CHANGE_ON_RESUME)
    check([name for name, flag in FLAGS.items() if not flag.may_change_on_resume], FIXED_ON_RESUME)


@pytest.mark.parametrize("parser", [tool.make_parser() for tool in TOOLS], ids=lambda parser: parser.prog)
def test_flags_of_a_command(parser):
    check([action.dest for action in parser._actions if action.dest != "help"], OTHERS[parser.prog])


def test_modules():
    found = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    listed = [f"{folder}/{name}" for folder, names in MODULES.items() for name in names.split()]
    check([f"{path.parent}/{path.stem}" for path in found], " ".join(listed))


def test_modules_of_the_tools_have_unique_names():
    names = [name for folder, listed in MODULES.items() if folder.startswith("tools/") for name in listed.split()]
    assert [name for name in names if names.count(name) > 1 and name != "__main__"] == []
