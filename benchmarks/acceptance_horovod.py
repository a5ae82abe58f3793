"""The check of gpu_acceptance.py of Horovod's sums and hooks in a world of 1, where the trainer needs neither.

One rank's sums are its own tensors, so all must be exact. Horovod reads its variables at its start, so each runs apart:

    python benchmarks/acceptance_horovod.py cuda FOUND.json
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from acceptance_place import NotHere, Outcome, Place
from torch import nn
from transformers import BertConfig, BertForQuestionAnswering

from hvd_bert.errors import UserError
from hvd_bert.strategies.horovod import check_bf16

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FUSED_SIZES = (1, 7, 768, 768 * 768, 3072)
PRODUCTS, STEPS, TIMED = 50, 10, 10


def sums(hvd: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a sum, a scaled one and a fused average are right."""
    values, *many = (torch.randn(size, device=device).to(dtype) for size in (100_003, *FUSED_SIZES))
    scaled = hvd.allreduce(values, op=hvd.Sum, name=f"scaled.{dtype}", prescale_factor=2.0)
    found = [hvd.allreduce(values, op=hvd.Sum, name=f"sum.{dtype}"), scaled]
    found += hvd.grouped_allreduce(many, op=hvd.Average, name=f"many.{dtype}")
    return all(torch.equal(one, other) for one, other in zip(found, [values, 2 * values, *many], strict=True))


def waits_for_products(hvd: Any, device: torch.device) -> bool:
    """Whether each sum starts only when the device has computed its tensor."""
    right, size = True, 2048 if device.type == "cuda" else 64
    for _ in range(PRODUCTS):
        factor = torch.randn(size, size, device=device)
        product = (factor @ factor @ factor).sum(0)
        expected = 2 * product
        hvd.synchronize(hvd.allreduce_async_(product, op=hvd.Sum, name="product", prescale_factor=2.0))
        right &= torch.equal(product, expected)
    return right


def hooks(hvd: Any, device: torch.device) -> bool:
    """Whether the optimizer's hooks, which a world of 1 lacks, send each gradient and leave AdamW's weights."""
    models = [nn.Linear(64, 8).to(device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain, wrapped = (torch.optim.AdamW(model.parameters(), fused=True) for model in models)
    wrapped = hvd.DistributedOptimizer(wrapped, named_parameters=models[1].named_parameters())
    wrapped._register_hooks()
    sent = 0
    for inputs in torch.randn(STEPS, 32, 64, device=device):
        for model in models:
            model(inputs).square().mean().backward()
        sent += len(wrapped._handles)
        wrapped.synchronize()
        with wrapped.skip_synchronize():
            wrapped.step()
        wrapped.zero_grad()
        plain.step()
        plain.zero_grad()
    weights = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return sent == 2 * STEPS and all(torch.equal(one, other) for one, other in weights)


def host_ms(hvd: Any, device: torch.device) -> tuple[int, float]:
    """The number of BERT-base's gradients, on the CPU of a smaller one, and the host's time per step to send them."""
    config = BertConfig() if device.type == "cuda" else BertConfig(hidden_size=96, intermediate_size=192)
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in BertForQuestionAnswering(config).parameters()]
    gradients, seconds = [torch.randn(shape, device=device) for shape in shapes], []
    for _ in range(2 * TIMED):  # the first half warms up
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        handles = [hvd.allreduce_async_(g, op=hvd.Sum, name=f"gradient.{i}") for i, g in enumerate(gradients)]
        for handle in handles:
            hvd.synchronize(handle)
        seconds.append(time.perf_counter() - start)
    return len(shapes), 1000 * statistics.median(seconds[TIMED:])


def check(hvd: Any, device: torch.device) -> Outcome:
    if device.type == "cuda" and not hvd.nccl_built():
        raise UserError("this Horovod was built without NCCL: run `bash env/setup.sh --with-nccl`")
    dtypes, unsent = dict(DTYPES), ""
    try:
        check_bf16(device)
    except UserError:
        unsent = f", this Horovod cannot send {dtypes.popitem()[0]}"
    right = {f"sums in {name}": sums(hvd, device, dtype) for name, dtype in dtypes.items()}
    right |= {"waits for products": waits_for_products(hvd, device), "hooks": hooks(hvd, device)}
    count, milliseconds = host_ms(hvd, device)
    wrong = [name for name, holds in right.items() if not holds]
    found = (f"wrong: {', '.join(wrong)}" if wrong else "exact") + unsent
    found += f", {milliseconds:.1f} ms of the host for {count} gradients"
    return Outcome(found, not wrong, {"right": right, "host_ms": milliseconds})


def check_apart(place: Place) -> Outcome:
    """With and without asynchronous completion, each in a process of its own."""
    if importlib.util.find_spec("horovod") is None:
        raise NotHere("needs Horovod")
    found = [
        place.outcome(name, __file__, HOROVOD_ENABLE_ASYNC_COMPLETION=value)
        for name, value in (("horovod", "0"), ("horovod-async", "1"))
    ]
    text = "; asynchronous completion: ".join(outcome.found for outcome in found)
    figures = {"without": found[0].figures, "with": found[1].figures}
    return Outcome(text, all(outcome.passed for outcome in found), figures)


CHECKS = {"horovod's hooks and NCCL, world of 1": ("exact", check_apart)}

if __name__ == "__main__":
    os.environ.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo")  # one process needs no MPI
    import horovod.torch

    horovod.torch.init()
    outcome = check(horovod.torch, torch.device(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(asdict(outcome)), encoding="utf-8")
