"""Timelines: complete and truncated files are read, and the analysis of made-up timelines is right."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_timelines import START, MadeTimeline, training

from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_OK, UserError
from hvd_bert.tools.timeline import __main__ as command
from hvd_bert.tools.timeline import events as reader
from hvd_bert.tools.timeline.events import Event, Timeline
from hvd_bert.tools.timeline.findings import Findings


def found(made: MadeTimeline, folder: Path) -> Findings:
    return command.read(made.write(folder / "t.json"))


def read_events(path: Path) -> tuple[list[Event], bool]:
    source = Timeline(path)
    return list(source.events()), source.cut_short


def expected_events(text: str) -> list[Event]:
    rows = [{"name": "", "args": {}} | event for event in json.loads(text) if event["ph"] in "BEX"]
    return [(e["ph"], e["name"], e["ts"], e["pid"], SIZES[tuple(e["args"].values())]) for e in rows]


SIZES = {(): -1, ("float32", "[256, 1024]"): 2**20, ("float16", "[30522, 384]"): 2 * 30522 * 384, ("bool", "[]"): 1}
SIZES |= {("odd", "[3]"): -1, ("int8", f"[{10**9}, {10**9}]"): -1}
NAMES = st.sampled_from(["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "QUEUE", "MPI_ALLREDUCE", "INIT_NCCL", "ADASUM"])
TIME = {"ts": st.integers(0, 99) | st.integers(0, 10**15 - 1)}
MORE = {**TIME, "pid": st.integers(1, 31)}
ARGS = st.sampled_from([dict(zip(("dtype", "shape"), size, strict=True)) for size in SIZES if size])
EVENT = st.one_of(
    st.fixed_dictionaries({"ph": st.just("B"), "name": NAMES, **MORE}),
    st.fixed_dictionaries({"ph": st.just("E"), **MORE}, optional={"args": ARGS}),
    st.fixed_dictionaries({"ph": st.just("X"), "name": st.integers(0, 1200).map(str), **MORE, "dur": st.just(0)}),
    st.fixed_dictionaries({"ph": st.just("i"), "name": st.just("CYCLE_START"), **TIME, "s": st.just("g")}),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(EVENT, min_size=1, max_size=80), st.integers(64, 2000))
def test_events_are_read_as_by_json(tmp_path, events, block):
    keys = ("ph", "name", "ts", "pid", "dur", "s", "args")  # in the writer's order
    ordered = [{key: event[key] for key in keys if key in event} for event in events]
    text = START + ",".join(map(json.dumps, ordered)) + "]"
    (tmp_path / "t.json").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "BLOCK", block)
        assert read_events(tmp_path / "t.json") == (expected_events(text), False)


def test_files_cut_anywhere(tmp_path):
    """All complete events are read, wherever a kill truncated the file."""
    path, whole = tmp_path / "t.json", training(steps=2).text
    expected = expected_events(whole.removesuffix(",") + "]")
    complete = [match.end() for match in re.finditer(r'\{"ph"[^{}]*(\{[^{}]*\}[^{}]*)?\}', whole)]
    for length in range(whole.index('{"ph"') + 40, len(whole), 61):
        path.write_text(whole[:length])
        rows, cut_short = read_events(path)
        # An event that lacks only its args is read, too.
        assert len(rows) - sum(end <= length for end in complete) in (0, 1)
        assert [row[:4] for row in rows] == [row[:4] for row in expected[: len(rows)]] and cut_short


def test_a_large_file_is_read_in_part(tmp_path, monkeypatch, capsys):
    path = training(steps=40).write(tmp_path / "t.json")
    for module in (reader, command.summary):
        monkeypatch.setattr(module, "MAX_BYTES", path.stat().st_size // 2)
    monkeypatch.setattr(reader, "BLOCK", 1000)
    seen = command.read(path)
    assert seen.step is not None and 18 <= seen.step.steps <= 20 and seen.step.step_s == pytest.approx(0.1)
    assert command.main([str(path)]) == EXIT_OK
    assert "--timeline_steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\xef\xbb\xbf[\n]", "has no events"),
        ('{"schemaVersion": 1, "traceEvents": [{"ph": "X"}]}', "is not a Horovod timeline"),
        ('[{"ph": "B", "name": "forward", "ts": 1, "pid": 2}, {"ph": "E", "ts": 3, "pid": 2}]', "events are forward"),
        (START + '{"ph": "i", "name": "CYCLE_START", "ts": 177, "s": "g"}]', "no tensor was sent"),
        (None, "directory"),
    ],
)
def test_other_files_are_refused_with_the_reason(tmp_path, capsys, content, message):
    path = tmp_path / "other.json" if content else tmp_path
    if content:
        path.write_bytes(content.encode("latin-1"))
    assert command.main([str(path)]) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith(f"hvd_bert: {path}") and message in error


def test_spans_without_an_end_are_left_out(tmp_path):
    made, expected = training(steps=12), found(training(steps=12), tmp_path)
    assert (expected.cut_short, expected.unfinished) == (False, 0)
    for ts, name in ((9_000_000, "ALLREDUCE"), (9_000_001, "MPI_ALLREDUCE"), (9_000_002, "NEGOTIATE_ALLREDUCE")):
        made.event("B", ts, "a", name)
    made.event("X", 9_000_003, "a", "0", dur=0)
    seen = command.read(made.write(tmp_path / "t.json", end=""))
    assert (seen.cut_short, seen.unfinished, seen.negotiations) == (True, 2, expected.negotiations)
    assert seen.step is not None and expected.step is not None and vars(seen.step) == vars(expected.step)


USUAL = training(steps=4).text.removesuffix(",").encode()
CUT = st.tuples(st.integers(0, len(USUAL)), st.integers(0, 300), st.binary(max_size=12) | st.just(b"9" * 30))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(CUT, min_size=1, max_size=4))
def test_any_damage_is_read_or_refused(tmp_path, cuts):
    content = USUAL
    for start, length, instead in cuts:
        content = content[:start] + instead + content[start + length :]
    (tmp_path / "t.json").write_bytes(content + b"]")
    try:
        findings = command.read(tmp_path / "t.json")
    except UserError:
        return
    assert command.summary.page(findings).as_text()


def test_phases_messages_and_steps(tmp_path):
    seen = found(training(steps=12, library="NCCL_ALLREDUCE"), tmp_path)
    assert seen.ranks == 2 and seen.covered_s == pytest.approx(2.169)
    phases = {phase.name: phase for phase in seen.phases}
    reduce = phases["NCCL_ALLREDUCE"]
    assert (reduce.kind, reduce.count, phases["NEGOTIATE_ALLREDUCE"].count) == ("collective", 24, 36)
    assert reduce.total_s == pytest.approx(12 * (0.02 - 20e-6 + 0.01))
    assert reduce.share == pytest.approx(reduce.total_s / 2.169)
    assert phases["MEMCPY_IN_FUSION_BUFFER"].total_s == pytest.approx(12 * 10e-6)
    # Two messages per step: a and b (2 MiB in 19.98 ms), then c (1 MiB in 10 ms).
    assert [(row.up_to, row.messages, row.tensors) for row in seen.sizes] == [(1 << 20, 12, 12), (16 << 20, 12, 24)]
    assert seen.bytes_per_s == pytest.approx(2 * 2**20 / 0.01998)
    assert seen.wire_bytes_per_s == seen.bytes_per_s  # 2 ranks; with 4, a ring sends 1.5 times the bytes
    other = found(training(steps=6, ranks=4), tmp_path)
    assert other.wire_bytes_per_s == pytest.approx(1.5 * other.bytes_per_s)
    step = seen.step
    assert step is not None
    assert (step.steps, step.messages, step.size, step.wait_s) == (11, 2, 3 * 2**20, 0)
    figures = (step.step_s, step.busy_s, step.exposed_least_s, step.exposed_most_s, step.hidden_share)
    assert figures == pytest.approx((0.1, 0.03, 0.01, 0.01, 2 / 3))


@pytest.mark.parametrize(
    ("library", "second", "took", "shape", "expected"),
    [  # `second`: microseconds until a second tensor is ready; the first is sent from 0 to 40 ms
        ("MPI_ALLREDUCE", 40_100, 5000, (256, 1024), (0.005, 0.045)),  # may have waited until the first was sent
        ("NCCL_ALLREDUCE", 40_100, 5000, (256, 1024), (0.005, 0.005)),  # NCCL sends in the background: no wait
        ("NCCL_ALLREDUCE", 60_000, 100, (), (0.04, 0.04)),  # a loss, not a gradient
    ],
    ids=["by one thread", "NCCL", "loss"],
)
def test_bounds_of_exposed_communication(tmp_path, library, second, took, shape, expected):
    made = MadeTimeline()
    for start in range(0, 600_000, 100_000):
        made.negotiate("a", start)
        made.send("a", start, start + 40_000, library)
        made.negotiate("c", start + second)
        made.send("c", start + second, start + second + took, library, shape=shape)
    step = found(made, tmp_path).step
    assert step is not None and (step.exposed_least_s, step.exposed_most_s) == pytest.approx(expected)


def test_a_step_with_few_tensors_lengthens_no_other(tmp_path):
    """A step that sends only a metric is left out, and so is the previous step, whose end is unknown.

    The step after the short one begins with a tensor that the short step lacks.
    """
    made = MadeTimeline()
    for step in range(12):
        for number, tensors in enumerate({6: ["a"], 7: ["ca", "b"]}.get(step, ["c", "a", "b"])):
            for tensor in tensors:
                made.negotiate(tensor, 1000 * step + 100 * number)
            made.send(tensors, 1000 * step + 100 * number, 1000 * step + 100 * (number + 1))
    step = found(made, tmp_path).step
    assert step is not None
    assert (step.steps, step.step_s, step.p99_s) == (10, pytest.approx(1e-3), pytest.approx(1e-3))


SMALL = MadeTimeline()
for moment in range(0, 1_200_000, 100_000):
    for number, letter in enumerate("abcdefghijkl"):
        SMALL.negotiate(letter, moment)
        SMALL.send(letter, moment + 3000 * number, moment + 3000 * (number + 1), shape=(10,))


@pytest.mark.parametrize(
    ("made", "of_steps", "words"),
    [
        (training(steps=20, ranks=4, straggler=2, by=200_000), 19, "Rank 2 is a straggler: it is the last in 19 of 19"),
        (training(steps=20, by=50_000, cached=True), 0, "HOROVOD_CACHE_CAPACITY=0"),
        (training(steps=10, straggler=1, by=200_000), 9, "record 11 or more"),
        (training(steps=12, step_us=400_000), 11, "does not slow this run down: 2.5 %"),
        (training(steps=12), 11, "Exposed communication takes 10 ms (10.0 %"),
        (SMALL, None, "12 messages of 40 bytes each: latency"),
        (training(steps=2), 0, "No training steps found"),
        (training(steps=12, ranks=1), 0, "One rank sends nothing"),
    ],
)
def test_advice_follows_from_figures(tmp_path, made, of_steps, words):
    seen = found(made, tmp_path)
    assert words in seen.advice[0] and ("straggler:" in words) == seen.advice[0].startswith("Rank ")
    assert {row.of_steps for row in seen.rank_rows} <= {of_steps}


def test_ranks_that_come_last(tmp_path):
    seen = found(training(steps=20, ranks=4, straggler=2, by=200_000), tmp_path)
    assert [row.steps for row in seen.rank_rows] == [0, 0, 19, 0]
    late = seen.rank_rows[2]
    assert (late.last, late.median_s, late.waited_s) == pytest.approx((60, 0.2, 19 * 0.2), rel=0.011)


def test_json_text_and_page(tmp_path, capsys):
    path = training(steps=12, straggler=1, by=20_000).write(tmp_path / "\x1b]0;title\x07\x9b31m<script>.json")
    assert command.main([str(path), "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["rank_rows"][0]["median_s"] is None  # rank 0 is never late
    (tmp_path / "link.html").symlink_to("t.html")
    (tmp_path / "t.html").write_text("earlier")
    assert command.main([str(path), "--html", str(tmp_path / "link.html"), "--overwrite"]) == EXIT_OK
    assert (tmp_path / "link.html").is_symlink()
    text, page = capsys.readouterr().out, (tmp_path / "t.html").read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", page) and "url(" not in page
    for shown in (text, page):  # names are shown without terminal commands and markup
        assert "Bandwidth: " in shown and "Rank 1 is a straggler" in shown and "MPI_ALLREDUCE" in shown
        assert "title" in shown and not {"\x1b", "\x07", "\x9b"} & set(shown)
    assert "&lt;script&gt;" in page and "<script" not in page
    assert command.main([str(training(steps=12, ranks=1).write(tmp_path / "one.json"))]) == EXIT_OK
    text = " ".join(capsys.readouterr().out.split())
    assert " events of 1 rank in " in text and not any(words in text for words in ("unknown", "name ranks", "MB/s"))
