"""Runs mutmut's mutants, each in a fork of a process that has already collected the tests.

    mutmut run NAME   # of any mutant: creates all, and the table of tests
    PYTHONPATH=mutants python benchmarks/run_mutants.py 'hvd_bert.data.*'   # those without a result yet
    mutmut results

For each mutant, `mutmut run` imports the package and collects the tests again. Here only the mutants of functions that
are called at import do so. hypothesis draws the same examples each time and does not shrink them.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import gc
import importlib
import io
import json
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

SURVIVED, KILLED, ENDED = 0, 1, -24  # pytest's statuses; the limit of processor time
NO_TESTS = 33  # mutmut's
SECONDS = 10  # of processor time per mutant, plus three times what its tests take
WORDS = {SURVIVED: "survived", ENDED: "ended by the limit of processor time", NO_TESTS: "not called by any test"}


class Mutants:
    """The mutants in mutmut's folder, the working directory, and the tests of their functions."""

    def __init__(self, patterns: list[str]) -> None:
        statistics = json.loads(Path("mutmut-stats.json").read_text())
        self.seconds: dict[str, float] = statistics["duration_by_test"]
        self.tests_of: dict[str, list[str]] = statistics["tests_by_mangled_function_name"]
        self._patterns = patterns

    def left(self) -> list[tuple[Path, str]]:
        """The mutants without a result, each with the file of its module's results."""
        return [
            (path, name)
            for path in sorted(Path("hvd_bert").rglob("*.py.meta"))
            for name, result in json.loads(path.read_text())["exit_code_by_key"].items()
            if result is None and matches(name, self._patterns)
        ]

    def run(self, path: Path, name: str, tests: Iterable[str]) -> None:
        """Run the tests, the fastest first, until one fails. Keep the result where mutmut keeps it."""
        tests = sorted(tests, key=lambda test: (self.seconds.get(test, 0.0), test))
        limit = SECONDS + int(3 * sum(self.seconds.get(test, 0.0) for test in tests))

        def body() -> int:
            gc.freeze()  # pytest's collections of garbage would take longer than the tests
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 2))
            return pytest_status(tests, mutant=name)

        status = forked(body) if tests else NO_TESTS
        if status != KILLED:
            print(WORDS.get(status, f"status {status}"), name, flush=True)
        if status in (KILLED, *WORDS):
            results = json.loads(path.read_text())
            results["exit_code_by_key"][name] = status
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(results, indent=4))
            partial.replace(path)


def matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def function_of(name: str) -> str:
    return name.rpartition("__mutmut_")[0]


def module_of(function: str) -> str:
    return function.rpartition(".")[0]


def pytest_status(arguments: list[str], mutant: str) -> int:
    import pytest

    os.environ["MUTANT_UNDER_TEST"] = mutant  # read by each function that has mutants
    options = ["--rootdir=.", "-x", "-q", "--tb=no", "--timeout=600", "-pno:cacheprovider", "-m=not realdata"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return int(pytest.main([*options, *arguments]))


def forked(body: Callable[[], int]) -> int:
    """The exit status of a fork that runs `body`; minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            status = body()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_after_collecting(mutants: Mutants, deadline: float) -> int:
    """Run the mutants of the functions that are not called at import."""
    files = sorted({test.partition("::")[0] for test in mutants.seconds})
    status = pytest_status(["--collect-only", *files], mutant="stats")
    called_at_import = set(importlib.import_module("mutmut.state").state()._stats)
    for path, name in mutants.left() if status == 0 else []:
        function = function_of(name)
        if function not in called_at_import and time.monotonic() < deadline:
            mutants.run(path, name, mutants.tests_of.get(function, []))
    return status


def run_with_imports(mutants: Mutants, deadline: float) -> int:
    """Run the others. mutmut does not know their tests, so all tests of their module run."""
    for path, name in mutants.left():
        module = module_of(function_of(name))
        tests = {test for function in mutants.tests_of if module_of(function) == module
                 for test in mutants.tests_of[function]}  # fmt: skip
        if time.monotonic() < deadline:
            mutants.run(path, name, tests)
    return 0


def draw_the_same_examples() -> None:
    from hypothesis import Phase, settings

    phases = [Phase.explicit, Phase.generate]
    settings.register_profile("mutants", derandomize=True, database=None, deadline=None, phases=phases)
    settings.load_profile("mutants")


def summarize(patterns: list[str]) -> None:
    for path in sorted(Path("hvd_bert").rglob("*.py.meta")):
        results = json.loads(path.read_text())["exit_code_by_key"]
        chosen = [result for name, result in results.items() if matches(name, patterns)]
        if chosen:
            count = Counter(chosen)
            killed, survived = count[KILLED] + count[ENDED], count[SURVIVED] + count[NO_TESTS]
            print(f"{path.with_suffix('')}: {len(chosen)} mutants, {killed} killed ({count[ENDED]} ended), "
                  f"{survived} survived, {count[None]} left")  # fmt: skip


def main() -> None:
    """Run the mutants. Print those that no test kills, and a summary per module."""
    parser = argparse.ArgumentParser(description="Run mutmut's mutants.")
    parser.add_argument("patterns", nargs="+", help="Mutants to run, as in `mutmut run`.")
    parser.add_argument("--seconds", type=float, default=3600, help="Stop after this time.")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    if not Path("mutants/mutmut-stats.json").exists():
        raise SystemExit("There are no mutants here: start `mutmut run` before, and this in the same folder.")
    os.chdir("mutants")
    os.environ["PYTHONPATH"] = str(Path.cwd())  # also for the processes of tests
    package = importlib.import_module("hvd_bert").__file__ or ""
    if not Path(package).is_relative_to(Path.cwd()):
        raise SystemExit(f"{package} has no mutants: start this with PYTHONPATH=mutants.")
    draw_the_same_examples()
    for module in Path("tests/mutmut_preload.txt").read_text().split():
        importlib.import_module(module)
    mutants = Mutants(args.patterns)
    for part in (run_after_collecting, run_with_imports):
        status = forked(lambda part=part: part(mutants, deadline))  # type: ignore[misc]
        if status:
            raise SystemExit(f"The tests cannot be collected: status {status}.")
    summarize(args.patterns)


if __name__ == "__main__":
    main()
