"""The settings: flags and their properties, the command line, presets, YAML files, and refused input."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from refusals import refused
from transformers import TrainingArguments

from hvd_bert import train
from hvd_bert.config import command_line
from hvd_bert.config.command_line import PRESETS as PRESET_FOLDER
from hvd_bert.config.command_line import USED_FIRST, drop_flags, override_argv, parse
from hvd_bert.config.flag import GROUPS
from hvd_bert.config.other_names import ELSEWHERE, hint
from hvd_bert.config.settings import FLAGS, PACKAGE
from hvd_bert.config.strategies import STRATEGIES
from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError
from hvd_bert.predict import __main__ as predict
from hvd_bert.tasks.base import make_plan
from hvd_bert.tools.bench import __main__ as bench
from hvd_bert.tools.bench import sweep
from hvd_bert.tools.doctor import __main__ as doctor
from hvd_bert.tools.evaluate import __main__ as evaluate
from hvd_bert.tools.report import __main__ as report
from hvd_bert.tools.timeline import __main__ as timeline
from hvd_bert.tools.tune import __main__ as tune


@pytest.mark.parametrize("name", FLAGS)
def test_properties_of_a_flag(name):
    flag = FLAGS[name]
    assert flag.default is not None or flag.default_text, "--help must not show None"
    assert bool(flag.negated_help) == (flag.default is True)
    assert flag.owner in ("", *STRATEGIES)
    assert set(flag.replaces) <= FLAGS.keys() - {name}


@pytest.mark.parametrize(
    ("flags", "steps"),
    [([], 30), (["--num_train_epochs", "1.45"], 15), (["--max_steps", "7"], 7), (["--num_train_epochs", "0.01"], 1)],
)
def test_total_steps(flags, steps):
    assert parse(flags).train.total_steps(steps_per_epoch=10) == steps


# YAML files of flags: values that YAML would convert, and refused files

pytestmark = pytest.mark.timeout(60)  # in case reading a file blocks forever


def write(folder: Path, content: str | bytes) -> str:
    path = folder / "settings.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def refusal(name: str) -> str:
    with pytest.raises(UserError) as refused:
        parse(["--config", name])
    return str(refused.value)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("timeline_steps: 1:30", "timeline_steps", "1:30"),
        ("eval_strategy: no", "eval_strategy", "no"),
        ("\ufeffseed: 5", "seed", 5),
        ("validation_file: '{package}/sample/dev.json'", "validation_file", f"{PACKAGE}/sample/dev.json"),
        ("output_dir: null", "output_dir", None),
        ("bf16: on", "bf16", True),
        ("bf16: 'on'", "bf16", True),
        ("output_dir:", "output_dir", None),
        ("seed: 1\nbf16: true\nseed: 2", "seed", 2),  # the later value counts, as on the command line
        ("null_score_diff_threshold: -.inf", "null_score_diff_threshold", float("-inf")),
        ("learning_rate: 1e-3\nseed: &a 3\nmax_steps: *a", "max_steps", 3),
    ],
)
def test_yaml_has_the_values_of_the_command_line(tmp_path: Path, text: str, name: str, value: object) -> None:
    assert parse(["--config", write(tmp_path, text)]).as_flat()[name] == value


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("learning_rat: 1", ["'learning_rat'", "did you mean learning_rate?"]),
        ("epochs: 1", ["'epochs': use num_train_epochs."]),
        ("timeline_file: x", ["'timeline_file': did you mean timeline?"]),
        ("seed: [1, 2]", ["'seed'", "list"]),
        ("seed: red", ["--seed", "'red'"]),
        ("seed: " + "9" * 5000, ["--seed", "'99"]),
        (b"train_file: a\xff\n", ["byte 13"]),
        ('train_file: "a\\0b"', ["train_file", "NUL"]),
        ("seed: !!python/object/apply:os.getcwd []", ["'seed'"]),
        ("? [a]\n: 1\n", ["YAML", "line 1"]),
        ("train_file: [a, [b]]", ["'train_file'", "or a list"]),
        ("", ["flag: value"]),
        ("seed: 1\n  learning_rate: [", ["YAML", "line 2"]),
        ("{a: " * 20_000, ["recursion"]),
        ("#" * 2_000_000, ["1 MiB"]),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_refused_yaml(tmp_path: Path, content: str | bytes, named: list[str]) -> None:
    name = write(tmp_path, content)
    message = refusal(name)
    assert message.startswith(f"--config {name}: ") and len(message) < 1000
    assert all(value in message for value in named), message


def test_paths_that_are_not_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), "/dev/zero", str(tmp_path)):
        assert refusal(name).startswith(f"--config {name}: cannot be read")


PRESETS = sorted(path.stem for path in PRESET_FOLDER.glob("*.yaml"))


# --- flags -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        *((flags, {"bf16": True}) for flags in ("--bf16", "--bf16 True", "--bf16=true")),
        *((flags, {"bf16": False}) for flags in ("", "--bf16 --bf16=0")),
        *((flags, {"do_eval": False}) for flags in ("--no_do_eval", "--no-do-eval", "--do_eval False")),
        ("", {"padding": "none", "pad_to_max_length": False, "pad_to": None}),
        ("--padding longest", {"padding": "longest", "pad_to_max_length": False, "pad_to": 0}),
        ("--pad_to_max_length", {"padding": "max_length", "pad_to_max_length": True, "pad_to": 384}),
        ("", {"dataset_name": "squad", "version_2_with_negative": False, "tokenizer": "bert-base-uncased"}),
        ("--version_2_with_negative", {"dataset_name": "squad_v2"}),
        ("--torch_compile_mode default", {"torch_compile": True}),
        ("--train_file a", {"dataset_name": None, "version_2_with_negative": False}),
        ("--config squad_v2 --validation_file mine", {"dataset_name": None, "version_2_with_negative": True}),
    ],
)
def test_settings_by_flags(flags, expected):
    config = parse(flags.split())
    settings = config.as_flat() | {"pad_to": config.data.pad_to, "tokenizer": config.model.tokenizer}
    assert {name: settings[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--help all", FLAGS),
        ("--config sample -h --bf16", USED_FIRST.split()),
        ("--help checkpoints", [name for name, flag in FLAGS.items() if flag.group == "checkpoints"]),
        ("--help seed", ["seed"]),
        ("--help timeline_file", ["timeline"]),
    ],
)
def test_help_lists_each_flag_of_its_topic_once(capsys, words, names):
    with pytest.raises(SystemExit) as left:
        parse(words.split())
    assert left.value.code == 0
    shown = capsys.readouterr().out
    listed = re.findall(r"^  (?:-h, )?--(\w+)", shown, re.MULTILINE)
    negated = [f"no_{name}" for name in names if FLAGS[name].default is True]
    assert sorted(listed) == sorted(["help", "config", *names, *negated])
    assert all(word in shown for word in [*PRESETS, *GROUPS, "--help all"])
    assert ("examples:" in shown) == (" -h " in words)


# --- refused input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--learning_rat 1", ["--learning_rat", "did you mean --learning_rate?"]),
        ("--evaluation_strategy 1", ["--evaluation_strategy", "--eval_strategy"]),
        ("--do_predict", ["--do_predict", "hvd-bert predict"]),
        ("--lr=1", ["--lr=1: use --learning_rate."]),
        ("--max_answer_len 9", ["did you mean --max_answer_length?"]),
        ("--lora_r 9", ["did you mean --lora_rank?"]),
        ("--null_score_thresh 9", ["did you mean --null_score_diff_threshold?"]),
        ("--num-worker 8", ["Leave it out."]),  # a typo of another trainer's flag
        ("--max_train_steps 8", ["use --max_steps."]),
        ("--notes x", ["Unknown argument --notes: not available. Leave it out."]),  # not --nodes
        ("--label_smoothing=0.1", ["Unknown argument --label_smoothing=0.1: not available. Leave it out."]),
        ("--gradient_clip_algorithm norm", ["Unknown argument --gradient_clip_algorithm."]),  # not --max_grad_norm
        ("--config", ["--config"]),
        ("--config smaple", ["--config smaple", "squad_v2, sweep"]),
        ("--max_seq_length long", ["--max_seq_length", "'long'"]),
        ("--bf16 perhaps", ["--bf16", "'perhaps'"]),
        ("--lr_scheduler_type reduce_lr_on_plateau", ["--lr_scheduler_type", "'reduce_lr_on_plateau'", "cosine"]),
        ("--bf16 --fp16", ["--bf16", "--fp16"]),
        ("--bf16_allreduce --fp16_allreduce", ["--bf16_allreduce", "choose one"]),
        ("--num_groups 2 --deterministic", ["--deterministic", "--num_groups"]),
        ("--strategy ddp --fp16_allreduce", ["--fp16_allreduce", "--strategy horovod"]),
        ("--strategy fsdp --zero_stage 1", ["--zero_stage", "--strategy deepspeed"]),
        *(
            (f"--torch_compile_mode reduce-overhead {flag}", ["--torch_compile_mode reduce-overhead", flag])
            for flag in ("--gradient_checkpointing", "--per_device_train_batch_size auto")
        ),
        *((f"--report_to {value}", ["--report_to", value, "tensorboard, wandb"]) for value in ("all", "none,wandb")),
        *(
            (f"--timeline_steps={steps}", ["--timeline_steps", repr(steps)])
            for steps in ("3", "0:4", "5:4", "a:b", "1:2:3", "1:999999999999")
        ),
        ("--lora_alpha 4", ["--lora_alpha", "--lora_rank"]),
        ("--dataset_name squad --train_file a", ["--dataset_name", "--train_file"]),
        ("--padding longest --pad_to_max_length", ["--padding longest", "--pad_to_max_length"]),
        ("--train_file=", ["--train_file", "''"]),
        ("--train_file=a\ud800b", ["--train_file", r"'a\ud800b'", "UTF-8"]),
        ("--null_score_diff_threshold=nan", ["--null_score_diff_threshold nan"]),
        ("--version", ["`pip show hvd-bert`"]),
        ("'' --seed 1", ["Unknown argument ''"]),
        ("--foo -1 -my 3e-5", ["Unknown arguments --foo, -my."]),
        ("junk1 junk2 --max_steps 3 junk3 junk4", ["junk1, junk2, junk3, junk4"]),
        ("--help lr", ["--help lr", "use --learning_rate.", "all, model", *GROUPS]),
    ],
)
def test_refused_flags(flags, named, capsys):
    with refused(*named):
        parse(shlex.split(flags))
    assert capsys.readouterr() == ("", "")  # only the entry point prints the error


MISTAKES = {
    "hub_strategy": ("end", "`hf upload`"),
    "evaluation_strategy": ("steps", "use --eval_strategy."),
    "push_to_hub": ("True", "`hf upload`"),
    "ddp_timeout": ("9", "Leave it out."),
    "learning_rat": ("1", "did you mean --learning_rate?"),
    "seed": ("red", "'red'"),
    "report_to": ("all", "tensorboard, wandb"),
    "warmup_ratio": ("2", "below 1"),
    "optim": ("adamw", "lamb"),
}


@pytest.mark.parametrize("in_python", [True, False])
def test_all_mistakes_are_reported_at_once(tmp_path, in_python):
    given = {name: value for name, (value, _) in MISTAKES.items()}
    in_file = dict([*given.items()][::2])
    words = ["--config", write(tmp_path, "\n".join(f"{name}: '{value}'" for name, value in in_file.items()))]
    words += [f"--{name}={given[name]}" for name in given.keys() - in_file.keys()]
    with pytest.raises(UserError) as raised:
        train(**given, strategy="none") if in_python else parse(words)
    lines = str(raised.value).splitlines()
    assert len(lines) == len(MISTAKES) - 1  # two flags have the same remedy
    for name, (_, remedy) in MISTAKES.items():
        shown = remedy.replace("--", "") if in_python or name in in_file else remedy
        assert [line for line in lines if name in line and shown in line], name


def test_no_argument_of_the_trainer_leads_to_a_similar_flag():
    others = {field.name for field in fields(TrainingArguments)} - FLAGS.keys()
    assert others and not [name for name in others if "did you mean" in hint(name)]


TOOLS = (bench, doctor, evaluate, predict, report, sweep, timeline, tune)
PARSERS = (command_line.make_parser(), *(tool.make_parser() for tool in TOOLS))
FLAGS_WITH_VALUES = [
    pytest.param(parser, action, id=f"{parser.prog} {action.option_strings[0]}")
    for parser in PARSERS
    for action in parser._actions
    if action.option_strings and action.nargs != 0
]


@pytest.mark.parametrize(("parser", "flag"), FLAGS_WITH_VALUES)
def test_values_that_no_flag_takes_are_refused(parser, flag):
    for value in ["", *["nan"] * (flag.type in (int, float)), *["9" * 5000] * (flag.type is int)]:
        with refused(flag.option_strings[0]) as raised:
            parser.parse_known_args([f"{flag.option_strings[-1]}={value}"])
        assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog)
def test_paths_are_local(parser, monkeypatch):
    """Without a check, an output would be a local folder named like the address."""
    monkeypatch.delenv("UNSET", raising=False)
    kinds = re.compile(r"FILE(?!\.yaml)|FOLDER|DIR|PATH|MODEL$|OUT|RUNS")
    names = {"model_name_or_path", "config_name", "tokenizer_name", "dataset_name"}
    paths = [flag for flag in parser._actions if kinds.search(str(flag.metavar)) or flag.dest in names]
    for flag in paths:
        addresses = "s3://b/x", "gs:/b/x", "HF:u/m", "dbfs:x", "wasbs:c@a", "file:///x", "n1:/x", "C:\\x", "\\\\n1\\x"
        for text in (*addresses, "$UNSET/x", "~no_user/x", "$(pwd)/x", "`pwd`/x"):
            with refused(repr(text), error=argparse.ArgumentError):
                parser._get_value(flag, text)
        assert str(parser._get_value(flag, "user/model-1.0")) == "user/model-1.0"
    assert paths


def test_homes_are_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    given = {
        "output_dir": "~/x",
        "model_name_or_path": "$HOME/m",
        "train_file": ["~/a.json:2", "${HOME}/b.json"],
        "validation_file": "dev=~/c.json",
        "question_column": "~",
    }
    expected = {
        "output_dir": "/h/x",
        "model_name_or_path": "/h/m",
        "train_file": ("/h/a.json:2", "/h/b.json"),
        "validation_file": "dev=/h/c.json",
    }
    words = [word for item in given.items() for word in command_line.to_argv(*item)]
    (tmp_path / "mine.yaml").write_text(json.dumps(given))
    monkeypatch.setenv("FOLDER", str(tmp_path))
    from_file = parse(["--config", "$FOLDER/mine.yaml"])
    assert expected.items() <= parse(words).as_flat().items() and expected.items() <= from_file.as_flat().items()
    assert parse(words).data.question_column == "~"
    for address in ("s3://b/x.json", "dev=s3://b/x.json"):
        with refused("s3://b/x.json"):
            parse(["--config", write(tmp_path, f"validation_file: {address}")])
    monkeypatch.setenv("EMPTY", "")
    with refused("--output_dir", "empty"):
        parse(["--output_dir", "$EMPTY"])
    with refused("--config 's3://b/x.yaml'"):
        parse(["--config", "s3://b/x.yaml"])


def test_names_of_other_trainers_lead_to_flags():
    spellings = {spelling for name, flag in FLAGS.items() for spelling in flag.spellings(name)}
    assert ELSEWHERE.keys().isdisjoint(spellings)
    assert set(re.findall(r"--(\w+)", " ".join(ELSEWHERE.values()))) <= spellings


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


# --- files and presets -----------------------------------------------------------------------------


def test_command_line_wins_over_file_over_default(tmp_path):
    name = write(tmp_path, "learning_rate: 1.0e-3\nseed: 5\n")
    for flags in (["--config", name, "--seed=6"], ["--seed", "6", f"--config={name}"]):
        settings = parse(flags)
        assert (settings.train.learning_rate, settings.train.seed, settings.train.logging_steps) == (1e-3, 6, 10)


@pytest.mark.parametrize("preset", PRESETS)
def test_shipped_preset(preset):
    settings = parse(["--config", preset])
    assert settings != parse([])
    paths = [value for value in settings.as_flat().values() if isinstance(value, str) and Path(value).is_absolute()]
    assert all(Path(path).exists() for path in paths)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--dataset_name=squad"], {"train_file": None, "validation_file": None, "config_name": "c"}),
        (["--model_name_or_path=bert", "--tokenizer_name=mine"], {"config_name": None, "tokenizer_name": "mine"}),
    ],
)
def test_source_on_the_command_line_replaces_the_files(tmp_path, flags, expected):
    name = write(tmp_path, "config_name: c\ntokenizer_name: k\ntrain_file: t\nvalidation_file: v\n")
    settings = parse(["--config", name, *flags]).as_flat()
    assert {key: settings[key] for key in expected} == expected


# --- flags given twice or overridden ----------------------------------------------------------------


def test_the_benchmark_replaces_the_users_length() -> None:
    words = ["--steps", "4", "--repeats", "2", "--save_steps", "3", "--do_eval", "--max-steps", "5"]
    flags, config = bench.parse(words)
    assert flags.replaced == ["do_eval", "max_steps", "save_steps"]
    assert (config.checkpoint.save_steps, config.train.do_eval, config.train.max_steps) == (0, False, 12)


def test_dropped_flags_are_removed_in_all_spellings() -> None:
    words = ["--seed", "1", "--max-seq-length=9", "--no_do_eval", "--bf16", "--timeline-file", "a"]
    words += ["--null_score_diff_threshold", "-1e-5"]
    remaining = ["--seed", "1", "--bf16", "--null_score_diff_threshold", "-1e-5"]
    assert drop_flags(words, ["max_seq_length", "do_eval", "timeline"]) == remaining
    assert parse(remaining).as_flat()["null_score_diff_threshold"] == -1e-5
    assert override_argv(words, ["--seed=2", "--do_eval"]) == [*words[2:3], *words[4:], "--seed=2", "--do_eval"]


def test_more_micro_batches_than_windows() -> None:
    args = parse(["--gradient_accumulation_steps", str(2**32 - 1)]).train
    with refused("--gradient_accumulation_steps 4294967295", "20 windows"):
        make_plan([8] * 20, args, 1, World())
