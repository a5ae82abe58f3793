"""Programs that train in a process group, in a thread, or under submitit, `spawn` or Ray (programs.py), or answer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import programs
import pytest
from commands import losses, printed, skip_without
from launch import REPOSITORY, Outcome, environment, launcher, run
from processes import started

from hvd_bert import QuestionAnswerer
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_STOPPED

pytestmark = pytest.mark.integration


def start(folder: Path, by: str, kind: str, strategy: str, **options: Any) -> Outcome:
    """Run programs.py on two ranks of the launcher `by`, or as one process. The output folder is `out`."""
    words = launcher(2, by) if by != "none" else []
    return run([*words, sys.executable, programs.__file__, kind, strategy, "out"], folder, **options).expect(0)


def check(folder: Path, expected: list[float], size: int = 2) -> None:
    """Check that a single world has trained to the end with the expected losses."""
    results = json.loads((folder / "out" / "train_results.json").read_text())
    assert results["world_size"] == size
    assert losses(folder / "out") == pytest.approx(expected, abs=1e-5)


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


@pytest.mark.parametrize("strategy", ["deepspeed", "horovod"])
def test_group_of_the_program(tmp_path: Path, horovodruns: list[float], strategy: str) -> None:
    skip_without(strategy)
    start(tmp_path, "torch", "group", strategy)
    assert written(tmp_path) == [{"stopped": EXIT_STOPPED, "resumed": None, "sum": 2.0}] * 2
    check(tmp_path, horovodruns)


def test_error_in_a_group_is_raised(tmp_path: Path) -> None:
    """The failed rank's process continues after the error, and the other rank does not wait for it."""
    start(tmp_path, "torch", "failing", "ddp")
    one, other = written(tmp_path)
    assert one["alone"] == other["alone"] == EXIT_BAD_INPUT
    assert other["failed"] == "LookupError" and one["failed"] == "RuntimeError"


def test_thread_in_a_group(tmp_path: Path, horovodruns: list[float]) -> None:
    outcome = start(tmp_path, "torch", "thread", "ddp")
    assert printed(outcome).count("SIGTERM") == 1, "one warning that it is not handled"
    assert written(tmp_path) == [{"stopped": None, "resumed": None, "sum": 2.0}] * 2
    check(tmp_path, horovodruns)


def test_thread_under_a_launcher(tmp_path: Path, horovodruns: list[float]) -> None:
    start(tmp_path, "gloo", "launched", "horovod")
    check(tmp_path, horovodruns)


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "ddp"), (2, "horovod")])
def test_submitit(tmp_path: Path, horovodruns: list[float], ranks: int, strategy: str) -> None:
    pytest.importorskip("submitit")
    start(tmp_path, "none", f"submitit{ranks}", strategy, cold=True)
    assert written(tmp_path) == [{"stopped": "checkpoint-3", "resumed": [7] * ranks}]
    check(tmp_path, horovodruns, ranks)


def test_spawn(tmp_path: Path, horovodruns: list[float]) -> None:
    start(tmp_path, "none", "spawn", "ddp")
    assert written(tmp_path) == [{"status": EXIT_STOPPED, "stopped": "checkpoint-3"}]
    check(tmp_path, horovodruns)


def test_ray(tmp_path: Path, horovodruns: list[float]) -> None:
    pytest.importorskip("ray")
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # a socket's path has at most 107 characters
        env = {"HOME": str(tmp_path), "RAY_TMPDIR": short, "RAY_AUTH_MODE": "disabled"}
        env |= {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'examples'}"}
        start(tmp_path, "none", "ray", "ddp", cold=True, env=env)
    sums = [path.read_text() for path in sorted(tmp_path.glob("sum*"))]
    assert sums == ["2.0", "2.0"], "the group of Ray Train must remain"
    for folder in (tmp_path, tmp_path / "actors"):
        check(folder, horovodruns)


def test_server_of_answers(baseline: Path) -> None:
    """Unusable questions are refused with the reason, while others are answered. The server ends at SIGTERM."""
    pytest.importorskip("fastapi", reason="needs env/setup.sh --dev")
    command = [sys.executable, REPOSITORY / "examples" / "answer_server.py", baseline, "--port", "0"]
    text = "The box is red. The river in the north is blue."
    first, second = ({"question": f"What colour has the {thing}?", "context": text} for thing in ("box", "river"))
    asked = [first, second | {"top_k": 30}, first | {"context": " "}, {"question": "Who?"}]

    def reply(path: str, body: Any = None) -> tuple[int, Any]:
        data = json.dumps(body).encode() if body else None
        try:
            with urlopen(Request(address + path, data, {"Content-Type": "application/json"}), timeout=60) as response:
                return response.status, json.load(response)
        except HTTPError as error:
            return error.code, json.load(error)["detail"]

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with started(command, env=environment(), **pipes) as server, ThreadPoolExecutor(16) as clients:
        log = ""
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", log)):
            line = server.stdout.readline()
            assert line, log
            log += line
        address = found[0]
        replies = [*clients.map(reply, ["/answer"] * 16, asked * 4)]
        _, health = reply("/health")
        server.terminate()
    qa = QuestionAnswerer(baseline)
    expected = [[qa(first)], qa(second, top_k=30)] * 8
    assert [status for status, _ in replies] == [200, 200, 422, 422] * 4
    for (status, content), answers in zip(replies, expected, strict=True):
        if status == 200:
            given = content if isinstance(content, list) else [content]
            assert [(each["answer"], each["start"]) for each in given] == [(each.text, each.start) for each in answers]
        else:
            assert "context" in str(content)
    assert health == {"model": str(baseline), "device": "cpu", "questions": 8, "batches": health["batches"]}
    assert health["batches"] in range(1, 9)
