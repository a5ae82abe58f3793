"""Horovod's strategy: ring-allreduce averages gradients while the backward pass still runs.

Comments name the pitfalls of Horovod 0.28 that the code avoids.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hvd_bert.distributed.world import World
from hvd_bert.strategies.base import MakeOptimizer, Strategy, StrategyOptions

# With more ranks, all their words' rows together may be more bytes than a ring-allreduce of all rows sends.
MAX_GATHERING = 16


class HorovodStrategy(Strategy):
    """Wraps the optimizer, which sends each gradient as soon as the backward pass has computed it.

    Horovod cannot send bf16: gradients are sent as fp32, or as fp16 with `fp16_allreduce`.
    """

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer, options: StrategyOptions, world: World) -> None:
        import horovod.torch as hvd

        super().__init__(model, make_optimizer, options, world)
        # The optimizer must have its final parameter groups: groups added later would get the class defaults.
        self.optimizer = hvd.DistributedOptimizer(
            self.optimizer,
            named_parameters=model.named_parameters(),
            op=hvd.Average,
            backward_passes_per_step=options.accumulation,
            compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
            # Gradients are put into buffers in the order in which they become ready. From 3 ranks on, a gradient's
            # place in its buffer decides the order of its sum, and so the rounding. A single group always has the
            # same buffer, but no overlap.
            groups=1 if options.deterministic else options.num_groups or None,
        )
        # Only the parameters: broadcasting a fresh AdamW's state takes a hidden step that decays every weight.
        world.broadcast_tensors(model.state_dict())  # one GPU needs no Horovod with NCCL for this
        self._word_rows = self._gathered_words(options)
        # Sent as fp16, a gradient above 65504 becomes inf. All ranks have the same mean and skip such a step. The check
        # synchronizes with the device, so only then.
        self._host_checks |= options.fp16_allreduce and not options.fp16

    def _gathered_words(self, options: StrategyOptions) -> WordRows | None:
        """On CPUs, where it was measured. No group, compressed gradient or compiled model can have a sparse one. LARS
        writes into the gradients, whose zeros are kept."""
        dense = options.deterministic or options.num_groups or options.fp16_allreduce or options.compiled
        if not self._fused or dense or self._world.device.type != "cpu" or not 1 < self._world.size <= MAX_GATHERING:
            return None
        embedding = word_embedding(self.model)
        return WordRows(embedding) if embedding else None

    def synchronize(self) -> None:
        with self._world.waiting(self._not_averaged):
            self.optimizer.synchronize()
        if self._word_rows:
            self._word_rows.make_dense()

    def _not_averaged(self) -> list[str]:
        """Names of the parameters whose averaged gradients have not arrived yet."""
        import horovod.torch as hvd

        def has_arrived(handle: int) -> bool:
            try:
                return bool(hvd.poll(handle))
            except (RuntimeError, ValueError):  # already waited for and released
                return True

        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        handles = {key: handle for key, (handle, _) in self.optimizer._handles.items()}
        # A sparse gradient has a function in place of a handle, which does not tell whether it has arrived.
        late = [key for key, handle in handles.items() if not callable(handle) and not has_arrived(handle)]
        late = late or [key for key, handle in handles.items() if callable(handle)]
        return [names[id(p)] for key in late for p in (key if isinstance(key, tuple) else (key,))]

    def _apply(self) -> bool:
        with self.optimizer.skip_synchronize():
            return super()._apply()


def word_embedding(model: nn.Module) -> nn.Embedding | None:
    """The embedding of the words of a model of transformers, if it is trained and no other layer has its weight."""
    try:
        embedding = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    except NotImplementedError:  # transformers does not know which it is
        return None
    if type(embedding) is not nn.Embedding or not embedding.weight.requires_grad:
        return None
    weights = (weight for module in model.modules() for weight in module.parameters(recurse=False))
    return embedding if sum(weight is embedding.weight for weight in weights) == 1 else None


class WordRows:
    """Makes the gradient sparse, which Horovod gathers from all ranks, and dense again for the optimizer."""

    def __init__(self, embedding: nn.Embedding) -> None:
        """From now on, the backward pass leaves a sparse gradient with one row per word of the batch."""
        embedding.sparse = True
        self._weight = embedding.weight
        self._weight.register_hook(_one_row_per_word)  # before they are sent
        self._dense = torch.zeros_like(self._weight, requires_grad=False)
        self._rows = torch.empty(0, dtype=torch.int64)

    def make_dense(self) -> None:
        """Replace the gathered gradient by a dense one. Rows of equal words are added in the order of the ranks."""
        gradient = self._weight.grad
        if gradient is None or not gradient.is_sparse:  # the model also uses the weight in another way
            return
        if self._dense.view(-1)[0].isnan():  # the last step clipped by a norm that was NaN, so all rows may be NaN
            self._dense.zero_()
        self._dense.index_fill_(0, self._rows, 0.0)  # those of the last step; the others are still zero
        self._rows = gradient._indices()[0]
        self._dense.index_add_(0, self._rows, gradient._values())
        self._weight.grad = self._dense


def _one_row_per_word(gradient: Tensor) -> Tensor:
    return gradient.coalesce() if gradient.is_sparse else gradient
