"""Load data sets, configurations, tokenizers and models from a folder, the Hugging Face cache or the Hugging Face hub.

The hub is contacted only for data that is not cached. Only this module calls `from_pretrained`, so that every
error in loading becomes a UserError, and Python code in a model's folder never runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_bert.errors import UserError, as_user_error, short_reason
from hvd_bert.storage.reading import read_json

if TYPE_CHECKING:
    from datasets import Dataset

# The hub moved these data sets and models to their authors' namespaces; a local cache may use either name.
_MOVED = """
rajpurkar/squad rajpurkar/squad_v2 ylecun/mnist nyu-mll/glue google-bert/bert-base-uncased google-bert/bert-base-cased
google-bert/bert-large-uncased FacebookAI/roberta-base FacebookAI/roberta-large FacebookAI/xlm-roberta-base
FacebookAI/xlm-roberta-large distilbert/distilbert-base-uncased distilbert/distilbert-base-cased albert/albert-base-v2
albert/albert-large-v2 almanach/camembert-base
"""
_REACH_TIMEOUT_S = 10.0
LFS_POINTER = "version https://git-lfs.github.com/spec/v1"  # the first line of a pointer file
DEFAULT_MODEL = "bert-base-uncased"


def hub_names(name: str) -> list[str]:
    """Return the names under which a data set or model may be cached, beginning with `name`."""
    pairs = [(moved, moved.partition("/")[2]) for moved in _MOVED.split()]
    return [name, *(other for pair in pairs if name in pair for other in pair if other != name)]


def _may_be_on_hub(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, but not in __all__

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def load_split(
    dataset_name: str,
    split: str,
    dataset_config_name: str | None = None,
    cache_dir: str | None = None,
    ways_out: str = "",
) -> Dataset:
    """Load one split of a data set from the cache or the hub.

    Raises UserError if the split is not available. `ways_out`: the advice at the end of the message.
    """
    if not ways_out:
        sample = ", or train on the bundled sample with --config sample" if split == "train" else ""
        ways_out = f"Give local files with --train_file and --validation_file{sample}."
    import datasets  # slow to import, and not needed for local files

    flag = f"--dataset_name {dataset_name}"
    if not _may_be_on_hub(dataset_name):
        raise UserError(f"{flag}: not the name of a data set on the hub, such as rajpurkar/squad. {ways_out}")
    if os.path.isdir(dataset_name):  # `datasets` would load the folder's files instead
        raise UserError(
            f"{flag}: {dataset_name} is a folder in the working directory. To load the hub's data set, run the command"
            f" in another one. {ways_out}"
        )
    reason: Exception | None = None
    datasets.disable_progress_bars()  # every rank would show its own
    datasets.logging.set_verbosity_error()
    for name, cached in [*((name, True) for name in hub_names(dataset_name)), (dataset_name, False)]:
        try:
            if cached:
                return _cached(name, split, dataset_config_name, cache_dir)
            reach()
            return datasets.load_dataset(
                name, dataset_config_name, split=split, cache_dir=cache_dir, trust_remote_code=False
            )
        # The exceptions for an unreachable hub differ between releases and HTTP libraries.
        except Exception as error:
            reason = error
    assert reason is not None
    raise UserError(
        f"{flag}: split {split!r} is not in the Hugging Face cache on this machine and could "
        f"not be downloaded ({short_reason(reason)}). {ways_out}"
    ) from reason


def _cached(name: str, split: str, config_name: str | None, cache_dir: str | None) -> Dataset:
    """Load a split from the cache only. Setting `datasets` to offline mode instead would affect all threads."""
    from datasets.packaged_modules.cache.cache import Cache

    builder = Cache(cache_dir, name.split("/")[-1], config_name, version="auto", hash="auto", repo_id=name)
    builder.download_and_prepare()
    return builder.as_dataset(split)


def digest(rows: Dataset) -> str:
    """Return the SHA-256 of the rows. The fingerprint that `datasets` computes also depends on the cache's path."""
    table = rows.data.table.replace_schema_metadata(None)
    sha256 = hashlib.sha256(table.schema.serialize())
    for batch in table.to_batches(max_chunksize=1000):
        sha256.update(batch.serialize())
    sha256.update(b"\xff\xff\xff\xff\0\0\0\0")  # Arrow's end-of-stream marker
    return sha256.hexdigest()


# --- models --------------------------------------------------------------------------------------


