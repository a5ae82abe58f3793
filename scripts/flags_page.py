#!/usr/bin/env python3
"""Write the pages of flags, of what works with which strategy (support.md), and a table of exit-status.md.

    python scripts/flags_page.py

Run this after a change to a flag, a strategy or an exit status. `tests/unit/test_docs.py` compares the pages.
"""

from __future__ import annotations

import argparse
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hvd_bert.config import command_line
from hvd_bert.config.parser import invocation
from hvd_bert.config.settings import FLAGS
from hvd_bert.config.strategies import ALONE, HOROVOD, STRATEGIES, StrategyRow
from hvd_bert.errors import STATUSES, UserError
from hvd_bert.predict import __main__ as predict
from hvd_bert.tools.bench import __main__ as bench
from hvd_bert.tools.bench import sweep
from hvd_bert.tools.doctor import __main__ as doctor
from hvd_bert.tools.evaluate import __main__ as evaluate
from hvd_bert.tools.report import __main__ as report
from hvd_bert.tools.timeline import __main__ as timeline
from hvd_bert.tools.tune import __main__ as tune

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "flags.md"
EXIT_PAGE = PAGE.with_name("exit-status.md")
SUPPORT_PAGE = PAGE.with_name("support.md")
INTRODUCTION = """\
<!-- Written by `python scripts/flags_page.py`. Edit the flags' descriptions in the code, then rerun the script. -->

# Flags

`hvd-bert --help` prints the commands, and `COMMAND --help` the flags of a command. `train --help` prints the most used
flags, `train --help all` all, `train --help data` a group, `train --help seed` a flag.

## Training

`python -m hvd_bert.train`, or `hvd-bert train`

Flags of Hugging Face's run_qa keep their names ([differences](../guides/migrating.md#from-run_qa)). `--config` takes a
preset or a YAML file of flags; flags on the command line override it. Values in the file mean the same: YAML does not
convert `1:30`, `010` and `no`. A switch also takes a value: `--bf16 False`. If a flag is given twice, the last value
counts.

In paths, also in Python and in `HVD_BERT_CACHE`, `~` and variables such as `$HOME` are expanded. Addresses such as
`s3://` are refused.

Flags with † must keep their values when a run resumes. Some of the others have
[conditions](../guides/resume-and-reliability.md#settings-that-may-change-on-resume).
"""
SUPPORT_INTRODUCTION = """\
<!-- Written by `python scripts/flags_page.py` from what the trainer refuses. -->

# Support matrix

Features and the [strategies](../guides/strategies.md) that take them. Other flags work with every strategy. At a
"no" the trainer refuses to start, for the reason with that number.
"""
SUPPORT_END = """\
Some [model families](families.md) refuse a feature.

**No GPU has run any of it yet**, so `dp` has never run
([tested without a GPU](../evidence/gpu-acceptance.md#tested-without-a-gpu)).
"""
# Flags of a feature in the support matrix -> its name, if they do not contain it.
FEATURES = {
    "": "fp32",
    "--bf16": "",
    "--fp16": "",
    "--fp16_allreduce": "",
    "--bf16_allreduce": "",
    "--num_groups 2": "",
    "--zero_stage 1": "",
    "--torch_compile": "",
    "--torch_compile_mode reduce-overhead": "",
    "--gradient_checkpointing": "",
    "--gradient_accumulation_steps 2": "",
    "--per_device_train_batch_size auto": "",
    "--padding longest": "",
    "--optim lamb": "LAMB",
    "--optim lars": "LARS",
    "--layerwise_lr_decay 0.9": "",
    "--ema_decay 0.999": "EMA",
    "--lora_rank 8": "LoRA",
    "--deterministic": "",
    "--profile": "",
    "--timeline_file FILE": "",
    "--resume_from_checkpoint latest": "",
}
# Features of which no flag is refused when it is parsed -> the reason why strategies refuse them later, and which do.
REFUSED_LATER: dict[str, tuple[str, Callable[[StrategyRow], bool]]] = {
    "Resume under another strategy": ("fixed.", lambda row: not FLAGS["strategy"].may_change_on_resume),
    "`--elastic`": ("works only with horovod.", lambda row: row.world != HOROVOD),
    "Several ranks, any [launcher](../guides/strategies.md#launchers)": (
        "it is one process.",
        lambda row: row.world == ALONE,
    ),
    "CPUs": ("it needs 2 GPUs.", lambda row: row.several_gpus),
}
OTHERS = {
    "Benchmark": bench,
    "Sweep": sweep,
    "Report": report,
    "Timeline": timeline,
    "Tuning": tune,
    "Preflight check": doctor,
    "Prediction": predict,
    "Evaluation": evaluate,
}
HELP_TEXT = re.compile(r"(?P<description>.*?)(?: \((?:default: (?P<default>.*)|(?P<required>required))\))?", re.DOTALL)


def page() -> str:
    """Return the whole page as Markdown."""
    blocks = [INTRODUCTION.rstrip(), *_tables(command_line.make_parser(), resume=True)]
    for title, command in OTHERS.items():
        parser = command.make_parser()
        blocks += [f"## {title}", f"`{parser.prog}`", _prose(str(parser.description)), *_tables(parser)]
    return "\n\n".join(blocks) + "\n"


