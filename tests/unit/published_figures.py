"""NVIDIA's published throughputs, and the errors of the projection's model against them.

The step time on the fewest devices is the publication's. Sources and assumptions are in docs/evidence/scaling.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hvd_bert.tools.report.comparability import STRONG, WEAK
from hvd_bert.tools.report.projection import Link, Network, Step, in_fp16, link_of, project

# Weights, and how many of them are embeddings: BertForQuestionAnswering of bert-base-uncased (ELECTRA-base has the same
# size except for its head) and of bert-large-uncased, and BertForPreTraining of bert-large-uncased.
BASE, LARGE, LARGE_PRETRAINING = (108_893_186, 23_837_184), (334_094_338, 31_782_912), (336_226_108, 31_782_912)
# Bus bandwidth of NCCL's own benchmark among 8 A100 with NVLink (NVIDIA/nccl-tests issue 175); eight adapters of
# 200 Gb/s in a DGX A100. The bandwidth among V100 and all latencies are assumed.
DGX_A100 = Network(link_of(8 * 200, 20), Link(232.5e9, 5e-6), devices_per_node=8)
DGX_V100 = Network(Link(130e9, 5e-6))
MP, FP32, TF32 = "mixed precision", "FP32", "TF32"


@dataclass(frozen=True)
class Series:
    """A published figure: the efficiency on `devices` over that on `base` devices. `step`: of one device.

    `fits`: whether the cost per weight is fitted to it.
    """

    name: str
    measured: float
    step: Step
    weights: int
    devices: int
    kind: str
    network: Network
    base: int = 1
    fits: bool = True

    def efficiency(self, ns_per_weight: float) -> float:
        """The model's, with this cost per step and weight."""
        step = replace(self.step, overhead_s=ns_per_weight * 1e-9 * self.weights)
        times = {count: project(step, count, self.kind, self.network).step_s for count in (self.base, self.devices)}
        share = self.devices / self.base if self.kind == STRONG else 1
        return times[self.base] / times[self.devices] / share


def step_of(compute_s: float, weights: tuple[int, int], precision: str, passes: int = 1) -> Step:
    """A step without the cost per weight. In mixed precision the gradients are fp16 on the wire."""
    step = Step(compute_s, 0.0, 4.0 * weights[0], 4.0 * weights[1], passes)
    return in_fp16(step) if precision == MP else step


def squad(model: str, precision: str, batch: int, one: float, eight: float, fits: bool = True) -> Series:
    """SQuAD with `batch` sequences of 384 tokens per GPU: sequences/s on one and on 8 GPUs."""
    network = DGX_V100 if "V100" in model else DGX_A100
    weights = BASE if "ELECTRA" in model else LARGE
    step = step_of(batch / one, weights, precision)
    return Series(f"{model}, {precision}, 1 -> 8", eight / one / 8, step, weights[0], 8, WEAK, network, fits=fits)


def pretraining(tokens: int, batch: int, node: float, nodes: float, passes: int) -> Series:
    """A fixed global batch, accumulated in `passes` passes on 8 GPUs: sequences/s on one node and on 32."""
    step = step_of(8 * batch / node, LARGE_PRETRAINING, MP, 8 * passes)
    name = f"BERT-large pre-training, {tokens} tokens, 8 -> 256"
    return Series(name, nodes / node / 32, step, LARGE_PRETRAINING[0], 256, STRONG, DGX_A100, base=8)


NVIDIA = (
    squad("TF1 BERT-large, V100 16 GB", MP, 4, 29.74, 189.77),
    squad("TF1 BERT-large, V100 16 GB", FP32, 2, 7.36, 52.39),
    squad("TF1 BERT-large, V100 32 GB", MP, 24, 51.02, 314.6),
    squad("TF1 BERT-large, V100 32 GB", FP32, 10, 10.42, 79.37),
    squad("TF2 BERT-large, V100 16 GB", MP, 6, 39.10, 255.36),
    squad("TF2 BERT-large, V100 16 GB", FP32, 3, 9.85, 73.03),
    squad("TF2 BERT-large, V100 32 GB", MP, 12, 47.06, 330.29),
    squad("TF2 BERT-large, V100 32 GB", FP32, 8, 11.11, 85.91),
    # 4 GPUs reach 366 sequences/s (89.6 %). No cost that changes slowly with the devices takes them to 519 on 8.
    squad("TF1 BERT-large, A100 40 GB", MP, 32, 102.26, 518.898, fits=False),
    squad("TF1 BERT-large, A100 40 GB", TF32, 16, 61.364, 440.47),
    squad("TF2 BERT-large, A100 80 GB", MP, 76, 134.22, 1048.23),
    squad("TF2 BERT-large, A100 80 GB", TF32, 38, 43.9, 341.31),
    squad("TF2 ELECTRA-base, A100 40 GB", MP, 32, 317, 2221),
    squad("TF2 ELECTRA-base, A100 40 GB", TF32, 32, 107, 828),
    pretraining(128, 79872, 3803.82, 110280.73, 32),
    pretraining(512, 30720, 749.73, 22506.23, 96),
)


def errors(ns_per_weight: float) -> list[float]:
    """Points of efficiency by which the model is off, for each series that fits."""
    return [100 * abs(one.efficiency(ns_per_weight) - one.measured) for one in NVIDIA if one.fits]
