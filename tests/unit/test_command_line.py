"""The command line: run_qa's flags, presets, files, their precedence, and refused input."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tables import each

from hvd_bert.config import command_line
from hvd_bert.config.command_line import PRESETS as PRESET_FOLDER
from hvd_bert.config.command_line import parse
from hvd_bert.config.flag import GROUPS
from hvd_bert.config.settings import FLAGS, PACKAGE
from hvd_bert.errors import UserError
from hvd_bert.sample.files import located

PRESETS = sorted(path.stem for path in PRESET_FOLDER.glob("*.yaml"))

# For each of run_qa's flags, a value that is not its default.
RUN_QA = {
    "model_name_or_path": "folder",
    "config_name": "folder",
    "tokenizer_name": "folder",
    "cache_dir": "folder",
    "model_revision": "v1",
    "dataset_name": "squad_v2",
    "dataset_config_name": "plain_text",
    "train_file": "train.json",
    "validation_file": "dev.json",
    "version_2_with_negative": True,
    "max_seq_length": 256,
    "pad_to_max_length": True,
    "doc_stride": 64,
    "n_best_size": 5,
    "max_answer_length": 12,
    "null_score_diff_threshold": -0.5,
    "max_train_samples": 10,
    "max_eval_samples": 10,
    "preprocessing_num_workers": 2,
    "overwrite_cache": True,
    "output_dir": "out",
    "overwrite_output_dir": True,
    "do_train": False,
    "do_eval": False,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 3e-05,
    "weight_decay": 0.01,
    "adam_beta1": 0.8,
    "adam_beta2": 0.99,
    "adam_epsilon": 1e-06,
    "max_grad_norm": 0.5,
    "num_train_epochs": 2.0,
    "max_steps": 7,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.2,
    "warmup_steps": 3.0,
    "logging_steps": 5,
    "eval_strategy": "no",
    "eval_steps": 5,
    "save_steps": 7,
    "save_total_limit": 3,
    "save_only_model": True,
    "resume_from_checkpoint": "folder",
    "load_best_model_at_end": True,
    "metric_for_best_model": "exact_match",
    "seed": 7,
    "bf16": True,
    "fp16": True,
}


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


@pytest.mark.parametrize("flags", [["--bf16"], ["--bf16", "True"], ["--bf16=true"]], ids=" ".join)
def test_switch_on(flags):
    assert parse(flags).train.precision == "bf16"


@pytest.mark.parametrize("flags", [["--no_do_eval"], ["--do_eval", "False"], ["--do_eval=false"]], ids=" ".join)
def test_switch_off(flags):
    assert parse(flags).train.do_eval is False


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


@pytest.mark.parametrize(
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
    ("flags", "words"),
    [
        (["--learning_rat", "1"], "Unknown argument --learning_rat: did you mean --learning_rate?"),
        (["--learning_rat=1"], "did you mean --learning_rate?"),
        (["--max-seq-lenght", "1"], "did you mean --max_seq_length?"),
        (["--xyzzy"], "Unknown argument --xyzzy."),
        (["train.json"], "Unknown argument train.json."),
        (["--config"], "--config needs a value"),
        (["--max_seq_length", "long"], "--max_seq_length/--max-seq-length: invalid int value: 'long'"),
        (["--max_seq_length", "1.5"], "invalid int value: '1.5'"),
        (["--learning_rate", "fast"], "invalid float value: 'fast'"),
        (["--bf16", "perhaps"], "perhaps"),
        (["--seed"], "expected one argument"),
        (["--lr_scaling", "cubic"], "invalid choice: 'cubic'"),
        (["--lr_scheduler_type", "steep"], "invalid choice: 'steep'"),
        (["--lr_scheduler_type", "reduce_lr_on_plateau"], "invalid choice"),
        (["--eval_strategy", "often"], "invalid choice: 'often'"),
        (["--bf16", "--fp16"], "--bf16 and --fp16 are both given"),
        (["--dataset_name", "squad", "--train_file", "a"], "--dataset_name and --train_file are both given"),
        (["--dataset_name", "squad", "--validation_file", "a"], "--dataset_name and --validation_file are both"),
    ],
)
def test_refused_flags(flags, words, capsys):
    with pytest.raises(UserError) as refused:
        parse(flags)
    assert words in str(refused.value)
    assert capsys.readouterr() == ("", "")  # the entry point prints it once


@each(
    ("name", "values"),
    [
        *(
            (name, ["0", "-1"])
            for name in (
                "max_seq_length",
                "n_best_size",
                "max_answer_length",
                "max_train_samples",
                "max_eval_samples",
                "lr_base_batch_size",
                "preprocessing_num_workers",
                "per_device_train_batch_size",
                "per_device_eval_batch_size",
                "gradient_accumulation_steps",
                "logging_steps",
                "eval_steps",
                "num_threads",
            )
        ),
        *(
            (name, ["0", "-1", "nan", "inf"])
            for name in (
                "learning_rate",
                "adam_epsilon",
                "num_train_epochs",
                "gradient_predivide_factor",
                "peak_tflops",
            )
        ),
        *((name, ["-1", "nan", "inf"]) for name in ("weight_decay", "max_grad_norm")),
        *((name, ["-1"]) for name in ("doc_stride", "warmup_steps", "seed")),
        *((name, ["-0.1", "1", "nan"]) for name in ("adam_beta1", "adam_beta2", "warmup_ratio", "dropout")),
        ("max_steps", ["0"]),
        ("null_score_diff_threshold", ["nan"]),
    ],
)
def test_refused_values(name, values):
    for value in values:
        with pytest.raises(UserError, match=rf"^--{name} {value}(\.0)?: \w+"):
            parse([f"--{name}={value}"])


# --- files and presets -----------------------------------------------------------------------------


def test_command_line_wins_over_file_over_default(tmp_path):
    name = write(tmp_path, "learning_rate: 1.0e-3\nseed: 5\n")
    for flags in (["--config", name, "--seed=6"], ["--seed", "6", f"--config={name}"]):
        settings = parse(flags)
        assert (settings.train.learning_rate, settings.train.seed, settings.train.logging_steps) == (1e-3, 6, 10)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("null_score_diff_threshold: -0.00001", "null_score_diff_threshold", -1e-5),
        ("output_dir: -runs of mine", "output_dir", "-runs of mine"),
        ("train_file: a = b.json", "train_file", "a = b.json"),
        ("do_eval: false", "do_eval", False),
        ("version_2_with_negative: true", "version_2_with_negative", True),
        ("learning_rate: 3e-5", "learning_rate", 3e-5),  # text for YAML, a number for us
        ("max_train_samples: null", "max_train_samples", None),
        ("model_revision: 2024-01-01", "model_revision", "2024-01-01"),
        ("validation_file: '{package}/sample/dev.json'", "validation_file", f"{PACKAGE}/sample/dev.json"),
    ],
)
def test_values_in_a_file(tmp_path, text, name, value):
    assert parse(["--config", write(tmp_path, text)]).as_flat()[name] == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learning_rat: 1", "unknown key 'learning_rat': did you mean learning_rate?"),
        ("xyzzy: 1", "unknown key 'xyzzy'."),
        ("config: sample", "unknown key 'config'"),
        ("1: 2", "unknown key '1'"),
        ("seed: [1, 2]", "'seed' must be a single value, not list"),
        ("seed: {a: 1}", "'seed' must be a single value, not dict"),
        ("seed: red", "invalid int value: 'red'"),
        ("seed: -1", "--seed -1: must be at least 0"),
        ("- seed\n- learning_rate\n", "must be lines of `flag: value`"),
        ("", "must be lines of `flag: value`"),
        ("seed: 1\n  learning_rate: [", "cannot be read as YAML"),
        ("seed: !!python/object/apply:os.getcwd []", "cannot be read as YAML"),
    ],
)
def test_refused_files(tmp_path, text, words):
    with pytest.raises(UserError) as refused:
        parse(["--config", write(tmp_path, text)])
    assert words in str(refused.value)


def test_error_for_a_missing_config_names_the_presets():
    with pytest.raises(UserError, match=r"--config smaple: no such file.*Presets: .*sample"):
        parse(["--config", "smaple"])


def test_config_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="cannot be read as YAML"):
        parse(["--config", str(tmp_path)])
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(UserError, match="cannot be read as YAML"):
        parse(["--config", str(tmp_path / "binary.yaml")])


@pytest.mark.parametrize("preset", PRESETS)
def test_shipped_preset(preset):
    settings = parse(["--config", preset])
    written = yaml.safe_load((PRESET_FOLDER / f"{preset}.yaml").read_text(encoding="utf-8"))
    flat = settings.as_flat()
    assert written
    for name, value in written.items():
        if isinstance(value, str):
            value = value.replace("{package}", str(PACKAGE))
            assert not Path(value).is_absolute() or located(value).exists()
        assert flat[name] == value, name


def test_sample_is_a_preset():
    settings = parse(["--config", "sample"])
    assert settings.model.model_name_or_path is None
    assert settings.model.tokenizer == settings.model.config_name


@pytest.mark.parametrize(
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
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_source_on_the_command_line_replaces_the_files(tmp_path, flags, expected):
    name = write(tmp_path, "config_name: c\ntokenizer_name: k\ntrain_file: t\nvalidation_file: v\n")
    settings = parse(["--config", name, *flags]).as_flat()
    assert {key: settings[key] for key in expected} == expected


def test_files_on_the_command_line_replace_the_files_dataset(tmp_path):
    name = write(tmp_path, "dataset_name: squad_v2\n")
    settings = parse(["--config", name, "--validation_file", "mine"])
    assert (settings.data.dataset_name, settings.data.validation_file) == (None, "mine")


@pytest.mark.parametrize(
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


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_saved_settings_read_back_the_same(tmp_path, preset):
    flags = ["--config", preset] if preset else []
    flags += ["--null_score_diff_threshold=-1e-5", "--no_do_eval", "--output_dir", "ünter: way", "--eval_strategy=no"]
    settings = parse(flags)
    path = tmp_path / "train_config.yaml"
    settings.save(path)
    assert parse(["--config", str(path)]) == settings


@pytest.mark.parametrize("name", ["evaluation_strategy", "save_strategy", "do_predict"])
def test_run_qa_flag_without_a_counterpart_is_explained(name):
    with pytest.raises(UserError, match=rf"Unknown argument --{name}: "):
        parse([f"--{name}", "1"])


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
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
    parse(["--pad_to_max_length"]).save(path)
    assert parse(["--config", str(path), *flags.split()]).data.padding == expected


def test_two_paddings_are_refused():
    with pytest.raises(UserError, match="--padding longest and --pad_to_max_length are both given"):
        parse(["--padding", "longest", "--pad_to_max_length"])


def test_unquoted_no_in_yaml(tmp_path):
    assert parse(["--config", write(tmp_path, "eval_strategy: no\n")]).train.eval_strategy == "no"
