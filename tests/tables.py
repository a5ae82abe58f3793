"""Tables of cases: all rows in one test, and refusals by what they name instead of by their wording."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from hvd_bert.errors import UserError

Test = Callable[..., None]


def each(names: str | Sequence[str], rows: Iterable[Any], ids: Any = None) -> Callable[[Test], Test]:
    """Like `pytest.mark.parametrize`, but all rows are one test, which names the rows that fail.

    Each row has a `tmp_path`, a `monkeypatch` and captured output of its own. Other fixtures are shared.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    single = isinstance(names, str) and len(arguments) == 1
    table = list(rows)
    assert table, "a table without rows tests nothing"

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        assert set(arguments) <= set(signature.parameters), f"{test.__name__} has no parameter for each of {arguments}"

        @functools.wraps(test)
        def every_row(*instance: Any, **fixtures: Any) -> None:
            failures = []
            for number, row in enumerate(table):
                values = dict(zip(arguments, [row] if single else row, strict=True))
                try:
                    with ExitStack() as stack:
                        test(*instance, **_of_one_row(fixtures, number, stack), **values)
                except (Exception, pytest.fail.Exception) as error:
                    shown = "".join(traceback.format_exception(error)[2:])
                    failures.append(f"row {number}, {_name(ids, number, row)}:\n{shown}")
                    if isinstance(error, pytest.fail.Exception) and "Timeout" in str(error):
                        break
            if failures:
                pytest.fail("\n".join([f"{len(failures)} of {len(table)} rows failed", *failures]), pytrace=False)

        kept = [parameter for name, parameter in signature.parameters.items() if name not in arguments]
        every_row.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return every_row

    return decorate


def _of_one_row(fixtures: dict[str, Any], number: int, stack: ExitStack) -> dict[str, Any]:
    own = dict(fixtures)
    if "tmp_path" in own:
        own["tmp_path"] = fixtures["tmp_path"] / str(number)
        own["tmp_path"].mkdir()
    if "monkeypatch" in own:
        own["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
    if "caplog" in own:
        own["caplog"].clear()
    for name in {"capsys", "capfd"} & own.keys():
        own[name].readouterr()
    return own


def _name(ids: Any, number: int, row: Any) -> str:
    if isinstance(ids, list | tuple):
        return str(ids[number])
    return repr(row)[:200]


@contextmanager
def refused(*named: str | Path | int, error: type[Exception] = UserError) -> Iterator[Any]:
    """The block raises an error whose one line names these values and places."""
    with pytest.raises(error) as raised:
        yield raised
    check_refusal(str(raised.value), *named)


def check_refusal(message: str, *named: str | Path | int) -> None:
    """A refusal names these values and places in one line of moderate length."""
    missing = [value for value in map(str, named) if value not in message]
    assert not missing, f"{missing} not in: {message}"
    assert len(message) < 1000 and "\n" not in message, message
