"""`python -m hvd_bert.train` in which one rank takes longer: slowed.py -m MODULE ...

SLOWED_RANK: which; SLOWED_S: by how many seconds in each step, before its backward pass.
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
    time.sleep(float(os.environ["SLOWED_S"]))  # the slow device that this stands for
    backward(self, loss)  # type: ignore[arg-type]


assert sys.argv[1] == "-m"
del sys.argv[:2]
if find_launcher(os.environ).rank == int(os.environ["SLOWED_RANK"]):
    HorovodStrategy.backward = slow_backward  # type: ignore[method-assign]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
