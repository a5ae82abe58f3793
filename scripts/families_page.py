#!/usr/bin/env python3
"""Write docs/reference/families.md, the families of encoders, from transformers' and this package's tables.

    python scripts/families_page.py

Run it after a change to `hvd_bert/model/families.py` or an update of transformers. `tests/unit/test_families.py` checks
that the page is current.
"""

from __future__ import annotations

from pathlib import Path

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSES

from hvd_bert.model.families import family_of, model_class

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "families.md"
INTRODUCTION = """\
<!-- Written by `python scripts/families_page.py`. Edit hvd_bert/model/families.py, then rerun the script. -->

# Model families

`--model_name_or_path` takes encoders that have a question-answering head in transformers. The family is the
`model_type` in the model's `config.json`.

- **Packed** families run without padding: each token attends to its own window only.
- **Padded** families have an attention of their own, which takes no packed windows. The trainer pads their windows to
  the longest of the batch, and prints so at the start. Padding takes computing time.
- Other families are refused at the start, with the reason.

Tests compare each family that is not refused with transformers: logits to 1e-5 and gradients to 1e-4 of their size.
Windows equal run_qa's, which is tested with each kind of fast tokenizer: BERT's, RoBERTa's, ALBERT's, CamemBERT's,
XLM-RoBERTa's, DeBERTa's (v1, v2), DistilBERT's, ELECTRA's, ModernBERT's, MPNet's and Splinter's. A tokenizer that pads
on the left is refused.

The special tokens and token types are those of the layout of the model's own tokenizer. A model with two token types
gets them, whether its tokenizer returns them by default or not: since transformers 5 those of ALBERT, RemBERT and
Splinter do not. The tokenizer in the output folder does. `--torch_compile` needs layers that are built as BERT's;
otherwise it is refused.

`--task text-classification` packs the same families. It is refused if transformers has no classification head.
"""


def page() -> str:
    """The whole page as Markdown."""
    rows = {"Packed": [], "Padded": [], "Refused": []}  # type: dict[str, list[str]]
    for name in sorted(MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES):
        config = CONFIG_MAPPING[name]()
        family = family_of(config)
        positions = "pad_token_id + 1" if family.positions_after_padding else "0"
        checkpointing = model_class(config).supports_gradient_checkpointing
        without = [*family.unsupported, *([] if checkpointing else ["--gradient_checkpointing"])]
        without += [] if type(config) in CLASSES else ["--task text-classification"]
        flags = ", ".join(f"`{flag}`" for flag in without) or "none"
        kind = "Refused" if family.refused else "Packed" if family.packed else "Padded"
        rows[kind].append(f"| `{name}` | {family.refused or f'{positions} | {flags}'} |")
    blocks = [INTRODUCTION.rstrip()]
    for kind, lines in rows.items():
        columns = ["Family", *(["Reason"] if kind == "Refused" else ["First position", "Flags that are refused"])]
        head = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
        blocks += [f"## {kind} families", "\n".join([*head, *lines])]
    return "\n\n".join(blocks) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
