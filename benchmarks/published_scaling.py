"""Compares the projection's model with published figures, of NVIDIA and of a lab report.

    python benchmarks/published_scaling.py

Takes the step time on the fewest devices from each publication and projects it to more. Sources and assumptions are in
docs/evidence/scaling.md.
"""

from __future__ import annotations

from dataclasses import replace

from hvd_bert.report.comparability import STRONG, WEAK
from hvd_bert.report.projection import Link, Network, Step, in_fp16, link_of, project

# Weights, and how many of them are embeddings: BertForQuestionAnswering of bert-base-uncased (ELECTRA-base has the same
# size except for its head), and BertForPreTraining of bert-large-uncased.
BASE, BASE_EMBEDDINGS = 108_893_186, 23_837_184
LARGE, LARGE_EMBEDDINGS = 336_226_108, 31_782_912
# Bus bandwidth of NCCL's own benchmark among 8 A100 with NVLink (NVIDIA/nccl-tests issue 175), and between A100 over
# PCIe (issue 178); eight adapters of 200 Gb/s in a DGX A100. Latencies are assumed.
NVLINK, PCIE = Link(232.5e9, 5e-6), Link(20e9, 10e-6)
DGX = Network(link_of(8 * 200, 20), NVLINK, devices_per_node=8)


def step_of(compute_s: float, large: bool = False, passes: int = 1) -> Step:
    """A step with fp32 gradients on the wire."""
    weights, embeddings = (LARGE, LARGE_EMBEDDINGS) if large else (BASE, BASE_EMBEDDINGS)
    return Step(compute_s, 0.0, 4.0 * weights, 4.0 * embeddings, passes)


def show(name: str, measured: float, step: Step, devices: int, kind: str, network: Network, base: int = 1) -> None:
    """Print a row: the efficiency on `devices` over that on `base`, measured and projected with and without overlap."""
    cells = []
    for modelled in (step, replace(step, backward_share=0.0)):
        at_base, at_target = (project(modelled, count, kind, network) for count in (base, devices))
        efficiency = at_target.efficiency / at_base.efficiency
        cells.append(f"{efficiency:7.1%} ({100 * (efficiency - measured):+5.1f})")
    print(f"{name:<58} {measured:7.1%}   " + "   ".join(cells))


def electra() -> None:
    """NVIDIA: ELECTRA-base on SQuAD, 32 sequences of 384 tokens per GPU, 8 A100 with 40 GB."""
    for precision, one, eight in (("mixed precision", 317, 2221), ("TF32", 107, 828)):
        step = step_of(32 / one)
        step = in_fp16(step) if precision == "mixed precision" else step
        show(f"ELECTRA-base, {precision}, 1 -> 8", eight / one / 8, step, 8, WEAK, DGX)
        more = 256 / eight - 32 / one
        steps = f"{256 / eight * 1e3:.1f} ms, on one GPU {32 / one * 1e3:.1f} ms"
        print(f"    measured step {steps}: {more * 1e3:.1f} ms more")


def bert_large() -> None:
    """NVIDIA: BERT-large pre-training in mixed precision, with a fixed global batch, accumulated in fewer passes."""
    for tokens, batch, node, nodes, passes in (
        (128, 79872, 3803.82, 110280.73, 32),
        (512, 30720, 749.73, 22506.23, 96),
    ):
        step = in_fp16(step_of(8 * batch / node, large=True, passes=8 * passes))
        show(f"BERT-large, {tokens} tokens, 8 -> 256", nodes / node / 32, step, 256, STRONG, DGX, base=8)
        ideal, real = batch / node / 32, batch / nodes
        steps = f"{real:.3f} s, a 32nd of the step on 8 GPUs {ideal:.3f} s"
        print(f"    measured step {steps}: {(real - ideal) * 1e3:.0f} ms more")


def lab_report() -> None:
    """Lab report: bert-base, 10,000 questions, 4 epochs, 4 per GPU, DDP on one and two nodes of two A100-PCIe."""
    step = step_of(12.98 * 60 / (4 * 10_000 / 4))
    show("lab report, DDP, 1 -> 2 (PCIe)", 1.67 / 2, step, 2, WEAK, Network(PCIE))
    for gbps in (10, 25, 100, 200):
        show(
            f"lab report, DDP, 1 -> 2 x 2, nodes joined by {gbps} Gb/s",
            2.72 / 4,
            step,
            4,
            WEAK,
            Network(link_of(gbps, 20), PCIE, 2),
        )


def main() -> None:
    """Print the table."""
    print(f"{'efficiency (error in points)':<58} {'measured':>8}   {'model, overlap':>15}   {'no overlap':>15}")
    electra()
    bert_large()
    lab_report()


if __name__ == "__main__":
    main()
