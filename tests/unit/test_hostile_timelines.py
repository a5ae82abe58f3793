"""Timelines with more names, ranks and sizes than Horovod writes: read in linear time, or refused with the reason."""

from __future__ import annotations

from pathlib import Path

import hostile
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_timelines import training

from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_OK, UserError
from hvd_bert.tools.timeline import __main__ as command

pytestmark = pytest.mark.timeout(60)  # the search for a table without collisions took minutes

USUAL = training(steps=4).text.removesuffix(",")
SPAN = '{"ph": "B", "name": "%s", "ts": %d, "pid": %s},{"ph": "E", "ts": %d, "pid": %s}'


def spans(count: int) -> str:
    return ",".join(SPAN % (f"KIND_{number}", 9 * 10**6 + number, 1, 9 * 10**6 + number, 1) for number in range(count))


def write(tmp_path: Path, *more: str) -> Path:
    path = tmp_path / "timeline.json"
    path.write_text(",".join([USUAL, *more]) + "]", encoding="utf-8")
    return path


def tick(name: str) -> str:
    return '{"ph": "X", "name": "%s", "ts": 9000000, "pid": 1, "dur": 0}' % name  # noqa: UP031


READ = {
    "300 kinds of spans": spans(300),
    "3,000 kinds of spans": spans(3000),
    "a rank with other digits": tick("\u00b2"),
    "a rank without a name": tick(""),
    "a long name": tick("a" * 10_000),
    "names without an end": '{"name": "process_name", "ph": "M", "pid": 3, "args": {"name": "' * 20_000,
    "names with a long number": '{"name": "process_name", "ph": "M", "pid": %s, "args": {"name": "a"}}' % ("9" * 5000),
    "a tensor of number 9,999,999": SPAN % ("ALLREDUCE", 9000000, 9999999, 9000001, 9999999),
    "a tensor with 5,000 digits": SPAN % ("ALLREDUCE", 9000000, "9" * 5000, 9000001, "9" * 5000),
    "an end before its begin": SPAN % ("ALLREDUCE", 999999999999999, 1, 5, 1),
    "no number of a tensor": SPAN % ("ALLREDUCE", 9000000, "-1", 9000001, "-1"),
    "nested": "[" * 100_000,
}
SHAPES = ("[1 2]", f"[{'9' * 5000}]", f"[{', '.join(['999999999999'] * 30)}]", "[9,", "[]")
REFUSED = {
    "rank 99999999999": (tick("99999999999"), "names rank 99999999999, which cannot be"),
    "rank 5,000,000": (tick("5000000"), "names rank 5000000, which cannot be"),
    "5,000 kinds of spans": (spans(5000), "more kinds of events than Horovod writes"),
}


@pytest.mark.parametrize("name", READ)
def test_read(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(write(tmp_path, READ[name]))]) == EXIT_OK
    assert " of 2 ranks in " in " ".join(capsys.readouterr().out.split())  # which wraps


def test_shapes(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    for shape in SHAPES:
        path.write_text(USUAL.replace("[256, 1024]", shape) + "]")
        assert command.read(path).ranks == 2


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path: Path, name: str) -> None:
    more, words = REFUSED[name]
    with pytest.raises(UserError) as raised:
        command.read(write(tmp_path, more))
    hostile.check_message(str(raised.value), words, "It is not a Horovod timeline")


def test_1000_ranks(tmp_path: Path) -> None:
    findings = command.read(training(steps=3, ranks=1000).write(tmp_path / "timeline.json"))
    assert findings.ranks == 1000 and len(findings.rank_rows) == 1000


def test_names_are_neither_commands_to_the_terminal_nor_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(USUAL.replace("allreduce.a", "\x1b]0;title\x07\x9b31m<script>") + "]", encoding="utf-8")
    assert command.main([str(path), "--html", str(tmp_path / "page.html")]) == EXIT_OK
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for shown in (capsys.readouterr().out, page):
        assert "title" in shown and not {"\x1b", "\x07", "\x9b"} & set(shown)
    assert "&lt;script&gt;" in page and "<script" not in page
    path.write_text("[" + SPAN % ("\x1b[31m", 5, 1, 6, 1) + "]", encoding="utf-8")
    assert command.main([str(path)]) == EXIT_BAD_INPUT
    assert "\x1b" not in capsys.readouterr().err


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(
        st.tuples(st.integers(0, len(USUAL)), st.integers(0, 300), st.binary(max_size=12) | st.just(b"9" * 30)),
        min_size=1,
        max_size=4,
    )
)
def test_any_damage_is_read_or_refused(tmp_path: Path, cuts: list[tuple[int, int, bytes]]) -> None:
    content = USUAL.encode()
    for start, length, instead in cuts:
        content = content[:start] + instead + content[start + length :]
    path = tmp_path / "timeline.json"
    path.write_bytes(content + b"]")
    try:
        findings = command.read(path)
    except UserError:
        return
    assert command.content.terminal(findings)
