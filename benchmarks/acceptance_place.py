"""What the checks of gpu_acceptance.py share: the machine, its time, and how a command is run."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shared

from hvd_bert.errors import UserError

MAX_COMMAND_S = {"cuda": 240.0, "cpu": 600.0}  # the longest on a GPU is torch.compile's first run
GRACE_S = 10.0  # from SIGTERM to SIGKILL: horovodrun gives its ranks 5 s
SAMPLE = ["--config", "sample", "--max_train_samples", "700", "--no_do_eval", "--report_to", "none"]
STEPS, BATCH = 20, 32
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


class NotHere(Exception):
    """The check does not apply to this machine. The message says why."""


class OutOfTime(UserError):
    """The time for all checks (--minutes) ended before this one."""


@dataclass(frozen=True)
class Outcome:
    """The result of a check. `passed` None: a figure without a goal on this machine. `figures`: for the JSON file."""

    found: str
    passed: bool | None = True
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass
class Place:
    """The machine. `device`: "cuda" or "cpu"; `gpus`: how many there are; `gpu`: the first one's name;
    `ends_at`: when all must be done, by time.monotonic(); `rounds`: at most, of the variants that take turns."""

    device: str
    gpus: int
    gpu: str
    out: Path
    ends_at: float
    rounds: int = 1
    losses: dict[str, list[float | None]] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """As many ranks as there are GPUs, such that they divide the batch; on CPUs 2."""
        return 2 if self.device == "cpu" else 2 ** (min(self.gpus, BATCH).bit_length() - 1)

    def left_s(self) -> float:
        return self.ends_at - time.monotonic()

    def require_several(self) -> None:
        """Raise NotHere unless there are several GPUs; on CPUs two ranks share them."""
        if self.device == "cuda" and self.gpus < 2:
            raise NotHere("needs 2 GPUs")

    def environment(self, device: str, gpus: int) -> dict[str, str]:
        """For a command on the CPU, or on the first GPUs."""
        env = os.environ | shared.launch_environment() | {"HVD_BERT_CACHE": str(self.out / "cache")}
        env |= dict.fromkeys(OFFLINE, "1")
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(shared.REPOSITORY), env.get("PYTHONPATH", "")]))
        if device == "cpu":
            env |= {"CUDA_VISIBLE_DEVICES": ""}
            env.setdefault("OMP_NUM_THREADS", "1" if self.device == "cpu" else "4")
        else:
            visible = env.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self.gpus)))
            env["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:gpus])
        return env

    def run(self, name: str, words: Sequence[str], device: str = "", gpus: int = 1, **settings: str) -> str:
        """Run a command. Returns its output, also in NAME.log. Raises UserError with the end of it if it fails, and
        OutOfTime if the time for all checks ends. `settings`: further environment variables."""
        log, left_s = self.out / f"{name}.log", self.left_s() - GRACE_S
        if left_s <= 0:
            raise OutOfTime("no time was left (--minutes)")
        env = self.environment(device or self.device, gpus) | settings
        try:
            shared.run(words, env, log, min(left_s, MAX_COMMAND_S[self.device]), GRACE_S)
        except UserError as error:
            if self.left_s() <= GRACE_S:
                raise OutOfTime(f"{name} was ended at the limit (--minutes)") from error
            raise
        return log.read_text(encoding="utf-8", errors="replace")

    def file(self, name: str) -> Path:
        """The JSON file that a command of this name writes."""
        return self.out / f"{name}.json"

    def record(self, name: str, words: Sequence[str], **how: Any) -> dict[str, Any]:
        """What a command wrote to `self.file(name)`. It runs once. `how`: as for `run`."""
        if not self.file(name).exists():
            self.run(name, words, **how)
        record: dict[str, Any] = json.loads(self.file(name).read_text(encoding="utf-8"))
        return record

    def outcome(self, name: str, program: str, *words: str, **settings: str) -> Outcome:
        """What a program of this folder wrote: PROGRAM DEVICE FILE WORDS...

        It ends before the next one starts: its CUDA context would exclude all others from a GPU in mode
        Exclusive_Process.
        """
        command = [sys.executable, program, self.device, str(self.file(name)), *words]
        return Outcome(**self.record(name, command, **settings))

    def train(self, name: str, *flags: str, ranks: int = 0, **how: Any) -> Path:
        """Train on the sample. Returns the output folder. `ranks`: under horovodrun; 0: without a launcher. `how`: as
        for `run`."""
        folder = self.out / name
        words = [sys.executable, "-m", "hvd_bert.train", *SAMPLE, "--output_dir", str(folder), *flags]
        self.run(name, launched(ranks) + words, **how)
        return folder

    def train_losses(self, name: str, *flags: str, **how: Any) -> Sequence[float | None]:
        """The losses of STEPS steps with a global batch of BATCH windows, without dropout; None: a skipped step. Each
        run is made once. `how`: as for `train`."""
        if name not in self.losses:
            steps = f"--max_steps {STEPS} --logging_steps 1 --save_steps 0 --global_batch {BATCH}".split()
            folder = self.train(f"losses-{name}", *steps, *flags, **how)
            rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            self.losses[name] = [row["loss"] for row in rows if "loss" in row]
        return self.losses[name]


def launched(ranks: int) -> list[str]:
    """The words before a command that start it on `ranks` ranks of this host."""
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    return [horovodrun, "-np", str(ranks), "-H", f"localhost:{ranks}"] if ranks else []
