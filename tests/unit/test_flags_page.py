"""scripts/flags_page.py: docs/reference/flags.md is current, and every flag of every command is described."""

from __future__ import annotations

import sys
from pathlib import Path

from tables import each

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import flags_page


def test_the_page_is_current():
    written = flags_page.PAGE.read_text(encoding="utf-8")
    assert written == flags_page.page(), "run `python scripts/flags_page.py`"


@each("title", flags_page.OTHERS)
def test_every_command_describes_its_flags(title):
    parser = flags_page.OTHERS[title].make_parser()
    assert parser.prog.startswith(("hvd-bert ", "python -m hvd_bert.sample")) and parser.description
    actions = {action.dest: action.help or "" for action in parser._actions}
    assert actions.pop("help")
    for name, text in actions.items():
        assert text[:1].isupper() or text.startswith("strong:") or text.startswith("HOROVOD_"), name
        assert text.endswith((".", ")")) and "\n" not in text, name
