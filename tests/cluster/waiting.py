"""`python -m hvd_bert.train` whose first attempt waits at a step for the time limit's signal: waiting.py -m MODULE ...

WAITING_STEP: that step, counted from 1. A signal that arrives while the trainer starts is delayed until then, so that
the test does not depend on the speed of the machine.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

from hvd_bert.strategies.horovod import HorovodStrategy

backward, steps = HorovodStrategy.backward, []


def wait_for_the_signal(self: HorovodStrategy, loss: object) -> None:
    steps.append(1)
    if len(steps) == int(os.environ["WAITING_STEP"]):
        signal.sigwait({signal.SIGUSR1})
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        os.kill(os.getpid(), signal.SIGUSR1)  # for the trainer's handler
    backward(self, loss)  # type: ignore[arg-type]


assert sys.argv[1] == "-m"
del sys.argv[:2]
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # inherited by later threads
    HorovodStrategy.backward = wait_for_the_signal  # type: ignore[method-assign]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
