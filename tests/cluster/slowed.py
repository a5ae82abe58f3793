"""`python -m hvd_bert.train` with one slow rank: slowed.py -m MODULE ...

SLOWED_RANK: the rank. SLOWED_S: seconds that it sleeps in each step, before the backward pass.
"""

from __future__ import annotations

import os
import runpy
import sys
import time

from hvd_bert.distributed.launch import find_launcher
from hvd_bert.strategies.horovod import HorovodStrategy

backward = HorovodStrategy.backward


def slow_backward(self: HorovodStrategy, loss: object) -> None:
    time.sleep(float(os.environ["SLOWED_S"]))  # simulates a slow device
    backward(self, loss)  # type: ignore[arg-type]


assert sys.argv[1] == "-m"
del sys.argv[:2]
if find_launcher(os.environ).rank == int(os.environ["SLOWED_RANK"]):
    HorovodStrategy.backward = slow_backward  # type: ignore[method-assign]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
