"""The command line: run_qa's flags, presets, files, their precedence, and refused input."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tables import each, refused

from hvd_bert.config import command_line
from hvd_bert.config.command_line import PRESETS as PRESET_FOLDER
from hvd_bert.config.command_line import parse
from hvd_bert.config.flag import GROUPS
from hvd_bert.config.settings import FLAGS, PACKAGE, save
from hvd_bert.errors import UserError

PRESETS = sorted(path.stem for path in PRESET_FOLDER.glob("*.yaml"))

# For each of run_qa's flags, a value that is not its default.
RUN_QA = yaml.safe_load("""
  {model_name_or_path: folder, config_name: folder, tokenizer_name: folder, cache_dir: folder, model_revision: v1,
   dataset_name: squad_v2, dataset_config_name: plain_text, train_file: train.json, validation_file: dev.json,
   version_2_with_negative: true, max_seq_length: 256, pad_to_max_length: true, doc_stride: 64, n_best_size: 5,
   max_answer_length: 12, null_score_diff_threshold: -0.5, max_train_samples: 10, max_eval_samples: 10,
   output_dir: out, overwrite_output_dir: true, do_train: false,
   do_eval: false, per_device_train_batch_size: 4, per_device_eval_batch_size: 4, gradient_accumulation_steps: 2,
   learning_rate: 3.0e-05, weight_decay: 0.01, adam_beta1: 0.8, adam_beta2: 0.99, adam_epsilon: 1.0e-06,
   max_grad_norm: 0.5, num_train_epochs: 2.0, max_steps: 7, lr_scheduler_type: cosine, warmup_ratio: 0.2,
   warmup_steps: 3.0, logging_steps: 5, eval_strategy: 'no', eval_steps: 5, save_steps: 7, save_total_limit: 3,
   save_only_model: true, resume_from_checkpoint: folder, load_best_model_at_end: true,
   metric_for_best_model: exact_match, seed: 7, bf16: true, fp16: true}
""")


def write(folder: Path, text: str) -> str:
    path = folder / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


# --- flags -----------------------------------------------------------------------------------------


def test_no_flag_trains_bert_on_squad():
    settings = parse([])
    assert settings.model.model_name_or_path == "bert-base-uncased"
    assert settings.model.tokenizer == "bert-base-uncased"
    assert settings.data.dataset_name == "squad"
    assert not settings.data.version_2_with_negative
    assert (settings.data.max_seq_length, settings.data.doc_stride) == (384, 128)
    assert settings.train.do_train and settings.train.do_eval
    assert settings.train.output_dir is None
    assert settings.train.precision == "fp32"


@each("joined", [True, False], ids=["--flag=value", "--flag value"])
@each(("name", "value"), RUN_QA.items())
def test_run_qa_flag(name, value, joined):
    default = parse([]).as_flat()
    settings = parse([f"--{name}={value}"] if joined else [f"--{name}", str(value)]).as_flat()
    assert settings[name] == value != default[name]
    assert type(settings[name]) is type(value)


@each(
    ("flags", "value"),
    [("--bf16", True), ("--bf16 True", True), ("--bf16=true", True), ("--bf16 --bf16=0", False), ("", False)],
)
def test_switch(flags, value):
    assert parse(flags.split()).train.bf16 is value


@each("flags", ["--no_do_eval", "--no-do-eval", "--do_eval False", "--do_eval=false"])
def test_switch_off(flags):
    assert parse(flags.split()).train.do_eval is False


def test_help_lists_every_flag(capsys):
    with pytest.raises(SystemExit) as left:
        parse(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    for name in ["config", *FLAGS]:
        assert len(re.findall(rf"^  (--\w+, )?--{name}\b", shown, re.MULTILINE)) == 1, name
    for preset in PRESETS:
        assert preset in shown


def help_of(flag: str) -> str:
    """A flag's text in --help, on one line."""
    text = command_line.make_parser().format_help()
    entry = re.search(rf"^  {flag}\b[^\n]*\n(?: {{8,}}[^\n]*\n)*", text, re.MULTILINE)
    return " ".join(entry[0].split())


def test_help_is_in_groups():
    text = command_line.make_parser().format_help()
    assert re.findall(r"^([\w-]+):$", text, re.MULTILINE) == ["options", *GROUPS]
    assert text.index("\nevaluation:") < text.index("--null_score_diff_threshold") < text.index("\ncheckpoints:")


