"""Make folders of finished runs with given results."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

WORK: dict[str, Any] = {
    "--dropout": 0.0,
    "--learning_rate": 5e-5,
    "--max_seq_length": 384,
    "--num_train_epochs": 2.0,
    "--seed": 42,
    "--fp16_allreduce": False,
    "the model": "197 tensors, 1,000,000 parameters, 0123456789ab",
    "the training data": "fedcba987654",
}


def make_run(
    folder: Path,
    strategy: str = "none",
    ranks: int = 1,
    batch: int = 16,
    windows_per_s: float = 10.0,
    steps: int = 40,
    every: int = 1,
    nodes: int = 1,
    loss: float = 5.0,
    last_loss: float = 1.0,
    seed: int = 42,
    work: dict[str, Any] | None = None,
    scores: tuple[float, float] | Mapping[str, float] | None = None,
    exposed_comm_s: float | None = 0.0,
    **results: Any,
) -> Path:
    """Make the folder of a finished run. Step 1 processes 2 windows per second, later steps `windows_per_s`.

    The loss falls linearly from `loss` (step 1) to `last_loss` (last step). metrics.jsonl has a line with the mean
    loss for step 1, every `every` steps and the last step. The optimizer takes a tenth of each step; computation and
    exposed communication take the rest. `batch`: the global batch. `scores`: (EM, F1), or another task's scores by
    name, for eval_results.json. `work`: additional entries of the run's identity. `results`: additional or replaced
    entries of train_results.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    losses = [loss + (last_loss - loss) * step / (steps - 1) for step in range(steps)]
    rows, since, runtime = [], 0, 0.0
    for step in range(1, steps + 1):
        if not (step % every == 0 or step in (1, steps)):
            continue
        speed = 2.0 if step == 1 else windows_per_s
        step_s = batch / speed
        runtime += step_s * (step - since)
        row = {"step": step, "loss": sum(losses[since:step]) / (step - since), "windows_per_s": speed, "step_s": step_s}
        row |= {"data_s": 0.0, "compute_s": 0.9 * step_s - (exposed_comm_s or 0.0), "optimizer_s": 0.1 * step_s}
        rows.append(row | ({} if exposed_comm_s is None else {"exposed_comm_s": exposed_comm_s}) | {"other_s": 0.0})
        since = step
    named = scores if isinstance(scores, Mapping) else {"f1": 50.0}
    rows.append({"step": steps} | {f"eval_{name}": score for name, score in named.items()})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = {
        "strategy": strategy,
        "devices_per_rank": 1,
        "world_size": ranks,
        "global_batch": batch,
        "train_steps": steps,
        "train_samples": steps * batch,
        "train_runtime": runtime,
        "learning_rate": 5e-5,
        "seed": seed,
        "hosts": [f"a100-{node:02}" for node in range(1, nodes + 1)],
        "ranks": [{"rank": rank, "device": "cpu"} for rank in range(ranks)],
        "device_name": "AMD EPYC",
        "threads_per_rank": 1,
        "controller": "none" if ranks == 1 else "mpi",
        "versions": {"torch": "2.13.0"},
        "work": WORK | {"--seed": seed} | (work or {}),
        "processes": [
            {"rank": r, "real_s": 100.0 + r, "user_s": 90.0, "system_s": 5.0, "memory_peak_bytes": (r + 1) * 2**30}
            for r in range(ranks)
        ],
    }
    record |= {"scores": [*named]} if named is scores else {}
    (folder / "train_results.json").write_text(json.dumps(record | results))
    devices = ranks * results.get("devices_per_rank", 1)
    (folder / "train_config.yaml").write_text(f"per_device_train_batch_size: {max(1, batch // devices)}\n")
    if scores:
        last = scores if named is scores else dict(zip(("exact_match", "f1"), scores, strict=True))
        (folder / "eval_results.json").write_text(json.dumps(last))
    return folder


def text_of(page: Path) -> str:
    """Return the text of an HTML page, with ` | ` between table cells."""
    body = re.sub(r"<(script|style)\b.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", "", re.sub(r"</t[hd]><t[hd][^>]*>", " | ", body)))


def make_samples(folder: Path, question: str = "Which box?") -> None:
    """Write eval_samples.json with a right and a wrong answer."""
    right = {
        "id": "q1",
        "question": question,
        "context": "Not the red box of the shed: in the hall is the red box.",
        "answers": ["the red box"],
        "answer_start": 44,
        "prediction": "the red box",
        "probability": 0.9,
        "exact_match": 100.0,
        "f1": 100.0,
    }
    wrong = right | {"id": "q2", "prediction": "hall", "exact_match": 0.0, "f1": 0.0}
    (folder / "eval_samples.json").write_text(json.dumps([right, wrong]))


class PretendedRuns:
    """Replaces `one_run.start_and_wait`: writes the files of a run instead of starting ranks.

    `label_of`: returns a run's label from its folder, command and environment. `make`: writes a finished run, given
    its folder, the trainer's flags and the label. `started`: the labels of all runs in order. `ends`: maps part of a
    label to the run's outcome: an exit status, None for a timeout, or an exception to raise; other runs succeed.
    `during`: called with folder and flags while a run is in progress.
    """

    def __init__(
        self,
        label_of: Callable[[Path, Sequence[str], Mapping[str, str]], str],
        make: Callable[[Path, dict[str, str], str], Path],
    ) -> None:
        self.label_of, self.make = label_of, make
        self.started: list[str] = []
        self.ends: dict[str, int | Exception | None] = {}
        self.during: Callable[[Path, dict[str, str]], None] | None = None

    def __call__(
        self, command: Sequence[str], environ: Mapping[str, str], log: object, timeout: float, watch: Callable[[], None]
    ) -> int | None:
        given = dict(word.lstrip("-").split("=", 1) for word in command if word.startswith("--") and "=" in word)
        folder = Path(given["output_dir"])
        label = self.label_of(folder, command, environ)
        self.started.append(label)
        if self.during:
            self.during(folder, given)
            watch()
        end = next((end for part, end in self.ends.items() if part in label), 0)
        if isinstance(end, Exception):
            (folder / "train_config.yaml").write_text("half: true\n")
            raise end
        if end == 0:
            assert (folder / "run.log").read_text().startswith("$ ")
            self.make(folder, given, label)
            (folder / "model.safetensors").write_bytes(b"")
        else:
            (folder / "run.log").write_text("noise\n[1,0]<stderr>:hvd_bert: bad input\nmessage of the launcher\n")
        return end
