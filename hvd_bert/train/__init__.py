"""The trainer: `__main__.py` is the command, `api.py` is for Python programs, `loop.py` trains.

This module can be called, so that `from hvd_bert import train` gives a function: `train` of `api.py`.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Train(ModuleType):
    def __call__(self, **settings: Any) -> Any:
        from hvd_bert.train.api import train

        return train(**settings)

    def __reduce__(self) -> Any:
        """For cloudpickle, by which Ray and submitit send a program's functions: it knows only plain modules."""
        return import_module, (__name__,)


sys.modules[__name__].__class__ = _Train
