"""Train with the Hugging Face Trainer on SQuAD's windows, with the settings of transformers' run_qa example.

    torchrun --nproc_per_node 2 benchmarks/peers/hf_trainer.py --use_cpu --model_name_or_path MODEL \
        --windows TABLE --times_file TIMES.json --output_dir OUT --max_steps 28

Takes all flags of TrainingArguments, with their defaults. --windows is a data set of windows tokenized as by run_qa and
written by `save_to_disk`: padded to --max_seq_length or, with --no_pad_to_max_length, not padded. --times_file gets a
row per optimizer step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)


@dataclass
class PeerArguments:
    model_name_or_path: str
    windows: str
    times_file: Path
    pad_to_max_length: bool = True
    count_tokens: bool = False  # counts tokens without padding; costs one more gather per step


class StepTimes(TrainerCallback):
    """Records the seconds of each step and, with count_tokens, the tokens."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.rows, self.end, self.seen = [], time.perf_counter(), 0

    def on_step_end(self, args, state, control, **kwargs):
        end, seen = time.perf_counter(), int(state.num_input_tokens_seen)
        self.rows.append({"step_s": end - self.end, "tokens": seen - self.seen or None})
        self.end, self.seen = end, seen


def main() -> None:
    peer, args = HfArgumentParser((PeerArguments, TrainingArguments)).parse_args_into_dataclasses()
    if peer.count_tokens:
        args.include_num_input_tokens_seen = "non_padding"  # the flag of this name accepts only true and false
    tokenizer = AutoTokenizer.from_pretrained(peer.model_name_or_path, trust_remote_code=False)
    times = StepTimes()
    trainer = Trainer(
        model=AutoModelForQuestionAnswering.from_pretrained(peer.model_name_or_path, trust_remote_code=False),
        args=args,
        train_dataset=Dataset.load_from_disk(peer.windows),
        processing_class=tokenizer,
        data_collator=default_data_collator if peer.pad_to_max_length else DataCollatorWithPadding(tokenizer),
        callbacks=[times],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        losses = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
        rows = [{"step": step, **row, "loss": losses.get(step)} for step, row in enumerate(times.rows, start=1)]
        peer.times_file.write_text(json.dumps(rows))
    # Exit without finalizing Python: Gloo's threads can abort the process meanwhile (pytorch#190489, #117762).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
