"""EM and F1 on more ranks: by each rule for the learning rate where the batch grows, and where it stays the same.

    python benchmarks/learning_rate_rules.py --model MODEL --train_file TRAIN --validation_file DEV --out DIR

Trains each row of the table with each seed, one after the other, and prints it as Markdown: mean and standard deviation
over the seeds. A training that is done is not made again, so it can be interrupted; --only_table trains nothing and
prints what is complete. Rows of a fixed global batch are trained on as many ranks as they say; those where
it grows, on 2 ranks, which take as many windows a step as the row's ranks would: the sums are the same, the random
numbers of dropout are not. (docs/evidence/results.md)
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from hvd_bert.config.settings import TrainArguments  # noqa: E402
from hvd_bert.training.optim import scaled_learning_rate  # noqa: E402

WORLDS = (1, 2, 4)
RULES = ("none", "sqrt", "linear")
LIMIT = 4.0  # --lr_scaling_limit's default: it matters above 4 ranks
PER_RANK, GLOBAL = 8, 16  # windows of a rank where they are fixed; of a step where those are
LEARNING_RATE = 1e-4
PROCESSES = 2  # where the batch grows


@dataclass(frozen=True)
class Case:
    """A row: `rule` None where the global batch is fixed, and so the learning rate; `limit`: --lr_scaling_limit."""

    world: int
    rule: str | None
    limit: float = math.inf

    @property
    def global_batch(self) -> int:
        return GLOBAL if self.rule is None else PER_RANK * self.world

    @property
    def name(self) -> str:
        """Of its folders. Two ranks that take 8 each are trained once for both tables."""
        limited = f"-{self.limit:g}" if self.limit < math.inf else ""
        return f"{self.world}x{self.global_batch // self.world}-{self.rule or 'none'}{limited}"

    @property
    def title(self) -> str:
        """Of its row."""
        if self.rule is None:
            return "the same batch"
        limited = f", at most {self.limit:g} times" if self.limit < math.inf else ""
        return f"{self.rule}{limited}" if self.world > 1 else ""

    @property
    def learning_rate(self) -> float:
        rule = TrainArguments(
            per_device_train_batch_size=PER_RANK,
            learning_rate=LEARNING_RATE,
            lr_scaling=self.rule or "none",
            lr_scaling_limit=self.limit,
        )
        return scaled_learning_rate(rule, self.world)

    @property
    def processes(self) -> int:
        """Ranks that it is trained on."""
        return self.world if self.rule is None else PROCESSES

    def flags(self) -> list[str]:
        """The trainer's."""
        rule = ["--lr_scaling", self.rule or "none", "--learning_rate", str(LEARNING_RATE)]
        rule += ["--lr_base_batch_size", str(PER_RANK), "--lr_scaling_limit", str(self.limit)]
        return ["--per_device_train_batch_size", str(self.global_batch // self.processes), *rule]


def cases() -> list[Case]:
    growing = [Case(world, rule) for world in WORLDS for rule in RULES if world > 1 or rule == "none"]
    growing += [Case(8, "sqrt"), Case(8, "linear"), Case(8, "linear", LIMIT)]
    return [*growing, *(Case(world, None) for world in WORLDS)]


def train(case: Case, seed: int, folder: Path, args: argparse.Namespace) -> None:
    """One training, with its output beside its folder."""
    launcher = ["horovodrun", "-np", str(case.processes), "-H", f"localhost:{case.processes}"]
    command = [*launcher, sys.executable, "-m", "hvd_bert.train"]
    command += ["--model_name_or_path", args.model, "--train_file", args.train_file]
    command += ["--validation_file", args.validation_file, "--warmup_ratio", "0.1", "--num_train_epochs", "2"]
    command += ["--eval_strategy", "no", "--seed", str(seed), "--output_dir", str(folder), *case.flags()]
    with folder.with_suffix(".txt").open("w", encoding="utf-8") as log:
        print(folder.name, file=sys.stderr)
        if subprocess.run(command, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT).returncode:
            raise SystemExit(f"{folder.name} failed: {log.name}")


def scores(folder: Path) -> tuple[float, float] | None:
    """EM and F1 of a training that is done."""
    if not (folder / "train_results.json").exists():
        return None
    found = json.loads((folder / "eval_results.json").read_text(encoding="utf-8"))
    return found["exact_match"], found["f1"]


def rows(out: Path, seeds: int) -> Iterator[list[str]]:
    """Of the table; "-" where seeds are missing, but for the last column, which has those that are there."""
    for case in cases():
        found = [scores(out / f"{case.name}-{seed}") for seed in range(1, seeds + 1)]
        done = [both for both in found if both]
        figures = ["-", "-"]
        if len(done) == seeds:
            figures = [f"{mean(column):.2f}, {stdev(column):.2f}" for column in zip(*done, strict=True)]
        figures.append(", ".join(f"{f1:.2f}" for _, f1 in done) or "-")
        yield [case.title, f"{case.world}", f"{case.global_batch}", f"{case.learning_rate:.2g}", *figures]


def main() -> None:
    parser = argparse.ArgumentParser(description="EM and F1 on more ranks, by each rule for the learning rate.")
    for name in ("model", "train_file", "validation_file"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--out", type=Path, required=True, help="the trainings are left here")
    parser.add_argument("--seeds", type=int, default=3, help="2 or more (3)")
    parser.add_argument("--only_table", action="store_true", help="train nothing")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error("--seeds: give 2 or more, for a spread")
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in range(1, args.seeds + 1):
        for case in cases():
            folder = args.out / f"{case.name}-{seed}"
            if not args.only_table and scores(folder) is None:
                train(case, seed, folder, args)
    print("| rule | ranks | global batch | learning rate | EM, sd | F1, sd | F1 of each seed |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for row in rows(args.out, args.seeds):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
