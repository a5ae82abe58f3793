"""Run tests on this machine's GPUs, for scripts/gpu_acceptance.sh. A test's docstring is its goal in the table.

Only child processes use the GPUs: in compute mode Exclusive_Process, a GPU accepts only one process.
"""

import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
from shared import machine as facts
from shared import make_folder, markdown_table

from hvd_bert.errors import UserError
from hvd_bert.tools.doctor import probes

PASSED, FAILED, REPORTED, NOT_HERE, LATE = "pass", "FAIL", "-", "not here", "out of time"
COLUMNS = ("check", "goal", "found", "result", "seconds")
ASYNC = {"HOROVOD_ENABLE_ASYNC_COMPLETION": "1"}
COMPILE, GRAPHS, BATCH = "--torch_compile", "--torch_compile_mode reduce-overhead", "--per_device_train_batch_size"
SMALL = launch.SAMPLE / "six_layers.json"  # model for CPUs
collect_ignore: list[str] = []  # a name that pytest reads
MAX_RANKS = 32  # a divisor of the global batch
TRAIN = "hvd_bert.train --config sample --max_train_samples 700 --no_do_eval --report_to none --global_batch 32"


@dataclass(eq=False)
class Machine:
    """Runs commands. As a pytest plugin, prints a line per test and a table at the end, and writes a JSON file."""

    device: str  # "cuda" or "cpu"
    gpus: int
    out: Path
    ends_at: float  # end of the time for all tests, by time.monotonic()
    rounds: int = 1  # maximum number of rounds in which variants are measured in turns
    only: Sequence[str] = ("",)
    lines: list[dict[str, Any]] = field(default_factory=list)

    @pytest.fixture
    def machine(self) -> "Machine":
        return self

    def left_s(self) -> float:
        return self.ends_at - time.monotonic()

    def sized(self, on_gpu: Any, on_cpu: Any) -> Any:
        return on_gpu if self.device == "cuda" else on_cpu

    def require(self, gpus: int, device: str = "cpu") -> None:
        """Skip the test if there are fewer than `gpus` GPUs.

        With --device cpu, tests for up to 2 GPUs run on CPUs, unless `device` is "cuda".
        """
        if gpus > (2 if self.device == device == "cpu" else self.gpus):
            pytest.skip(f"needs {gpus} GPU(s)")

    def run(self, name: str, words: list[str], ranks: int | str = 0, gpus: int | str = 0, **settings: str) -> str:
        """Run a command on the first `gpus` GPUs, and under horovodrun if there are `ranks`. Returns the output.

        NAME.log also has the output. Fails the test if the command fails. Skips it without the needed GPUs or Horovod,
        or when the time for all tests is over.
        `ranks`, `gpus`: "all" is the largest power of 2 up to the number of GPUs; on CPUs, 2.
        `settings`: environment variables.
        """
        if "all" in (ranks, gpus):
            self.require(2, "cuda" if gpus else "cpu")
        every = 2 ** (min(self.gpus or 2, MAX_RANKS).bit_length() - 1)
        ranks, gpus = (every if count == "all" else int(count) for count in (ranks, gpus or ranks or 1))
        if ranks:
            pytest.importorskip("horovod", reason="needs Horovod")
            horovodrun = str(Path(sys.executable).with_name("horovodrun"))
            words = [horovodrun, "-np", str(ranks), "-H", f"localhost:{ranks}", *words]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self.gpus)))
        shown = self.sized(visible.split(",")[:gpus], [])
        paths = os.pathsep.join([str(launch.REPOSITORY), *sys.path])
        env = {"PYTHONPATH": paths, "HVD_BERT_CACHE": str(self.out / "cache"), "CUDA_VISIBLE_DEVICES": ",".join(shown)}
        env |= self.sized({"OMP_NUM_THREADS": None, "HOROVOD_CYCLE_TIME": None}, {}) | settings
        if (left_s := self.left_s()) <= 0:
            pytest.skip(LATE)
        done = launch.run(words, self.out, env=env, timeout=min(left_s, self.sized(240, 900)), cold=True)
        (self.out / f"{name}.log").write_text(done.output, encoding="utf-8")
        if done.hung and self.left_s() <= 0:
            pytest.skip(f"{LATE}: {name} was ended")
        return done.expect(0).output

    def record(self, name: str, words: list[str], **how: Any) -> Any:
        """Run a program that writes the JSON file named by its last argument, once per `name`. Returns the content.

        `how`: arguments of `run`.
        """
        if not (file := self.out / f"{name}.json").exists():
            self.run(name, [sys.executable, *words, str(file)], **how)
        return json.loads(file.read_text(encoding="utf-8"))

    def train(self, name: str, flags: str, program: Sequence[str] = ("-m",), **how: Any) -> Path:
        """Train on the sample, once per `name`. Returns the output folder. `how`: arguments of `run`."""
        if not (out := self.out / re.sub(r"\W+", "-", name)).exists():
            words = [sys.executable, *program, *TRAIN.split(), *flags.split(), "--output_dir", str(out)]
            self.run(out.name, words, **how)
        return out

    def bench(self, name: str, flags: str, **how: Any) -> Any:
        """Return the record of `hvd-bert bench` for BERT-base or, on CPUs, a small model. `how`: arguments of `run`."""
        small = f"--model {SMALL} --max_seq_length 128 {BATCH} 4 --repeats 1"
        size = self.sized(f"--tf32 {BATCH} 32 --repeats 5", small)
        words = f"-m hvd_bert.tools.bench --bf16 --strategy none {size} {flags} --json".split()
        return self.record("bench-" + re.sub(r"\W+", "-", name), words, **how)

    def result(self, correct: bool | None, text: str, figures: Any = None) -> None:
        """Report the result of a test, which fails if `correct` is False. `correct`: None if there is no goal."""
        self.lines[-1] |= {"found": text, "figures": figures, "result": REPORTED if correct is None else PASSED}
        assert correct is not False, text

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if any(word in item.name for word in self.only)]

    def pytest_runtest_setup(self, item: pytest.Function) -> None:
        goal = str(item.function.__doc__).splitlines()[0].rstrip(".")
        line = {"check": item.name.removeprefix("test_"), "goal": goal, "found": "interrupted", "result": LATE}
        self.lines.append(line | {"seconds": "0"})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        line = self.lines[-1]
        if isinstance(report.longrepr, tuple):
            line["found"] = report.longrepr[2].removeprefix("Skipped: ")
            line["result"] = LATE if line["found"].startswith(LATE) else NOT_HERE
        elif report.failed:
            # The last line with an error is the most specific. The other lines are the end of a log.
            line["error"] = text = str(report.longrepr).strip().splitlines()
            last = next((row for row in reversed(text) if "rror" in row), text[-1])
            line |= {"result": FAILED, "found": line["found"] if "figures" in line else last.strip()[:300]}
        if report.when == "call":
            line["seconds"] = f"{report.duration:.0f}"
            print(f"{line['result']:11} {line['check']}: {line['found']}", file=sys.stderr, flush=True)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str]:
        return report.outcome if report.when == "call" else "", "", ""

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        gpu = {"nvml": str(probes.gpus()), "cuda": torch.version.cuda, "count": self.gpus}
        gpu |= {"nccl": torch.cuda.nccl.version()} if self.gpus else {}
        record = {"command": shlex.join(sys.orig_argv), "device": self.device, "gpu": gpu, **facts()}
        text = json.dumps(shareable(record | {"lines": self.lines}, private_names(self.out)), indent=1)
        (self.out / "gpu_acceptance.json").write_text(text + "\n", encoding="utf-8")
        rows = [[line[column].replace("|", "\\|") for column in COLUMNS] for line in self.lines]
        failed, late = (sum(line["result"] == result for line in self.lines) for result in (FAILED, LATE))
        summary = f"{failed} of {len(rows)} checks failed, {late} ran out of time (--minutes). Details: {self.out}"
        print(f"\n{markdown_table(COLUMNS, rows)}\n\n{summary}")
        if late and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def private_names(out: Path) -> dict[str, str]:
    """Return the paths and names of this run, host and user -> their replacements."""
    home, host = Path.home(), platform.node()
    names = {str(out): "OUT", str(launch.REPOSITORY): "CLONE", str(home): "~", host: "HOST", host.split(".")[0]: "HOST"}
    names |= {os.environ.get("USER") or home.name: "USER"} | (
        {} if sys.prefix == sys.base_prefix else {sys.prefix: "VENV"}
    )
    return {name: replacement for name, replacement in names.items() if len(name) > 1}  # the home may be "/"


