"""Hints for error messages about unknown flags: the equivalent of another trainer's flag, or a similar flag."""

from __future__ import annotations

import difflib

from hvd_bert.config.settings import FLAGS

# Space-separated flags of run_qa (also of older versions), Lightning, DeepSpeed and common training scripts -> remedy.
_REMEDIES = {
    # model and data
    "model model_name model_path model_type bert_model checkpoint": "use --model_name_or_path",
    "tokenizer": "use --tokenizer_name",
    "token use_auth_token hub_token": "run `hf auth login` once, or set HF_TOKEN",
    "data data_file data_path data_dir dataset": "use --train_file FILE, or --dataset_name NAME for data on the hub",
    "train_data train_path train_dataset training_file": "use --train_file",
    "val_file dev_file eval_file test_file predict_file val_data dev_data eval_data": "use --validation_file",
    "max_len max_length max_seq_len seq_len seq_length model_max_length": "use --max_seq_length",
    "stride": "use --doc_stride",
    "version_2 squad_v2 v2": "use --version_2_with_negative",
    "max_samples max_train_examples limit_train_batches": "use --max_train_samples",
    "do_lower_case": "the model's tokenizer determines it. Leave it out",
    "overwrite_cache": "windows are tokenized again if what they depend on changes. Leave it out",
    "threads": "use --num_threads",
    "preprocessing_num_workers": "tokenization takes all cores of the rank. Leave it out",
    "workers num_workers dataloader_num_workers": "a thread prepares the next batches. Leave it out",
    "attention_probs_dropout_prob": "use --attention_dropout",
    # training
    "lr base_lr max_lr peak_lr": "use --learning_rate",
    "wd": "use --weight_decay",
    "data_seed": "use --seed",
    "epoch epochs num_epochs max_epochs": "use --num_train_epochs",
    "steps num_steps num_train_steps": "use --max_steps",
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
    "compile": "use --torch_compile",
    "full_determinism": "use --deterministic",
    "dry_run debug": "use --fast_dev_run",
    "patience early_stopping": "use --early_stopping_patience",
    # evaluation and output
    "eval_batch_size val_batch_size per_gpu_eval_batch_size predict_batch_size": "use --per_device_eval_batch_size",
    "fp16_full_eval bf16_full_eval": "evaluations use the training's --fp16 or --bf16. Leave it out",
    "evaluation_strategy evaluate_during_training": "use --eval_strategy",
    "val_check_interval eval_interval eval_every": "use --eval_steps",
    "greater_is_better": "--metric_for_best_model determines it",
    "do_predict": "use `hvd-bert predict`",
    "output output_folder output_path out out_dir save_dir log_dir checkpoint_dir default_root_dir": "use --output_dir",
    "logging_dir": "TensorBoard's files are in --output_dir, in tb. Leave it out",
    "logger wandb tensorboard": "use --report_to wandb or --report_to tensorboard",
    "log_every_n_steps log_interval logging_interval": "use --logging_steps",
    "save_strategy": "use --save_steps N, or --save_steps 0 for none",
    "resume ckpt ckpt_path": "rerun the same command with the same --output_dir, or use --resume_from_checkpoint",
    "push_to_hub": "upload the output folder with `hf upload` (docs/guides/sharing.md)",
    # ranks
    "gpus n_gpu num_gpus devices nproc_per_node num_processes nodes num_nodes ranks np": "the launcher starts one rank"
    " per GPU, for example: horovodrun -np 2 python -m hvd_bert.train",
    "cpu use_cpu no_cuda": "set CUDA_VISIBLE_DEVICES= to train on CPUs",
    "fsdp ddp horovod backend accelerator": "use --strategy, for example: --strategy ddp",
    "deepspeed deepspeed_config": "use --strategy deepspeed, with --zero_stage",
}
ELSEWHERE = {name: remedy for names, remedy in _REMEDIES.items() for name in names.split()}


def hint(name: str, prefix: str = "--") -> str:
    """Return the end of a message about the unknown flag `name`: a suggestion, or "." if there is none.

    `prefix`: the characters before flags: "--" on the command line, "" in a YAML file.
    """
    name = name.lower().replace("-", "_")
    close = difflib.get_close_matches(name, [*ELSEWHERE, *FLAGS], n=1, cutoff=0.8)  # exact or misspelled
    if not close:
        return "."
    if close[0] in FLAGS:
        return f": did you mean {prefix}{close[0]}?"
    return f": {ELSEWHERE[close[0]].replace('--', prefix)}."
