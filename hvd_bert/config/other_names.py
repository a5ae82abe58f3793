"""Hints for error messages about unknown flags: the equivalent of another trainer's flag, or a similar flag."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from hvd_bert.config.parser import shortened
from hvd_bert.config.settings import NAMES

# Space-separated flags of run_qa (also of older versions), Lightning, DeepSpeed and common training scripts -> remedy.
_REMEDIES = {
    # model and data
    "model model_name model_path model_type bert_model checkpoint": "use --model_name_or_path",
    "tokenizer": "use --tokenizer_name",
    "token use_auth_token hub_token push_to_hub_token": "run `hf auth login` once, or set HF_TOKEN",
    "data data_file data_path data_dir dataset": "use --train_file FILE, or --dataset_name NAME for data on the hub",
    "train_data train_path train_dataset training_file": "use --train_file",
    "val_file dev_file eval_file val_data dev_data eval_data": "use --validation_file",
    "test_file predict_file": "use --validation_file, or `hvd-bert predict`",
    "max_len max_length max_seq_len seq_len seq_length model_max_length": "use --max_seq_length",
    "stride": "use --doc_stride",
    "version_2 squad_v2 v2": "use --version_2_with_negative",
    "max_samples max_train_examples limit_train_batches": "use --max_train_samples",
    "limit_val_batches max_val_samples": "use --max_eval_samples",
    "do_lower_case": "the model's tokenizer determines it. Leave it out",
    "overwrite_cache": "windows are tokenized again if what they depend on changes. Leave it out",
    "threads": "use --num_threads",
    "preprocessing_num_workers": "tokenization takes all cores of the rank. Leave it out",
    "workers num_workers dataloader_": "a thread prepares the next batches. Leave it out",
    "trust_remote_code": "Python code in a model's folder never runs. Leave it out",
    "attention_probs_dropout_prob": "use --attention_dropout",
    # training
    "lr base_lr max_lr peak_lr": "use --learning_rate",
    "wd": "use --weight_decay",
    "data_seed": "--seed also determines the order of the data. Leave it out",
    "epoch epochs num_epochs max_epochs": "use --num_train_epochs",
    "steps num_steps num_train_steps max_train_steps": "use --max_steps",
    "batch_size bs batch train_batch_size": "use --per_device_train_batch_size N per rank, or --global_batch N for all",
    "micro_batch_size train_micro_batch_size_per_gpu per_gpu_train_batch_size per_device_batch_size": "use"
    " --per_device_train_batch_size",
    "auto_find_batch_size": "use --per_device_train_batch_size auto",
    "accumulate_grad_batches accumulation_steps grad_accum": "use --gradient_accumulation_steps",
    "clip grad_clip gradient_clip_val gradient_clipping": "use --max_grad_norm",
    "warmup warmup_proportion num_warmup_steps": "use --warmup_steps N, or --warmup_ratio X for a share of the steps",
    "scheduler lr_scheduler lr_schedule": "use --lr_scheduler_type",
    "optimizer": "use --optim",
    "precision mixed_precision amp half bfloat16 float16": "use --bf16 or --fp16",
    "compile torchdynamo": "use --torch_compile",
    "activation_checkpointing": "use --gradient_checkpointing",
    "full_determinism": "use --deterministic",
    "version": "run `pip show hvd-bert`",
    "dry_run debug": "use --fast_dev_run to try a run",
    "patience early_stopping": "use --early_stopping_patience",
    # evaluation and output
    "eval_batch_size val_batch_size per_gpu_eval_batch_size predict_batch_size": "use --per_device_eval_batch_size",
    "fp16_full_eval bf16_full_eval": "evaluations use the training's --fp16 or --bf16. Leave it out",
    "evaluation_strategy evaluate_during_training": "use --eval_strategy",
    "val_check_interval eval_interval eval_every": "use --eval_steps",
    "greater_is_better": "--metric_for_best_model determines it. Leave it out",
    "do_predict max_predict_samples": "use `hvd-bert predict`",
    "output output_folder output_path out out_dir save_dir log_dir checkpoint_dir default_root_dir": "use --output_dir",
    "logging_dir": "TensorBoard's files are in --output_dir, in tb. Leave it out",
    "run_name project": "set WANDB_NAME and WANDB_PROJECT, or leave it out",
    "logger wandb tensorboard with_tracking": "use --report_to wandb or --report_to tensorboard",
    "log_every_n_steps log_interval logging_interval logging_strategy": "use --logging_steps",
    "save_strategy checkpointing_steps": "use --save_steps N, or --save_steps 0 for none",
    "resume ckpt ckpt_path": "rerun the same command with the same --output_dir, or use --resume_from_checkpoint",
    "hub_ push_": "upload the output folder with `hf upload` (docs/guides/sharing.md)",
    # ranks
    "gpus n_gpu num_gpus devices nproc_per_node num_processes nodes num_nodes ranks np": "the launcher starts one rank"
    " per GPU, for example: horovodrun -np 2 python -m hvd_bert.train",
    "cpu use_cpu no_cuda": "set CUDA_VISIBLE_DEVICES= to train on CPUs",
    "ddp horovod backend accelerator": "use --strategy, for example: --strategy ddp",
    "fsdp fsdp_ sharded_ddp": "use --strategy fsdp",
    "deepspeed deepspeed_config": "use --strategy deepspeed, with --zero_stage",
    # TrainingArguments of transformers without a counterpart
    "ddp_ accelerator_config average_tokens_across_devices batch_eval_metrics disable_tqdm dispatch_batches"
    " dist_backend dist_url enable_jit_checkpoint eval_accumulation_steps eval_do_concat_batches"
    " eval_use_gather_object fp16_backend fp16_opt_level group_by_length half_precision_backend ignore_data_skip"
    " include_num_input_tokens_seen include_tokens_per_second label_names length_column_name local_rank log_level"
    " log_level_replica log_on_each_node logging_first_step logging_nan_inf_filter master_addr master_port"
    " max_query_length mp_parameters node_rank parallelism_config past_index ray_scope remove_unused_columns"
    " restore_callback_states_from_checkpoint save_on_each_node save_safetensors skip_memory_metrics split_batches"
    " torch_empty_cache_steps train_sampling_strategy use_cache verbose_logging world_size": "not needed. Leave it out",
    "activation_checkpointing_kwargs adafactor eval_all_checkpoints eval_delay eval_on_start include_for_metrics"
    " gradient_checkpointing_kwargs include_inputs_for_metrics jit_mode_eval label_smoothing label_smoothing_factor"
    " liger_kernel_config lr_scheduler_kwargs neftune_noise_alpha notes optim_args optim_target_modules"
    " prediction_loss_only torch_compile_backend tpu_ trackio_ use_adasum use_ipex use_liger_kernel use_mps_device"
    " use_slow_tokenizer xpu_backend": "not available. Leave it out",
}
ELSEWHERE = {name: remedy for names, remedy in _REMEDIES.items() for name in names.split()}
LEAST_LIKE = 0.7  # similarity of the words in which a misspelled flag differs from the right one


def unknown(noun: str, words: Sequence[str], prefix: str = "--") -> list[str]:
    """Describe unknown flags, one line per remedy.

    `noun`: begins the line, such as "Unknown argument". `words`: the flags as they were given. `prefix`: see `hint`.
    """
    given: dict[str, list[str]] = {}
    for word in words:
        given.setdefault(hint(word.strip("-'").split("=")[0], prefix), []).append(shortened(word) or "''")
    several = {end: end.replace("Leave it", "Leave them") for end in given if len(given[end]) > 1}
    return [f"{noun}{'s' * (end in several)} {', '.join(same)}{several.get(end, end)}" for end, same in given.items()]


def hint(name: str, prefix: str = "--") -> str:
    """Return the end of a message about the unknown flag `name`: a suggestion, or "." if there is none.

    `prefix`: the characters before flags: "--" on the command line, "" in a YAML file.
    """
    name = name.lower().replace("-", "_")
    remedy = ELSEWHERE.get(name) or ELSEWHERE.get(f"{name.split('_')[0]}_")
    if remedy is None:
        close = difflib.get_close_matches(name, [*ELSEWHERE, *NAMES], n=3, cutoff=0.8)
        right = next((flag for flag in close if _misspells(name, flag)), None)
        if right in NAMES:
            return f": did you mean {prefix}{right if prefix else NAMES[right]}?"
        remedy = ELSEWHERE.get(str(right))
    return f": {remedy.replace('--', prefix)}." if remedy else "."


def _misspells(name: str, flag: str) -> bool:
    """Return whether `name` differs from `flag` by mistakes, shortened or missing words, not by other or more words."""
    words, right = name.split("_"), flag.split("_")
    different = "".join(word for word in words if word not in right)
    expected = "".join(word for word in right if word not in words)
    if different in expected or (expected and expected in different):  # such as len for length
        return True
    return difflib.SequenceMatcher(None, different, expected).ratio() >= LEAST_LIKE
