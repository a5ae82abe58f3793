"""The analysis of timelines: reading complete and cut files, and figures of made timelines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_timelines import START, Timeline, training

from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_OK, UserError
from hvd_bert.tools.timeline import __main__ as command
from hvd_bert.tools.timeline import events as reader
from hvd_bert.tools.timeline.analysis import Findings
from hvd_bert.tools.timeline.events import BEGIN, TICK, Recording


def found(made: Timeline, folder: Path) -> Findings:
    return command.read(made.write(folder / "t.json"))


def read_events(path: Path) -> tuple[list[tuple[Any, ...]], Recording]:
    """(phase, name or rank, ts, pid) of every event."""
    source = Recording()
    events = source.events(path)
    rows = []
    for phase, code, ts, pid in zip(events.phase, events.code, events.ts, events.pid, strict=True):
        name = source.names[code] if phase == BEGIN else str(code) if phase == TICK else ""
        rows.append((chr(phase), name, int(ts), int(pid)))
    return rows, source


def expected_events(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(e["ph"], e.get("name", ""), e["ts"], e["pid"]) for e in events if e["ph"] != "i"]


NAMES = st.sampled_from(["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "QUEUE", "MPI_ALLREDUCE", "INIT_NCCL", "ADASUM"])
TIMES = st.integers(0, 99) | st.integers(0, 10**15 - 1)
EVENT = st.tuples(st.sampled_from("BEXi"), TIMES, st.integers(0, 30), NAMES, st.integers(0, 1200))


@settings(max_examples=60)
@given(st.lists(EVENT, min_size=1, max_size=80), st.integers(64, 2000))
def test_reads_the_same_as_json(tmp_path_factory, events, block):
    made = Timeline()
    for phase, ts, number, name, rank in events:
        if phase == "i":
            made.event(phase, ts, name="CYCLE_START", s="g")
        elif phase == "X":
            made.event(phase, ts, f"layer.{number}", str(rank), dur=0)
        else:
            made.event(phase, ts, f"layer.{number}", name if phase == "B" else "")
    path = made.write(tmp_path_factory.mktemp("made") / "t.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "BLOCK", block)
        rows, source = read_events(path)
    assert [event for event in json.loads(path.read_text()) if "ts" in event] == made.events
    assert rows == expected_events(made.events)
    assert not source.cut_short


def test_files_cut_anywhere(tmp_path):
    """All complete events of a killed run's file are read, wherever it is cut."""
    made = training(steps=2)
    path, whole, expected = tmp_path / "t.json", made.text, expected_events(made.events)
    complete = [match.end() for match in re.finditer(r'\{"ph"[^{}]*(\{[^{}]*\}[^{}]*)?\}', whole)]
    for length in range(whole.index('{"ph"') + 40, len(whole), 61):
        path.write_text(whole[:length])
        rows, source = read_events(path)
        # An event without its args is complete enough.
        assert len(rows) - sum(end <= length for end in complete) in (0, 1)
        assert rows == expected[: len(rows)] and source.cut_short


@pytest.mark.parametrize(("dtype", "shape", "size"), [("float16", "[30522, 384]", 2 * 30522 * 384), ("odd", "[3]", -1)])
def test_sizes_follow_from_dtype_and_shape(tmp_path, dtype, shape, size):
    made = Timeline()
    made.event("B", 1, "a", "ALLREDUCE")
    made.event("E", 2, "a", args={"dtype": dtype, "shape": shape})
    assert Recording().events(made.write(tmp_path / "t.json")).size.tolist() == [-1, size]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\xef\xbb\xbf[\n]", "has no events"),
        ('{"schemaVersion": 1, "traceEvents": [{"ph": "X"}]}', "is not a Horovod timeline"),
        ('[{"ph": "B", "name": "forward", "ts": 1, "pid": 2}, {"ph": "E", "ts": 3, "pid": 2}]', "events are forward"),
        (START + '{"ph": "i", "name": "CYCLE_START", "ts": 177, "s": "g"}]', "no tensor was sent"),
    ],
)
def test_other_files_are_refused_with_the_reason(tmp_path, capsys, content, message):
    path = tmp_path / "other.json"
    path.write_bytes(content.encode("latin-1"))
    assert command.main([str(path)]) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith(f"hvd_bert: {path} ") and message in error


