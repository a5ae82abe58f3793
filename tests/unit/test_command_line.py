"""The command line: run_qa's flags, presets, files, their precedence, and refused input."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from refusals import refused

from hvd_bert.config.command_line import PRESETS as PRESET_FOLDER
from hvd_bert.config.command_line import drop_flags, override_argv, parse
from hvd_bert.config.settings import FLAGS, PACKAGE, save
from hvd_bert.distributed.world import World
from hvd_bert.tasks.base import make_plan
from hvd_bert.tools.bench import __main__ as bench
from hvd_bert.tools.bench.points import SweepPlan

PRESETS = sorted(path.stem for path in PRESET_FOLDER.glob("*.yaml"))


def write(folder: Path, text: str) -> str:
    path = folder / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


# --- flags -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        *((flags, "bf16", True) for flags in ("--bf16", "--bf16 True", "--bf16=true")),
        *((flags, "bf16", False) for flags in ("", "--bf16 --bf16=0")),
        *((flags, "do_eval", False) for flags in ("--no_do_eval", "--no-do-eval", "--do_eval False")),
    ],
)
def test_switch(flags, name, value):
    assert parse(flags.split()).as_flat()[name] is value


def test_help_lists_every_flag(capsys):
    with pytest.raises(SystemExit) as left:
        parse(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    for name in ["config", *FLAGS]:
        assert len(re.findall(rf"^  (--\w+, )?--{name}\b", shown, re.MULTILINE)) == 1, name
    for preset in PRESETS:
        assert preset in shown


# --- refused input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--learning_rat 1", ["--learning_rat", "did you mean --learning_rate?"]),
        ("--evaluation_strategy 1", ["--evaluation_strategy", "--eval_strategy"]),
        ("--do_predict", ["--do_predict", "hvd-bert predict"]),
        ("--config", ["--config"]),
        ("--config smaple", ["--config smaple", "squad_v2, sweep"]),
        ("--max_seq_length long", ["--max_seq_length", "'long'"]),
        ("--bf16 perhaps", ["--bf16", "'perhaps'"]),
        ("--lr_scheduler_type reduce_lr_on_plateau", ["--lr_scheduler_type", "'reduce_lr_on_plateau'", "cosine"]),
        ("--bf16 --fp16", ["--bf16", "--fp16"]),
        ("--lora_alpha 4", ["--lora_alpha", "--lora_rank"]),
        ("--dataset_name squad --train_file a", ["--dataset_name", "--train_file"]),
        ("--padding longest --pad_to_max_length", ["--padding longest", "--pad_to_max_length"]),
        ("--train_file=", ["--train_file", "''"]),
        ("--train_file=a\ud800b", ["--train_file", r"'a\ud800b'", "UTF-8"]),
    ],
)
def test_refused_flags(flags, named, capsys):
    with refused(*named):
        parse(flags.split())
    assert capsys.readouterr() == ("", "")  # the entry point prints it once


@pytest.mark.parametrize("name", [name for name, flag in FLAGS.items() if flag.range])
def test_limits_of_a_flag(name):
    flag = FLAGS[name]
    lower, upper = flag.minimum, flag.maximum
    beyond = [flag.above, flag.below, None if lower is None else lower - 1, None if upper is None else 2 * upper]
    for value in ["nan", *(value for value in beyond if value is not None)]:
        with refused(f"--{name}", value):
            parse([f"--{name}={value}"])
    for value in (lower, upper):
        if value is not None:
            assert parse(["--lora_rank=1", f"--{name}={value}"]).as_flat()[name] == value


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


@pytest.mark.parametrize("preset", PRESETS)
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


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            ["--dataset_name", "squad"],
            {"dataset_name": "squad", "train_file": None, "validation_file": None, "config_name": "c"},
        ),
        (
            ["--model_name_or_path", "bert", "--tokenizer_name", "mine"],
            {"model_name_or_path": "bert", "config_name": None, "tokenizer_name": "mine"},
        ),
    ],
)
def test_source_on_the_command_line_replaces_the_files(tmp_path, flags, expected):
    name = write(tmp_path, "config_name: c\ntokenizer_name: k\ntrain_file: t\nvalidation_file: v\n")
    settings = parse(["--config", name, *flags]).as_flat()
    assert {key: settings[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("flags", "dataset", "v2"),
    [
        ([], "squad", False),
        (["--version_2_with_negative"], "squad_v2", True),
        (["--train_file", "a"], None, False),
        (["--config", "squad_v2", "--validation_file", "mine"], None, True),
    ],
)
def test_dataset(flags, dataset, v2):
    settings = parse(flags)
    assert (settings.data.dataset_name, settings.data.version_2_with_negative) == (dataset, v2)
    assert settings.model.model_name_or_path == settings.model.tokenizer == "bert-base-uncased"


def test_saved_settings_read_back_the_same(tmp_path):
    flags = ["--null_score_diff_threshold=-1e-5", "--no_do_eval", "--output_dir", "ünter: way", "--eval_strategy=no"]
    settings = parse(flags)
    path = tmp_path / "train_config.yaml"
    save(settings.as_flat(), path)
    assert parse(["--config", str(path)]) == settings


@pytest.mark.parametrize(
    ("flags", "padding", "pad_to"),
    [
        ("", "none", None),
        ("--padding longest", "longest", 0),
        ("--pad_to_max_length", "max_length", 200),
    ],
)
def test_padding(flags, padding, pad_to):
    data = parse(["--max_seq_length", "200", *flags.split()]).data
    assert (data.padding, data.pad_to_max_length, data.pad_to) == (padding, padding == "max_length", pad_to)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "max_length"),
        ("--padding longest", "longest"),
        ("--pad_to_max_length=False", "none"),
    ],
)
def test_padding_of_a_record_is_replaced_by_either_flag(tmp_path, flags, expected):
    path = tmp_path / "train_config.yaml"
    save(parse(["--pad_to_max_length"]).as_flat(), path)
    assert parse(["--config", str(path), *flags.split()]).data.padding == expected


# --- flags that are given twice or replaced ---------------------------------------------------------


def test_the_last_value_counts() -> None:
    assert parse(["--do_train", "--no_do_train"]).train.do_train is False
    assert bench.parse(["--steps", "7", "--steps=8"])[0].steps == 8
    plan = SweepPlan(("deepspeed",), (1,), "weak", 1, 2, 1, None, ("--zero_stage", "2", "--zero_stage=1"))
    assert plan.divided.owned == {"deepspeed": ["--zero_stage=1"]}


def test_the_benchmark_replaces_the_users_length() -> None:
    words = ["--steps", "4", "--repeats", "2", "--save_steps", "3", "--do_eval", "--max-steps", "5"]
    flags, config = bench.parse(words)
    assert flags.replaced == ["do_eval", "max_steps", "save_steps"]
    assert (config.checkpoint.save_steps, config.train.do_eval, config.train.max_steps) == (0, False, 12)


def test_without_removes_all_spellings() -> None:
    words = ["--seed", "1", "--max-seq-length=9", "--no_do_eval", "--bf16", "--timeline-file", "a"]
    words += ["--null_score_diff_threshold", "-1e-5"]
    left = ["--seed", "1", "--bf16", "--null_score_diff_threshold", "-1e-5"]
    assert drop_flags(words, ["max_seq_length", "do_eval", "timeline"]) == left
    assert override_argv(words, ["--seed=2", "--do_eval"]) == [*words[2:3], *words[4:], "--seed=2", "--do_eval"]


def test_more_micro_batches_than_windows() -> None:
    args = parse(["--gradient_accumulation_steps", str(2**32 - 1)]).train
    with refused("--gradient_accumulation_steps 4294967295", "20 windows"):
        make_plan([8] * 20, args, 1, World())