def load_pretrained(kind: Any, name: str, **options: Any) -> Any:
    """Load with `kind.from_pretrained(name, **options)`. Raises UserError if the model cannot be loaded."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # every rank would print its warnings; our own checks replace them
    transformers_logging.disable_progress_bar()
    with reported(name):
        try:
            return _from_pretrained(kind, name, **options)
        except pickle.UnpicklingError:
            raise ValueError("its weights are pickled objects, which can run code: save them as safetensors") from None
        except ValueError as error:
            if "trust_remote_code" in str(error):  # transformers' message advises setting it
                raise ValueError("it has its own Python code, which this trainer never runs") from None
            if "tiktoken" in str(error) and not find_spec("sentencepiece"):  # transformers names the wrong package
                raise ValueError("its tokenizer needs a package: run `pip install sentencepiece`") from None
            if lacks_model_type(name):
                raise UserError(
                    f'{Path(name) / "config.json"} has no key "model_type", which names the model\'s family. Add it,'
                    ' for a BERT "model_type": "bert", or name a complete configuration of the same model with'
                    " --config_name."
                ) from None
            raise


def _from_pretrained(kind: Any, name: str, **options: Any) -> Any:
    path = Path(name)
    if path.exists():
        _check_folder(kind, path)
        files = [*path.glob("*"), *path.glob("*/*")]  # shards may lie in a sub-folder
        if unreadable := [file for file in files if file.exists() and not (file.is_file() or file.is_dir())]:
            raise ValueError(f"{unreadable[0]} is a pipe or a device, from which nothing is loaded")
        return kind.from_pretrained(name, trust_remote_code=False, **options)
    if not _may_be_on_hub(name):
        raise FileNotFoundError(f"no such folder{'' if path.is_absolute() else f' in {Path.cwd()}'}")
    for cached_name in hub_names(name):
        with contextlib.suppress(OSError):
            return kind.from_pretrained(cached_name, trust_remote_code=False, local_files_only=True, **options)
    try:
        reach()
    except Exception:
        raise FileNotFoundError(
            f"no such folder in {Path.cwd()}, the model is not in the hub's cache, and the hub does not answer"
        ) from None
    return kind.from_pretrained(name, trust_remote_code=False, **options)


def _check_folder(kind: Any, path: Path) -> None:
    """Raise UserError if a path holds nothing that the class `kind` could load. A configuration may be a JSON file."""
    if path.is_file() and not (kind.__name__ == "AutoConfig" and path.suffix == ".json"):
        raise UserError(
            f"{path} is a file, but a model is a folder or a name on the hub. If it has weights of another program,"
            " load them, and name the folder that transformers' `save_pretrained` writes. Data files have flags of"
            " their own: --train_file, --validation_file, --input."
        )
    needed = ["config.json"] if kind.__name__ != "AutoTokenizer" else ["config.json", "*token*", "vocab*", "*.model"]
    if path.is_dir() and all(file.is_dir() for pattern in needed for file in path.glob(pattern)):
        remedy = _folders_in(path)
        if (path / "adapter_config.json").exists():
            remedy = "Merge its adapter into the model (peft's `merge_and_unload`), save that, and name its folder."
        lacks = "model (config.json is missing)"
        if kind.__name__ == "AutoTokenizer":
            lacks = "model or tokenizer (config.json and tokenizer.json are missing)"
        raise UserError(f"The folder '{path}' holds no {lacks}. {remedy}")


def _folders_in(path: Path) -> str:
    """Return the remedy for a folder without a model: name one of the models or runs in it, or in its subfolders."""
    for levels in ("*", "*/*"):
        files = [file for name in ("config.json", "train_config.yaml") for file in path.glob(f"{levels}/{name}")]
        if found := sorted({str(file.parent) for file in files}):
            more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
            return f"It holds {', '.join(found[:3])}{more}: name one of them."
    return "Name another."


def reported(name: str) -> contextlib.AbstractContextManager[None]:
    """Context manager: convert an exception to a UserError that states why `name` cannot be loaded, and what to do."""
    sample = ""
    if name == DEFAULT_MODEL:  # no model was named
        sample = ", or try `python -m hvd_bert.train --config sample`, which has a model of its own"
    return as_user_error(
        lambda reason: (
            f"'{name}' cannot be loaded ({lfs_pointers(name) or reason}). Check the name and the files, or name another"
            f" model or a local folder{sample}."
        )
    )


def lfs_pointers(name: str) -> str:
    """Describe the files in the folder `name` that git-lfs has not downloaded; "" if there are none."""
    paths = sorted(Path(name).glob("*")) if os.path.isdir(name) else []
    files = (path for path in paths if path.is_file() and os.access(path, os.R_OK))
    found = [path.name for path in files if path.open("rb").read(len(LFS_POINTER)) == LFS_POINTER.encode()]
    return f"{', '.join(found)}: only a git-lfs pointer; run `git lfs pull` in the folder" if found else ""


def lacks_model_type(name: str) -> bool:
    """Return whether `name` is a folder whose config.json lacks "model_type", as in old models."""
    path = Path(name) / "config.json"
    with reported(name):
        return path.is_file() and "model_type" not in _json_object(path)


def json_file(name: str, file: str, cache_dir: str | None, revision: str) -> dict[str, Any]:
    """Read a JSON file of `name`, a folder or a cached hub model. Returns {} if the file does not exist.

    Raises ValueError if it does not contain a JSON object.
    """
    from huggingface_hub import try_to_load_from_cache

    folder = Path(name)
    if folder.exists():
        return _json_object(folder / file) if (folder / file).is_file() else {}
    for cached_name in hub_names(name):
        path = try_to_load_from_cache(cached_name, file, cache_dir, revision)
        if isinstance(path, str):
            return _json_object(Path(path))
    return {}


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} must contain a JSON object")
    return content


# --- the network ---------------------------------------------------------------------------------


def reach() -> None:
    """Raise an exception if HF_HUB_OFFLINE is set, or if the hub does not answer within 10 s.

    The libraries themselves would retry for minutes.
    """
    import datasets
    import huggingface_hub

    if datasets.config.HF_HUB_OFFLINE:
        raise ConnectionError("HF_HUB_OFFLINE is set")
    huggingface_hub.get_session().head(datasets.config.HF_ENDPOINT, timeout=_REACH_TIMEOUT_S)