def test_what_is_no_file_is_refused(tmp_path, capsys):
    for path, message in ((tmp_path / "none.json", "cannot be read: No such file"), (tmp_path, "is a folder")):
        assert command.main([str(path)]) == EXIT_BAD_INPUT
        error = capsys.readouterr().err
        assert str(path) in error and message in error


def test_an_operation_without_end_is_left_out(tmp_path):
    made = training(steps=12)
    expected = found(made, tmp_path)
    assert (expected.cut_short, expected.unfinished) == (False, 0)
    made.event("B", 9_000_000, "allreduce.a", "NEGOTIATE_ALLREDUCE")
    made.event("X", 9_000_000, "allreduce.a", "0", dur=0)
    seen = command.read(made.write(tmp_path / "t.json", end=""))
    assert (seen.cut_short, seen.unfinished) == (True, 1)
    assert (seen.step, seen.sizes) == (expected.step, expected.sizes)


USUAL = training(steps=4).text.removesuffix(",")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, len(USUAL)), st.integers(0, 300), st.binary(max_size=12) | st.just(b"9" * 30)),
        min_size=1,
        max_size=4,
    )
)
def test_any_damage_is_read_or_refused(tmp_path, cuts):
    content = USUAL.encode()
    for start, length, instead in cuts:
        content = content[:start] + instead + content[start + length :]
    (tmp_path / "t.json").write_bytes(content + b"]")
    try:
        findings = command.read(tmp_path / "t.json")
    except UserError:
        return
    assert command.content.page(findings).as_text()


def test_phases_messages_and_steps(tmp_path):
    library = "NCCL_ALLREDUCE"
    seen = found(training(steps=12, library=library), tmp_path)
    assert seen.ranks == 2
    assert seen.covered_s == pytest.approx(2.169)
    phases = {phase.name: phase for phase in seen.phases}
    reduce = phases[library]
    assert (reduce.kind, reduce.count) == ("collective", 24)
    assert reduce.total_s == pytest.approx(12 * (0.02 - 20e-6 + 0.01))
    assert reduce.share == pytest.approx(reduce.total_s / 2.169)
    assert reduce.p99_s == pytest.approx(0.01998, rel=0.011)
    assert phases["MEMCPY_IN_FUSION_BUFFER"].total_s == pytest.approx(12 * 10e-6)
    assert phases["NEGOTIATE_ALLREDUCE"].count == 36
    assert phases[library.replace("ALLREDUCE", "BCAST")].count == 2
    # a and b together, then c: 2 MiB in 19.98 ms, 1 MiB in 10 ms
    assert [(row.up_to, row.messages, row.tensors) for row in seen.sizes] == [(1 << 20, 12, 12), (16 << 20, 12, 24)]
    assert seen.bytes_per_s == pytest.approx(2 * 2**20 / 0.01998)
    assert seen.wire_bytes_per_s == seen.bytes_per_s  # for 2 ranks; for 4 a ring sends 1.5 times the bytes
    other = found(training(steps=6, ranks=4), tmp_path)
    assert other.wire_bytes_per_s == pytest.approx(1.5 * other.bytes_per_s)
    step = seen.step
    assert step is not None
    assert (step.steps, step.messages, step.size, step.wait_s) == (11, 2, 3 * 2**20, 0)
    figures = (step.step_s, step.busy_s, step.exposed_least_s, step.exposed_most_s, step.hidden_share)
    assert figures == pytest.approx((0.1, 0.03, 0.01, 0.01, 2 / 3))


@pytest.mark.parametrize(
    ("library", "second", "took", "shape", "expected"),
    [  # (time at which a second tensor is ready, after one that was sent for 40 ms)
        ("MPI_ALLREDUCE", 40_100, 5000, (256, 1024), (0.005, 0.045)),  # noticed after the thread has sent the first one
        ("NCCL_ALLREDUCE", 40_100, 5000, (256, 1024), (0.005, 0.005)),  # noticed immediately
        ("NCCL_ALLREDUCE", 60_000, 100, (), (0.04, 0.04)),  # a loss, which is no gradient
    ],
    ids=["by one thread", "NCCL", "loss"],
)
def test_bounds_of_exposed_communication(tmp_path, library, second, took, shape, expected):
    made = Timeline()
    for start in range(0, 600_000, 100_000):
        made.negotiate("a", (start, start))
        made.send(["a"], start, start + 40_000, library)
        made.negotiate("c", (start + second, start + second))
        made.send(["c"], start + second, start + second + took, library, shape=shape)
    step = found(made, tmp_path).step
    assert step is not None and (step.exposed_least_s, step.exposed_most_s) == pytest.approx(expected)


