from __future__ import annotations

from pathlib import Path

import pytest
from commands import losses, small_run
from launch import launcher, run


@pytest.fixture(scope="session")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of an uninterrupted run with --strategy none and CPU kernels. Tests must not change it."""
    out = tmp_path_factory.mktemp("baseline") / "out"
    run(small_run(1, out, "--strategy", "none"), out.parent).expect(0)
    return out


@pytest.fixture(scope="session")
def horovodruns(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of two ranks under horovodrun, as a reference for other launchers."""
    out = tmp_path_factory.mktemp("horovodrun") / "out"
    run([*launcher(2, "gloo"), *small_run(2, out)], out.parent).expect(0)
    return losses(out)
