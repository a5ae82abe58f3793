"""Forward and backward passes must not read tensor values on the host, which would wait for the GPU.

tests/fake_cuda cannot detect that transformers reads attention masks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_families import CLASSIFIED, CPU, PACKED, TAGGED, TRAINED, VOCABULARY, models
from torch.utils._python_dispatch import TorchDispatchMode

from hvd_bert.data.collate import Collator
from hvd_bert.evaluation.forward import head_logits, window_losses
from hvd_bert.tools.bench.speed import random_windows

CASES = [(name, None, None) for name in TRAINED] + CLASSIFIED + TAGGED
# Operations that return a value to the host, or whose output shape depends on values.
READS = {"_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select", "nonzero"}
READS |= {"repeat_interleave", "unique_consecutive", "unique_dim"}


class Reads(TorchDispatchMode):
    """Records the operations that make the host wait for tensor values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        indices = args[1] if name.startswith(("index", "_index", "_unsafe_index")) else ()
        by_mask = isinstance(indices, list) and any(index.dtype == torch.bool for index in indices if index is not None)
        if name in READS or by_mask:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("pad_to", [None, 0], ids=["packed", "padded"])
@pytest.mark.parametrize(("name", "heads", "pooling"), CASES)
def test_no_model_reads_on_the_host(name, heads, pooling, pad_to):
    if name not in PACKED and pad_to is None:
        return
    model = models(name, pad_to is not None, pooling, heads)[0]
    batch = Collator(random_windows(np.array([5, 9, 12], np.int32), VOCABULARY, 0), CPU, pad_to)(range(3))
    outputs = head_logits if heads else window_losses
    with Reads() as reads:
        outputs(model.train(), batch).sum().backward()
        with torch.no_grad():
            outputs(model.eval(), batch)
    # Longformer in transformers searches on the host for the tokens with global attention.
    assert bool(reads.found) == (name == "longformer"), reads.found
