"""Fine-tune BERT for question answering (SQuAD) on many ranks with Horovod."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hvd_bert.version import __version__

if TYPE_CHECKING:
    from hvd_bert.output.callback import Callback
    from hvd_bert.predict.answerer import QuestionAnswerer
    from hvd_bert.training.api import train

__all__ = ["Callback", "QuestionAnswerer", "__version__", "train"]

_MODULES = {
    "Callback": "hvd_bert.output.callback",
    "QuestionAnswerer": "hvd_bert.predict.answerer",
    "train": "hvd_bert.training.api",
}


def __getattr__(name: str) -> Any:
    """Return a public name. Its module is imported here, not at the top, since importing torch takes seconds."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
