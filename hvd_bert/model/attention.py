"""Attention over packed windows: each token attends to its own window only, and there is no padding.

If windows were padded to 384 tokens, more than half of SQuAD's positions would be padding. Here a batch of windows is
one row of N tokens. The model passes its argument `windows`, the windows' borders, to every attention layer. `choose`
selects the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from hvd_bert.model.cpu import fused as fused_kernels
from hvd_bert.model.cpu import kernels
from hvd_bert.model.cpu.attention import Attention, drop_threshold, local_mask, split_by_window

NAME = "packed_windows"
# The first arguments of torch's private operations, as by_flash and by_efficient pass them. torch's public alternatives
# have no dropout (varlen_attn) or are no longer developed (jagged tensors, pytorch#155065).
FLASH = (
    "query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale,"
    " window_size_left, window_size_right"
)
EFFICIENT = (
    "query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, custom_mask_type,"
    " compute_log_sumexp, scale"
)


@dataclass  # --torch_compile would recompile a frozen class or a tuple for each number of windows
class Windows:
    """Borders of the windows in a row.

    Attributes:
        lengths: Tokens per window.
        cu_seqlens: int32 [B + 1] on the device: 0 and each window's end.
        longest: Tokens of the longest window.
        window_size: Largest distance between tokens that attend to each other, for local attention as in ModernBERT;
            None for global attention.
    """

    lengths: list[int]
    cu_seqlens: Tensor
    longest: int
    window_size: int | None = None


def make_windows(lengths: list[int], device: torch.device, window_size: int | None = None) -> Windows:
    """Make the borders of windows of these lengths. `window_size`: see `Windows`."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
    return Windows(lengths, cu_seqlens, max(lengths), window_size)


# (query, key, value, windows, dropout, scaling) -> output; tensors are [N, heads, head size].
Kernel = Callable[[Tensor, Tensor, Tensor, Windows, float, float], Tensor]


def attend_within_windows(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    windows: Windows | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention within each window, for transformers' AttentionInterface.

    `query`, `key`, `value`: [1, heads, N, head size]. Without `windows`, the row is one window. Tokens that are
    `sliding_window` or more positions apart do not attend to each other. `key` and `value` may have fewer heads, each
    shared by a group of query heads. Returns [1, N, heads, head size] and no attention weights.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotary positions make them fp32 under autocast
    if windows is None:
        windows = make_windows([query.shape[2]], query.device)
    if sliding_window and windows.longest > sliding_window:
        windows = replace(windows, window_size=sliding_window - 1)
    drop = dropout if module.training else 0.0
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # [0] would copy the gradients
    size = query.shape[-1]
    options = (query.device, query.dtype, drop, size, windows.window_size is not None)
    inputs = (q, k, v, windows, drop, size**-0.5 if scaling is None else scaling)
    output = by_flash(*inputs) if _is_flash(*options) else _by_other_kernel(options, *inputs)
    return output[None], None


# --torch_compile traces flash as part of a layer's graph. All other kernels run between two graphs, since they read the
# windows' lengths, or torch cannot trace their backward pass (by_efficient, torch 2.13).
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_flash(*options: Any) -> bool:
    return choose(*options) is by_flash


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_other_kernel(options: tuple[Any, ...], *inputs: Any) -> Tensor:
    return choose(*options)(*inputs)


def choose(device: torch.device, dtype: torch.dtype, dropout: float, head_size: int, local: bool = False) -> Kernel:
    """Choose the fastest kernel for these inputs. `local`: whether the attention is local."""
    if device.type == "cuda":
        fused = gpu_kernels(device)
        aligned, half = head_size % 8 == 0, dtype in (torch.float16, torch.bfloat16)
        if by_flash in fused and half and aligned and head_size <= 192:  # some GPUs do not support larger heads
            return by_flash
        if local:
            return by_window
        fits = aligned and dtype in (torch.float16, torch.float32)
        return by_efficient if by_efficient in fused and fits else by_jagged
    on_cpu = kernels.active(dtype).attention if device.type == "cpu" and dropout else kernels.TORCH
    if on_cpu == kernels.FUSED and not local and head_size % fused_kernels.MULTIPLE == 0:
        return by_fused
    return by_window if on_cpu == kernels.TORCH else by_probabilities


@cache
def gpu_kernels(device: torch.device) -> frozenset[Kernel]:
    """Return the fused kernels that this torch supports on the GPU. Flash needs compute capability 8.0 (Ampere)."""
    flash = torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)
    needed = {by_efficient: ("_efficient_attention_forward", EFFICIENT)}
    needed |= {by_flash: ("_flash_attention_forward", FLASH)} if flash else {}
    return frozenset(kernel for kernel, (name, arguments) in needed.items() if _takes(name, arguments))


