"""All commands with the attention kernels of a GPU, computed on the CPU (tests/gpu_kernels.py).

Not covered: `--strategy dp` and `--fp16`, which need GPUs (tests/fake_cuda tests their kernels), and CUDA's kernels,
streams, events, pinned memory, random numbers and NCCL. `scripts/gpu_acceptance.sh` checks these on a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import losses, read_lines, small_run
from launch import REPOSITORY, SAMPLE, launcher, run

pytestmark = pytest.mark.integration
PROGRAM = [sys.executable, REPOSITORY / "tests" / "gpu_kernels.py"]
FP32, BF16 = {"by_efficient float32"}, {"by_efficient float32", "by_flash bfloat16"}  # the trial batch is fp32


def on_gpu_kernels(words: Sequence[str | Path], folder: Path, starts: Sequence[str] = ()) -> set[str]:
    """Run `MODULE_OR_FILE ARGUMENTS...`. Returns the kernels that the command used. `starts`: the launcher's words."""
    (file := folder / "kernels").write_text("")
    run([*starts, *PROGRAM, *words], folder, env={"GPU_KERNELS": str(file)}).expect(0)
    return set(file.read_text().splitlines())


@pytest.mark.parametrize(
    "flags, used, tolerance",
    [
        (["none", "--torch_compile", "--bf16"], BF16, 2e-2),
        # Dropout uses other random numbers than on a CPU.
        (["ddp", "--bf16", "--dropout", "0.1", "--gradient_checkpointing"], BF16, 0.5),
        (["fsdp", "--bf16", "--torch_compile", "--gradient_checkpointing"], BF16, 2e-2),
    ],
    ids=["none", "ddp", "fsdp"],
)
def test_training(tmp_path: Path, baseline: Path, flags: list[str], used: set[str], tolerance: float) -> None:
    size = 1 if flags[0] == "none" else 2
    _, _, *words = small_run(size, tmp_path / "out", "--strategy", *flags)
    starts = launcher(size, "torchrun" if size > 1 else "none")
    assert on_gpu_kernels(words, tmp_path, starts) == used
    found, expected = losses(tmp_path / "out"), losses(baseline)
    assert found == pytest.approx(expected, abs=tolerance) and (found != expected or tolerance < 0.1)


@pytest.mark.parametrize("strategy", ["horovod", "ddp"])
def test_reduce_overhead_on_two_ranks(tmp_path: Path, baseline: Path, strategy: str) -> None:
    """Test padded batches and the accumulation of gradients over a step's micro-batches, without CUDA graphs."""

    def train(name: str, *flags: object) -> Path:
        words = ("--strategy", strategy, "--torch_compile_mode", "reduce-overhead", *flags)
        words += ("--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 2)
        starts = launcher(2, "gloo" if strategy == "horovod" else "torchrun")
        output = run([*starts, *small_run(2, name, *map(str, words))], tmp_path).expect(0).output
        assert "padded to a multiple of 512 tokens" in output
        return tmp_path / name

    assert losses(train("plain")) == pytest.approx(losses(baseline), abs=1e-4)
    flags = ("--dropout", 0.1, "--ema_decay", 0.9, "--eval_strategy", "epoch", "--save_steps", 2)
    whole = train("whole", *flags)
    resumed = train("resumed", *flags, "--resume_from_checkpoint", whole / "checkpoint-4")
    one, other = ((folder / "model.safetensors").read_bytes() for folder in (whole, resumed))
    assert one == other


def test_other_commands(tmp_path: Path, baseline: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 1100, **sizes}))
    bench = ["hvd_bert.tools.bench", "--model", "config.json", "--steps", "2", "--bf16", "--strategy", "none"]
    used = on_gpu_kernels([*bench, "--repeats", "1", "--json", "bench.json"], tmp_path)
    assert used == {"by_flash bfloat16"}
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["memory_bytes"][0] > 0 and record["figures"]["useful_gflops"]["median"] > 0

    evaluated = ["hvd_bert.tools.evaluate", baseline, "--bf16", "--json", "scores.json"]
    assert "by_flash bfloat16" in on_gpu_kernels(evaluated, tmp_path)

    predict = ["hvd_bert.predict", baseline, "--input", SAMPLE / "dev-v1.1.json.gz", "--output"]
    run([sys.executable, "-m", *predict, "cpu.jsonl"], tmp_path).expect(0)
    assert on_gpu_kernels([*predict, "gpu.jsonl"], tmp_path) == FP32
    cpu, gpu = (read_lines(tmp_path / f"{name}.jsonl") for name in ("cpu", "gpu"))
    assert [row["answer"] for row in gpu] == [row["answer"] for row in cpu]
