"""The parser of the trainer's flags, made from the fields of `hvd_bert.config.settings`."""

from __future__ import annotations

import argparse
from typing import Any

from transformers.hf_argparser import HfArgumentParser

from hvd_bert.config.flag import GROUPS, Flag
from hvd_bert.config.parser import HelpFormatter, Parser
from hvd_bert.config.settings import SECTIONS
from hvd_bert.config.values import StoreLast

EPILOG = (
    "A switch such as --bf16 also takes a value (--bf16 False). Flags may be written with hyphens"
    " (--max-seq-length). Flags on the command line override those of --config."
)


class FlagsParser(Parser, HfArgumentParser):
    """Puts each flag into its group, with the default that a run uses."""

    def __init__(self, presets: list[str]) -> None:
        self.groups: dict[str, argparse._ArgumentGroup] = {}
        super().__init__(
            SECTIONS,
            prog="python -m hvd_bert.train",
            usage="%(prog)s [-h] [--config NAME|FILE.yaml] [--FLAG VALUE ...]",
            description="Fine-tune BERT on SQuAD, or train another task, with Horovod or another strategy.",
            epilog=EPILOG,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument(
            "--config",
            metavar="NAME|FILE.yaml",
            help=f"Preset ({', '.join(presets)}) or YAML file of flags. (default: none)",
        )

    def add_argument(self, *names: str, flag: Flag | None = None, **options: Any) -> argparse.Action:
        """Like argparse's. `flag`: a field's properties, which HfArgumentParser passes on with the metadata."""
        if flag is None:
            return super().add_argument(*names, **options)
        if not self.groups:
            self.groups = {group: self.add_argument_group(group) for group in GROUPS}
        if options.get("action") == "store_false":  # --no_X
            options |= {"help": flag.negated_help, "action": "store", "nargs": 0, "const": False}
        else:
            options["help"] = f"{flag.help} (default: {flag.shown_default})"
            placeholder = {int: "N", float: "X"}.get(options["type"])
            if placeholder:
                options.setdefault("metavar", placeholder)
        if options.get("action", "store") == "store":
            options["action"] = StoreLast
        return self.groups[flag.group].add_argument(*names, **options)