def _takes(name: str, arguments: str) -> bool:
    """Return whether torch has an operation `name` whose first arguments are `arguments`."""
    operation = getattr(torch.ops.aten, name, None)
    found = operation.default._schema.arguments if operation else ()
    return ", ".join(argument.name for argument in found).startswith(arguments)


def by_flash(query: Tensor, key: Tensor, value: Tensor, windows: Windows, dropout: float, scaling: float) -> Tensor:
    """Compute torch's flash attention over all windows at once, on a GPU in half precision."""
    cu_seqlens, longest = windows.cu_seqlens, windows.longest  # no value is read back from the GPU
    output: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        cum_seq_q=cu_seqlens,
        cum_seq_k=cu_seqlens,
        max_q=longest,
        max_k=longest,
        dropout_p=dropout,
        is_causal=False,
        return_debug_mask=False,
        scale=scaling,
        window_size_left=windows.window_size,
        window_size_right=windows.window_size,
    )[0]
    return output


def by_efficient(query: Tensor, key: Tensor, value: Tensor, windows: Windows, dropout: float, scaling: float) -> Tensor:
    """Compute torch's memory-efficient attention over all windows at once, on a GPU in fp32 or fp16."""
    assert windows.window_size is None
    cu_seqlens, longest = windows.cu_seqlens, windows.longest
    needs_sums = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    output: Tensor = torch.ops.aten._efficient_attention_forward(
        query[None],
        key[None],
        value[None],
        bias=None,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        dropout_p=dropout,
        custom_mask_type=0,
        compute_log_sumexp=needs_sums,
        scale=scaling,
    )[0]
    return output.squeeze(0)


def by_jagged(query: Tensor, key: Tensor, value: Tensor, windows: Windows, dropout: float, scaling: float) -> Tensor:
    """Compute torch's attention over a jagged tensor, on a GPU, with any precision and head size."""
    assert windows.window_size is None
    shortest = min(windows.lengths)
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(
            tensor.contiguous(), windows.cu_seqlens, min_seqlen=shortest, max_seqlen=windows.longest
        ).transpose(1, 2)
        for tensor in (query, key, value)
    )
    output = scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling)
    values: Tensor = output.transpose(1, 2).values()
    return values


def by_window(query: Tensor, key: Tensor, value: Tensor, windows: Windows, dropout: float, scaling: float) -> Tensor:
    """Call torch's attention once per window. Works everywhere, and is the fastest kernel on CPUs without dropout."""
    outputs = [
        scaled_dot_product_attention(
            q[None], k[None], v[None], local_mask(q, windows.window_size), dropout_p=dropout, scale=scaling
        )[0].transpose(0, 1)
        for q, k, v in split_by_window(windows.lengths, query, key, value)
    ]
    return torch.cat(outputs)


def by_probabilities(
    query: Tensor, key: Tensor, value: Tensor, windows: Windows, dropout: float, scaling: float
) -> Tensor:
    """Compute attention with dropout on the CPU, in fp32 or bf16, by `model.cpu.attention`."""
    inputs = (query, key, value, windows.lengths, windows.window_size, dropout, scaling)
    output: Tensor = Attention.apply(*inputs)  # type: ignore[no-untyped-call]
    return output


def by_fused(query: Tensor, key: Tensor, value: Tensor, windows: Windows, dropout: float, scaling: float) -> Tensor:
    """Compute attention with dropout by the compiled CPU kernel, which stores the dropout mask as bits."""
    assert windows.window_size is None
    inputs = (query, key, value, windows.lengths, drop_threshold(dropout), scaling)
    output: Tensor = fused_kernels.Attention.apply(*inputs)  # type: ignore[no-untyped-call]
    return output


def _mask(make: Callable[..., Any], attention_mask: Tensor | None = None, **options: Any) -> Any:
    """Call `make`, a mask function of transformers, without its test for padding, which would wait for the GPU."""
    if attention_mask is not None:
        options["allow_is_bidirectional_skip"] = False
    return make(attention_mask=attention_mask, **options)


AttentionInterface.register(NAME, attend_within_windows)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)  # the kernels separate the windows
for name in ("sdpa", "eager"):
    AttentionMaskInterface.register(name, partial(_mask, AttentionMaskInterface()[name]))
