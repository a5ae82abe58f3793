"""`python -m hvd_bert.train` whose rank 0 waits before a step until the test opens a gate: gated.py -m MODULE ...

GATED_FOLDER: where each rank writes its process id to `RANK.pid`; has the pipes `reached` and `go`.
GATED_STEP: before this step, counted from 1, rank 0 writes to the first and reads from the second; 0: never.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from hvd_bert.distributed.launch import find_launcher
from hvd_bert.train.loop import Training

folder, rank = Path(os.environ["GATED_FOLDER"]), find_launcher(os.environ).rank or 0
step = Training._step


def gated_step(self: Training) -> Any:
    if rank == 0 and self.state.step + 1 == int(os.environ["GATED_STEP"]):
        (folder / "reached").write_text("reached")
        with (folder / "go").open() as go:
            go.read(1)
    return step(self)


assert sys.argv[1] == "-m"
del sys.argv[:2]
(folder / f"{rank}.pid").write_text(str(os.getpid()))
Training._step = gated_step  # type: ignore[method-assign]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
