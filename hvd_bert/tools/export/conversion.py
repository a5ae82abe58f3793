"""Converts a model folder to ONNX with torch's exporter, and checks the result with onnxruntime."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig

from hvd_bert.config.settings import ModelArguments
from hvd_bert.errors import UserError, reason_of
from hvd_bert.model.bert import load_tokenizer, takes_token_types
from hvd_bert.model.families import max_tokens
from hvd_bert.model.loading import load
from hvd_bert.storage.writing import replacing, writing_to
from hvd_bert.tools.rendering.named import check_file

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4  # of logits, which are about 1 to 10: fp32 operations in another order
OUTPUTS = ("start_logits", "end_logits", "logits")
QUESTION, CONTEXT = "What is in the box?", "The box in the hall is red. A small green ball is in it."
Inputs = dict[str, Tensor]


def convert(folder: Path, output: Path) -> Iterator[str]:
    """Write the model in `folder` as the ONNX file `output`. Yields lines that tell what was done. Raises UserError.

    There is a file only if its logits are transformers'.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"Converting needs {', '.join(missing)}: install with `pip install {' '.join(missing)}`, or with the extra"
            " `onnx` of this package."
        )
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder. Name the output folder of a training.")
    if os.path.lexists(output):
        raise UserError(f"--output {output} exists: name another file, or remove it.")
    if not output.parent.is_dir():
        raise UserError(f"--output {output}: {output.parent} is not a folder. Create it first.")
    with writing_to("--output", output):
        check_file(output)
    args = ModelArguments(model_name_or_path=str(folder))
    tokenizer = load_tokenizer(args)
    model = _load_model(folder, args)
    types = ["token_type_ids"] if takes_token_types(model.config, str(folder), tokenizer) else []
    batches = _batches(tokenizer, model.config, ["input_ids", "attention_mask", *types])
    with writing_to("--output", output), replacing(output) as partial:
        with _converting(model.config.model_type):
            names = export(model, batches[1], partial)
            apart = [_difference(model, partial, batch) for batch in batches]
        difference = float(torch.stack(apart).max())  # NaN if one of them is: Python's max would drop it
        if not difference <= TOLERANCE:
            raise UserError(
                f"{folder}: the logits of the converted model differ from transformers' by up to {difference:.2g}, more"
                f" than {TOLERANCE:g}. No file is written: torch's exporter does not support this model."
            )
        size = partial.stat().st_size
    yield f"{output}: {size / 1e6:.1f} MB, from {folder} ({model.config.model_type})"
    yield f"  inputs   {', '.join(batches[0])}: int64 [batch, sequence]"
    yield f"  outputs  {', '.join(names)}: float32"
    yield f"  maximum difference of the logits from transformers' {difference:.1e} (limit {TOLERANCE:g})"


def _load_model(folder: Path, args: ModelArguments) -> Any:
    """transformers' own model, of the class that config.json names."""
    config = load(AutoConfig, str(folder), args)
    name = next(iter(getattr(config, "architectures", None) or ["no class"]))
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise UserError(
            f"{folder}/config.json: architectures names {name}, which is not a model class of transformers."
        )
    model, info = load(kind, str(folder), args, config=config, dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"] or info["mismatched_keys"]:
        lost = ", ".join(map(str, sorted(map(str, info["missing_keys"]))[:3])) or "weights of another shape"
        raise UserError(f"{folder} has no weights for its whole model ({lost}). Name the output folder of a training.")
    return model.eval()


def _batches(tokenizer: Any, config: Any, names: Sequence[str]) -> list[Inputs]:
    """Texts as others will tokenize them: batches of several sizes and lengths, with padding."""
    batches = []
    for size, repeats in ((1, 1), (2, 2), (3, 4), (1, 8)):  # pairs of texts, and how often the first one's is repeated
        contexts = [" ".join([CONTEXT] * max(1, repeats - number)) for number in range(size)]
        encoded = tokenizer(
            [QUESTION] * size, contexts, padding=True, truncation="only_second", max_length=max_tokens(config),
            return_token_type_ids=True, return_tensors="pt",
        )  # fmt: skip
        batches.append({name: encoded[name] for name in names})
    return batches


def export(model: Any, example: Inputs, path: Path) -> list[str]:
    """Write the ONNX file. Returns the names of its outputs."""
    with torch.no_grad():
        output = model(**example)
    names = [name for name in OUTPUTS if name in output]
    axes = {name: {0: "batch", 1: "sequence"} for name in example}
    program = torch.onnx.export(
        model, kwargs=example, input_names=[*example], output_names=names, dynamic_shapes=axes, dynamo=True,
        verbose=False,
    )  # fmt: skip
    assert program is not None  # the exporter without dynamo returns None
    program.save(path, external_data=False)
    return names


@contextmanager
def _converting(model_type: str) -> Iterator[None]:
    """Around torch's exporter and onnxruntime: without their warnings, and whatever they raise as a UserError."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except OSError:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # the first error says most
            cause = cause.__cause__
        raise UserError(
            f"{model_type} models cannot be converted to ONNX by torch {torch.__version__} ({reason_of(cause)}). No"
            " file is written. Use the model with transformers, or fine-tune one of another family."
        ) from None
    finally:
        logging.disable(disabled)


def _difference(model: Any, path: Path, batch: Inputs) -> Tensor:
    """The maximum difference between onnxruntime's logits and transformers', except at padding."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    feed = {value.name: batch[value.name].numpy() for value in session.get_inputs()}
    found: Sequence[Any] = session.run(names, feed)
    with torch.no_grad():
        expected = model(**batch)
    mask = batch["attention_mask"].bool()
    differences = []
    for name, values in zip(names, found, strict=True):
        apart = (torch.from_numpy(values) - expected[name]).abs()
        differences.append(apart[mask].max() if apart.shape == mask.shape else apart.max())
    return torch.stack(differences).max()