def test_a_step_with_few_tensors_lengthens_no_other(tmp_path):
    """Steps of 1 ms. One of them sends only a metric and is left out, and the one before it has no known end."""
    made = Timeline()
    for step in range(12):
        for tensor in ("a",) if step == 6 else ("a", "b", "c"):
            made.negotiate(tensor, (1000 * step, 1000 * step))
            made.send([tensor], 1000 * step, 1000 * step + 100)
    seen = found(made, tmp_path)
    assert seen.step is not None
    assert (seen.step.steps, seen.step.step_s, seen.step.p99_s) == (10, pytest.approx(1e-3), pytest.approx(1e-3))


def test_the_straggler_is_named(tmp_path):
    seen = found(training(steps=20, ranks=4, straggler=2, by=200_000), tmp_path)
    late = seen.rank_rows[2]
    assert (late.last, late.of_steps) == (60, 19)
    assert (late.median_s, late.waited_s) == pytest.approx((0.2, 19 * 0.2), rel=0.011)
    assert [row.steps for row in seen.rank_rows] == [0, 0, 19, 0]
    assert seen.advice[0].startswith("Rank 2 is a straggler: it is the last in 19 of 19 steps, by 200 ms")


def test_no_straggler_is_named_without_ticks_or_with_few_steps(tmp_path):
    for made, of_steps, wait_s, words in (
        (training(steps=20, by=50_000, cached=True), 0, 0.05, "HOROVOD_CACHE_CAPACITY=0"),
        (training(steps=10, straggler=1, by=200_000), 9, 0.2, "record 11 or more"),
    ):
        seen = found(made, tmp_path)
        assert seen.step is not None and seen.step.wait_s == pytest.approx(wait_s)
        assert [row.of_steps for row in seen.rank_rows] == [of_steps] * 2
        assert words in seen.advice[0] and not any(line.startswith("Rank ") for line in seen.advice)


def test_advice_follows_from_figures(tmp_path):
    small = Timeline()
    for step in range(12):
        for number in range(12):
            start = 100_000 * step + 3000 * number
            small.negotiate(f"t{number}", (100_000 * step, 100_000 * step))
            small.send([f"t{number}"], start, start + 3000, shape=(10,))
    for made, words in (
        (training(steps=12, step_us=400_000), "does not slow this run down: 2.5 %"),
        (training(steps=12), "Exposed communication takes 10 ms (10.0 %"),
        (small, "12 messages of 40 bytes each: latency"),
        (training(steps=2), "No training steps found"),
        (training(steps=12, ranks=1), "One rank sends nothing"),
    ):
        (advice,) = found(made, tmp_path).advice
        assert words in advice


def test_json_and_text(tmp_path, capsys):
    path = str(training(steps=12, straggler=1, by=20_000).write(tmp_path / "t.json"))
    assert command.main([path, "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["rank_rows"][0]["median_s"] is None  # never late
    assert command.main([path]) == EXIT_OK
    text = " ".join(capsys.readouterr().out.split())
    assert "Bandwidth: " in text and "Rank 1 is a straggler" in text
    assert command.main([str(training(steps=12, ranks=1).write(tmp_path / "one.json"))]) == EXIT_OK
    text = " ".join(capsys.readouterr().out.split())
    assert " events of 1 rank in " in text and not any(words in text for words in ("unknown", "name ranks", "MB/s"))


@pytest.mark.slow
def test_the_page_needs_neither_torch_nor_horovod_nor_other_files(tmp_path):
    path = training(steps=20, ranks=4, straggler=2, by=200_000).write(tmp_path / "\x1b]0;title\x07\x9b31m<script>.json")
    program = (
        "import sys\nfrom hvd_bert.tools.timeline.__main__ import main\n"
        f"assert main([{str(path)!r}, '--html', {str(tmp_path / 't.html')!r}]) == 0\n"
        "assert not {'torch', 'horovod', 'mpi4py', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=120, capture_output=True, text=True)
    page = (tmp_path / "t.html").read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", page) and "url(" not in page
    assert "MPI_ALLREDUCE" in page and "Rank 2 is a straggler" in page
    # Names are neither commands to the terminal nor markup.
    for shown in (done.stdout, page):
        assert "title" in shown and not {"\x1b", "\x07", "\x9b"} & set(shown)
    assert "&lt;script&gt;" in page and "<script" not in page