@each(
    ("flag", "words"),
    [
        ("--model_name_or_path", "(default: bert-base-uncased; "),
        ("--dropout", "(default: the model's own)"),
        ("--output_dir", "(default: a new folder runs/DATE-TIME)"),
        ("--max_steps", "--max_steps N Total number of optimizer steps"),
        ("--learning_rate", "(default: 5e-05)"),
        ("--num_train_epochs", "(default: 3)"),
        ("--do_train", "--do_train Train. (default: True)"),
        ("--no_do_train", "--no_do_train Do not train; only evaluate."),
        ("--no_do_eval", "--no_do_eval Do not evaluate."),
        ("--lr_scaling", "{none,sqrt,linear} "),
        ("--timeline, --timeline_file", "--timeline, --timeline_file FILE Record"),
    ],
)
def test_help_of_a_flag(flag, words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert words in help_of(flag)


def test_help_needs_no_torch():
    program = "import sys, hvd_bert.config.command_line; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "False\n"


# --- refused input ---------------------------------------------------------------------------------


@each(
    ("flags", "named"),
    [
        ("--learning_rat 1", ["--learning_rat", "did you mean --learning_rate?"]),
        ("--learning_rat=1", ["did you mean --learning_rate?"]),
        ("--max-seq-lenght 1", ["did you mean --max_seq_length?"]),
        ("--evaluation_strategy 1", ["--evaluation_strategy", "--eval_strategy"]),
        ("--save_strategy 1", ["--save_strategy", "--save_steps"]),
        ("--preprocessing_num_workers 2", ["--preprocessing_num_workers", "cores"]),
        ("--do_predict", ["--do_predict", "hvd-bert predict"]),
        ("--config", ["--config"]),
        ("--config smaple", ["--config smaple", "squad_v2, sweep"]),
        ("--max_seq_length long", ["--max_seq_length", "'long'"]),
        ("--max_seq_length 1.5", ["--max_seq_length", "'1.5'"]),
        ("--learning_rate fast", ["--learning_rate", "'fast'"]),
        ("--bf16 perhaps", ["--bf16", "'perhaps'"]),
        ("--seed", ["--seed"]),
        ("--zero_stage 4 --strategy deepspeed", ["--zero_stage", "4", "1, 2, 3"]),
        ("--lr_scheduler_type reduce_lr_on_plateau", ["--lr_scheduler_type", "'reduce_lr_on_plateau'", "cosine"]),
        ("--eval_strategy often", ["--eval_strategy", "'often'", "epoch"]),
        ("--bf16 --fp16", ["--bf16", "--fp16"]),
        ("--dataset_name squad --train_file a", ["--dataset_name", "--train_file"]),
        ("--dataset_name squad --validation_file a", ["--dataset_name", "--validation_file"]),
        ("--padding longest --pad_to_max_length", ["--padding longest", "--pad_to_max_length"]),
    ],
)
def test_refused_flags(flags, named, capsys):
    with refused(*named):
        parse(flags.split())
    assert capsys.readouterr() == ("", "")  # the entry point prints it once


@each("word", ["--xyzzy", "train.json"])
def test_words_that_are_no_flags(word):
    with pytest.raises(UserError, match=rf"^Unknown argument {word}\.$"):
        parse([word])


@each("name", [name for name, flag in FLAGS.items() if flag.range])
def test_limits_of_a_flag(name):
    flag = FLAGS[name]
    lower, upper = flag.minimum, flag.maximum
    beyond = [flag.above, flag.below, None if lower is None else lower - 1, None if upper is None else 2 * upper]
    for value in ["nan", *(value for value in beyond if value is not None)]:
        with refused(f"--{name}", value):
            parse([f"--{name}={value}"])
    for value in (lower, upper):
        if value is not None:
            assert parse([f"--{name}={value}"]).as_flat()[name] == value


@each(
    "name",
    [
        *("max_seq_length", "max_train_samples", "per_device_train_batch_size", "global_batch", "eval_steps"),
        *("num_threads", "max_steps", "save_total_limit", "early_stopping_patience", "lr_base_batch_size"),
        *("learning_rate", "num_train_epochs", "gradient_predivide_factor", "peak_tflops"),
    ],
)
def test_nothing_is_no_number_of_these(name):
    with refused(f"--{name} 0", "must be a"):
        parse([f"--{name}=0"])


def test_a_threshold_may_be_infinite_but_not_nan():
    assert parse(["--null_score_diff_threshold=-inf"]).data.null_score_diff_threshold == float("-inf")
    with refused("--null_score_diff_threshold nan"):
        parse(["--null_score_diff_threshold=nan"])


# --- files and presets -----------------------------------------------------------------------------


def test_command_line_wins_over_file_over_default(tmp_path):
    name = write(tmp_path, "learning_rate: 1.0e-3\nseed: 5\n")
    for flags in (["--config", name, "--seed=6"], ["--seed", "6", f"--config={name}"]):
        settings = parse(flags)
        assert (settings.train.learning_rate, settings.train.seed, settings.train.logging_steps) == (1e-3, 6, 10)


@each("preset", PRESETS)
def test_shipped_preset(preset):
    settings = parse(["--config", preset])
    written = yaml.safe_load((PRESET_FOLDER / f"{preset}.yaml").read_text(encoding="utf-8"))
    flat = settings.as_flat()
    assert written
    for name, value in written.items():
        if isinstance(value, str):
            value = value.replace("{package}", str(PACKAGE))
            assert not Path(value).is_absolute() or Path(value).exists()
        assert flat[name] == value, name


def test_sample_is_a_preset():
    settings = parse(["--config", "sample"])
    assert settings.model.model_name_or_path is None
    assert settings.model.tokenizer == settings.model.config_name


@each(
    ("flags", "expected"),
    [
        (
            ["--dataset_name", "squad"],
            {"dataset_name": "squad", "train_file": None, "validation_file": None, "config_name": "c"},
        ),
        (["--dataset-name=squad"], {"dataset_name": "squad", "train_file": None, "validation_file": None}),
        (["--train_file", "mine"], {"dataset_name": None, "train_file": "mine", "validation_file": None}),
        (
            ["--model_name_or_path", "bert"],
            {"model_name_or_path": "bert", "config_name": None, "tokenizer_name": None, "train_file": "t"},
        ),
        (
            ["--model_name_or_path", "bert", "--tokenizer_name", "mine"],
            {"model_name_or_path": "bert", "config_name": None, "tokenizer_name": "mine"},
        ),
        (["--seed", "3"], {"model_name_or_path": None, "config_name": "c", "tokenizer_name": "k", "train_file": "t"}),
    ],
)
def test_source_on_the_command_line_replaces_the_files(tmp_path, flags, expected):
    name = write(tmp_path, "config_name: c\ntokenizer_name: k\ntrain_file: t\nvalidation_file: v\n")
    settings = parse(["--config", name, *flags]).as_flat()
    assert {key: settings[key] for key in expected} == expected


def test_files_on_the_command_line_replace_the_files_dataset(tmp_path):
    name = write(tmp_path, "dataset_name: squad_v2\n")
    settings = parse(["--config", name, "--validation_file", "mine"])
    assert (settings.data.dataset_name, settings.data.validation_file) == (None, "mine")


@each(
    ("flags", "dataset", "v2"),
    [
        ([], "squad", False),
        (["--version_2_with_negative"], "squad_v2", True),
        (["--dataset_name", "squad_v2"], "squad_v2", True),
        (["--dataset_name", "rajpurkar/squad_v2"], "rajpurkar/squad_v2", True),
        (["--train_file", "a"], None, False),
    ],
)
def test_dataset(flags, dataset, v2):
    data = parse(flags).data
    assert (data.dataset_name, data.version_2_with_negative) == (dataset, v2)


@each("preset", [None, *PRESETS])
def test_saved_settings_read_back_the_same(tmp_path, preset):
    flags = ["--config", preset] if preset else []
    flags += ["--null_score_diff_threshold=-1e-5", "--no_do_eval", "--output_dir", "ünter: way", "--eval_strategy=no"]
    settings = parse(flags)
    path = tmp_path / "train_config.yaml"
    save(settings.as_flat(), path)
    assert parse(["--config", str(path)]) == settings


@each(
    ("flags", "padding", "pad_to"),
    [
        ("", "none", None),
        ("--padding longest", "longest", 0),
        ("--padding max_length", "max_length", 200),
        ("--pad_to_max_length", "max_length", 200),
        ("--pad_to_max_length False", "none", None),
        ("--padding max_length --pad_to_max_length", "max_length", 200),
    ],
)
def test_padding(tmp_path, flags, padding, pad_to):
    data = parse(["--max_seq_length", "200", *flags.split()]).data
    assert (data.padding, data.pad_to_max_length, data.pad_to) == (padding, padding == "max_length", pad_to)


@each(
    ("flags", "expected"),
    [
        ("", "max_length"),
        ("--padding none", "none"),
        ("--padding longest", "longest"),
        ("--pad_to_max_length=False", "none"),
    ],
)
def test_padding_of_a_record_is_replaced_by_either_flag(tmp_path, flags, expected):
    path = tmp_path / "train_config.yaml"
    save(parse(["--pad_to_max_length"]).as_flat(), path)
    assert parse(["--config", str(path), *flags.split()]).data.padding == expected