def exit_page() -> str:
    """Return the page of exit statuses with an updated table."""
    rows = [["status", "meaning"], ["---", "---"], *([str(status), text] for status, text in STATUSES.items())]
    table = "\n".join(map(_line, rows))
    return re.sub(r"(?s)(?<=\A# Exit status\n\n).*?(?=\n\n)", lambda _: table, EXIT_PAGE.read_text(encoding="utf-8"))


def support_page() -> str:
    """Return the support matrix as Markdown: a row per feature, a column per strategy."""
    refusals = {flags: {strategy: _refusal(strategy, flags) for strategy in STRATEGIES} for flags in FEATURES}
    reasons: list[str] = []
    rows = [["Feature", *(f"`{name}`" for name in STRATEGIES)], ["---"] * (len(STRATEGIES) + 1)]
    for flags, name in FEATURES.items():
        rows.append([f"{name} `{flags}`".strip() if flags else name, *_cells(refusals[flags].values(), reasons)])
    for feature, (reason, refuses) in REFUSED_LATER.items():
        rows.append([feature, *_cells([refuses(row) * reason for row in STRATEGIES.values()], reasons)])
    pairs = itertools.combinations(FEATURES, 2)
    excluded = [f"`{one}` and `{other}`" for one, other in pairs if _exclude(one, other, refusals)]
    blocks = [
        SUPPORT_INTRODUCTION.rstrip(),
        "\n".join(f"|{'|'.join(cells)}|" for cells in rows),  # without spaces, since most cells are one word
        "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)),
        _prose(f"Not together: {', '.join(excluded)}."),
        SUPPORT_END,
    ]
    return "\n\n".join(blocks)


def _refusal(strategy: str, *flags: str) -> str:
    """Return the message with which the trainer refuses flags with a strategy; "" if it takes them."""
    try:
        command_line.parse(["--strategy", strategy, *" ".join(flags).split()])
    except UserError as error:
        return str(error)
    return ""


def _exclude(one: str, other: str, refusals: dict[str, dict[str, str]]) -> bool:
    """Return whether the trainer takes each of two features with a strategy, but not both together."""
    both = [strategy for strategy in STRATEGIES if not refusals[one][strategy] and not refusals[other][strategy]]
    return bool(both) and bool(_refusal(both[0], one, other))


def _cells(refusals: Iterable[str], reasons: list[str]) -> list[str]:
    """Return a cell per message: "yes" if it is "", else "no" and the number of its reason, which joins `reasons`."""
    cells = []
    for message in refusals:
        reason = re.sub(r"^--.* does not work with --strategy \w+[:.] |^--\w+ |--strategy |, not with \w+", "", message)
        text = _as_code(reason[:1].upper() + reason[1:])
        if text and text not in reasons:
            reasons.append(text)
        cells.append(f"no<sup>{reasons.index(text) + 1}</sup>" if text else "yes")
    return cells


def _tables(parser: argparse.ArgumentParser, resume: bool = False) -> Iterator[str]:
    """Yield a table of the flags without a group, then a heading and a table per group."""
    header = ["Flag", "Default", "Description"]
    head = [_line(header), _line(["---"] * len(header))]
    without_group: list[str] = []
    for number, group in enumerate(parser._action_groups):
        rows = [_row(action, resume) for action in group._group_actions if action.dest != "help"]
        if number < 2:  # argparse's own groups: positional arguments and options
            without_group += rows
        if number == 1:
            yield "\n".join([*head, *without_group])
        if number > 1:
            yield f"### {str(group.title).capitalize()}"
            if group.description:
                yield _prose(group.description)
            yield "\n".join([*head, *rows])


def _row(action: argparse.Action, resume: bool) -> str:
    match = HELP_TEXT.fullmatch(str(action.help) % vars(action))
    assert match
    default = match["default"] or match["required"] or ("not set" if action.option_strings else "required")
    if default in (str(action.default), f"{action.default:g}" if isinstance(action.default, float) else ""):
        default = f"`{default}`"
    fixed = resume and action.dest != "config" and not FLAGS[action.dest].may_change_on_resume
    return _line([f"`{invocation(action)}`{'†' * fixed}", _as_code(default), _as_code(match["description"])])


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", " or ") for cell in cells) + " |"


def _prose(text: str) -> str:
    return textwrap.fill(_as_code(text), 120, break_long_words=False, break_on_hyphens=False)


def _as_code(text: str) -> str:
    """Put the flags and commands of a text in backticks."""
    spans = r"`[^`]*`|(?:python -m |hvd-bert )\w+(?:\.\w+)*(?: sweep)?(?: --help)?|--[a-z][a-z0-9_]*(?:=\S*[a-z0-9])?"
    return re.sub(spans, lambda match: match[0] if match[0].startswith("`") else f"`{match[0]}`", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    EXIT_PAGE.write_text(exit_page(), encoding="utf-8")
    SUPPORT_PAGE.write_text(support_page(), encoding="utf-8")
    print(PAGE, EXIT_PAGE, SUPPORT_PAGE)
