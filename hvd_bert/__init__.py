"""Fine-tunes BERT for question answering (SQuAD) over many ranks with Horovod."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_bert.predict.answerer import QuestionAnswerer

__all__ = ["QuestionAnswerer", "__version__"]
__version__ = "0.1.0"

# `python -m hvd_bert.NAME` imports this file first, before it sets sys.argv[0].
if sys.argv[:1] == ["-m"] and any(word.startswith(f"{__name__}.") for word in sys.orig_argv):
    from hvd_bert.streams import end_when_interrupted

    end_when_interrupted()


def __getattr__(name: str) -> Any:
    """Import `QuestionAnswerer` on first use: every command imports this file, and torch takes seconds."""
    if name != "QuestionAnswerer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("hvd_bert.predict.answerer").QuestionAnswerer
