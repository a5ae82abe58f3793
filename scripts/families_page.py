#!/usr/bin/env python3
"""Write docs/reference/families.md, the families of encoders, from transformers' and this package's tables.

    python scripts/families_page.py

Run this after a change to `hvd_bert/model/families.py`. `tests/unit/test_families.py` checks that the page is current.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hvd_bert.model.families import FAMILIES, model_class

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "families.md"
INTRODUCTION = """\
<!-- Written by `python scripts/families_page.py`. Edit hvd_bert/model/families.py, then rerun the script. -->

# Model families

`--model_name_or_path` takes encoders, fastest those of the families below. The family is the `model_type` in
`config.json`. [Tasks of your own](../guides/tasks.md#encoders-and-texts) take the same families if transformers has the
head for them.

- **Packed** families run without padding: each token attends to its own window only.
- **Padded** families have an attention that takes no packed windows. Their windows are padded to the longest of the
  batch, which takes computing time.

Other families with a head for question answering, such as SqueezeBERT, run padded with transformers' own layers, and
the run logs this. It does not know their FLOP, and weights that their head does not use stay as they are. It refuses
families that need more than text or whose results depend on padding (FNet, YOSO), and
[some tokenizers](../guides/own-data.md#models), such as those of most decoders.

Windows equal run_qa's. Special tokens and token types follow the model's own tokenizer; a model with two token types
always gets them, also where the tokenizer returns none by default (ALBERT, RemBERT, Splinter), and a model with one
type gets type 0. `--torch_compile` needs layers that are built as BERT's.

Tests compare each of these families with transformers: logits to 1e-5, gradients to 1e-4 of their size.
"""


def page() -> str:
    """Return the whole page as Markdown."""
    names = {"Packed": [], "Padded": []}  # type: dict[str, list[str]]
    for name, family in FAMILIES.items():
        config = CONFIG_MAPPING[name]()
        checkpointing = model_class(config).supports_gradient_checkpointing
        without = ["--bf16", "--fp16"] if family.only_fp32 else []
        without += [] if checkpointing else ["--gradient_checkpointing"]
        notes = [f"refuses {', '.join(f'`{flag}`' for flag in without)}"] if without else []
        notes += [f"transformers {family.since} or later"] if family.since else []
        note = f" ({', '.join(notes)})" if notes else ""
        names["Packed" if family.packed else "Padded"].append(f"`{name}`{note}")
    lists = [
        textwrap.fill(f"- **{kind}**: {', '.join(listed)}", 120, subsequent_indent="  ", break_on_hyphens=False)
        for kind, listed in names.items()
    ]
    return "\n".join([INTRODUCTION, *lists]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
