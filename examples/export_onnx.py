"""Export a trained BERT to ONNX, for any batch size and length (tested with torch 2.13.0 and onnxscript 0.7.2).

    python examples/export_onnx.py runs/mine model.onnx

Inputs are the tokenizer's outputs; outputs are `start_logits` and `end_logits`.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer


def main(folder: str, file: str) -> None:
    model = AutoModelForQuestionAnswering.from_pretrained(folder, trust_remote_code=False).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    inputs = tokenizer(["Who?"] * 2, ["Ada was born."] * 2, return_token_type_ids=True, return_tensors="pt")
    torch.onnx.export(
        model,
        kwargs=dict(inputs),
        f=file,
        dynamo=True,
        dynamic_shapes={name: dict.fromkeys((0, 1), torch.export.Dim.AUTO) for name in inputs},
        output_names=["start_logits", "end_logits"],
        external_data=False,  # store the weights in the file
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