def shareable(value: Any, names: dict[str, str]) -> Any:
    """Replace names in all texts of a value, except in keys."""
    if isinstance(value, dict):
        return {key: shareable(part, names) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [shareable(part, names) for part in value]
    if not isinstance(value, str):
        return value
    longest_first = map(re.escape, sorted(names, key=len, reverse=True))
    patterns = (("" if name.startswith("/") else r"(?<![^\W_])") + name + r"(?![^\W_])" for name in longest_first)
    return re.sub("|".join(patterns), lambda found: names[found[0]], value)


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.getgroup("tests/gpu").addoption
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: tests that need no GPU, at small sizes.")
    add("--minutes", type=float, default=20.0, help="Time for all tests. (default: 20)")
    add("--rounds", type=int, help="Maximum number of measurements in turns. (default: 3, on the CPU 1)")
    add("--only", nargs="+", default=[""], metavar="WORD", help="Only tests with one of these words in their names.")
    add("--out", type=Path, default=Path("runs/gpu_acceptance"), help="New folder. (default: runs/gpu_acceptance)")


def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    if not hasattr(option, "minutes"):  # these options are missing if pytest was started for other folders
        return collect_ignore.append("test_gpu.py")
    gpus = torch.cuda.device_count() if option.device == "cuda" else 0
    if option.device == "cuda" and not gpus:
        found = f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees none; NVML: {probes.gpus()}"
        remedy = "--device cpu runs the checks that need no GPU."
        pytest.exit(f"gpu_acceptance: no GPU: {found}. {remedy}", 30)  # 30, because pytest itself uses 3
    try:
        out = make_folder(option.out.resolve())
    except UserError as error:
        raise pytest.UsageError(str(error)) from error
    rounds, ends_at = option.rounds or (3 if gpus else 1), time.monotonic() + 60 * option.minutes
    config.pluginmanager.register(Machine(option.device, gpus, out, ends_at, rounds, option.only), "machine")
