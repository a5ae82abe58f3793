"""Loads a data set from the Hugging Face hub or, without a network, from its cache on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hvd_bert.errors import UserError, reason_of

if TYPE_CHECKING:
    from datasets import Dataset

# The hub moved these data sets and models to their authors' namespaces; a local cache may have either name.
_OWNERS = {
    "rajpurkar": ("squad", "squad_v2"),
    "ylecun": ("mnist",),
    "nyu-mll": ("glue",),
    "google-bert": ("bert-base-uncased", "bert-base-cased", "bert-large-uncased"),
    "FacebookAI": ("roberta-base", "roberta-large", "xlm-roberta-base", "xlm-roberta-large"),
    "distilbert": ("distilbert-base-uncased", "distilbert-base-cased"),
    "albert": ("albert-base-v2", "albert-large-v2"),
    "almanach": ("camembert-base",),
}
_REACH_TIMEOUT_S = 10.0
_WAYS_OUT = (
    "Give local files with --train_file and --validation_file, or train on the bundled sample with --config sample."
)


def names_of(name: str) -> list[str]:
    """The names under which a cache may have a data set or model, the given one first."""
    pairs = [(old, f"{owner}/{old}") for owner, names in _OWNERS.items() for old in names]
    return [name, *(other for pair in pairs if name in pair for other in pair if other != name)]


def load(
    dataset_name: str,
    split: str,
    dataset_config_name: str | None = None,
    cache_dir: str | None = None,
    ways_out: str = _WAYS_OUT,
) -> Dataset:
    """One split of a data set. Raises `UserError` with `ways_out` if it is not available.

    The local cache comes first: it needs no network, and N ranks do not all contact the hub.
    """
    import datasets  # slow to import, and not needed for files
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, but not in __all__

    flag = f"--dataset_name {dataset_name}"
    try:
        validate_repo_id(dataset_name)
    except HFValidationError:
        raise UserError(f"{flag}: not the name of a data set on the hub, such as rajpurkar/squad. {ways_out}") from None
    if os.path.isdir(dataset_name):  # `datasets` would read the files in it
        raise UserError(
            f"{flag}: {dataset_name} is a folder in the working directory. To load the hub's data set, run the command"
            f" in another one. {ways_out}"
        )
    names = [name for name in names_of(dataset_name) if not os.path.isdir(name)]
    reason: Exception | None = None
    datasets.disable_progress_bars()  # which every rank would show
    datasets.logging.set_verbosity_error()
    for name, offline in [*((name, True) for name in names), (dataset_name, False)]:
        try:
            with _offline() if offline else contextlib.nullcontext():
                if not offline:
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
        f"not be downloaded ({reason_of(reason)}). {ways_out}"
    ) from reason


def reach() -> None:
    """Raise any Exception if the hub does not answer within seconds; its libraries' loaders retry for minutes."""
    import datasets
    import huggingface_hub

    if datasets.config.HF_HUB_OFFLINE:
        raise ConnectionError("HF_HUB_OFFLINE is set")
    huggingface_hub.get_session().head(datasets.config.HF_ENDPOINT, timeout=_REACH_TIMEOUT_S)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def digest(rows: Dataset) -> str:
    """SHA-256 of the rows; the fingerprint of `datasets` also depends on the path of its cache."""
    table = rows.data.table.replace_schema_metadata(None)
    sha256 = hashlib.sha256(table.schema.serialize())
    for batch in table.to_batches(max_chunksize=1000):
        sha256.update(batch.serialize())
    sha256.update(b"\xff\xff\xff\xff\0\0\0\0")  # the end of the stream in Arrow's format
    return sha256.hexdigest()
