"""Lightning with DDP on SQuAD's windows: a LightningModule around the model, windows padded to the longest length.

    torchrun --nproc_per_node 2 benchmarks/peers/lightning_ddp.py --model_name_or_path MODEL --windows TABLE \
        --times_file TIMES.json --output_dir OUT --max_steps 28

--windows is a data set of padded windows as `save_to_disk` writes it. With --in_order the windows are not shuffled, and
the loss of each step is recorded.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import lightning
import torch
from datasets import Dataset
from step_times import leave, write_times
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForQuestionAnswering, get_linear_schedule_with_warmup


class QuestionAnswering(lightning.LightningModule):
    def __init__(self, model_name: str, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        # from_pretrained returns a model in evaluation mode, and Lightning keeps the mode.
        self.model = AutoModelForQuestionAnswering.from_pretrained(model_name, trust_remote_code=False).train()

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.0)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class StepTimes(lightning.Callback):
    """The end of each step and, with `keep_losses`, the mean of the ranks' losses."""

    def __init__(self, keep_losses: bool) -> None:
        self.keep_losses = keep_losses
        self.losses: dict[int, float] = {}

    def on_train_start(self, trainer, pl_module):
        self.ends = [time.perf_counter()]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.ends.append(time.perf_counter())
        if self.keep_losses:
            self.losses[trainer.global_step] = float(trainer.strategy.reduce(outputs["loss"].detach()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Lightning with DDP on the CPUs of this host.")
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--windows", required=True)
    parser.add_argument("--times_file", type=Path, required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max_steps", type=int, required=True)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--in_order", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()

    lightning.seed_everything(args.seed)
    windows = Dataset.load_from_disk(args.windows).with_format("torch")
    loader = DataLoader(windows, batch_size=args.per_device_train_batch_size, shuffle=True)
    if args.in_order:  # Lightning's own sampler for ranks always shuffles
        world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        sampler = DistributedSampler(windows, num_replicas=world_size, rank=rank, shuffle=False)
        loader = DataLoader(windows, batch_size=args.per_device_train_batch_size, sampler=sampler)
    times = StepTimes(keep_losses=args.in_order)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        precision="bf16-mixed" if args.bf16 else "32-true",
        max_steps=args.max_steps,
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        default_root_dir=args.output_dir,
        callbacks=[times],
    )
    trainer.fit(QuestionAnswering(args.model_name_or_path, args.learning_rate), loader)
    if trainer.is_global_zero:
        write_times(args.times_file, times.ends, times.losses)
    leave()


if __name__ == "__main__":
    main()
