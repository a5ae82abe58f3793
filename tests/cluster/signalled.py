"""Start a launcher, and send a signal only to the launcher once the ranks train: signalled.py SIGNAL COMMAND...

Prints the output and, once all processes have ended, the seconds since the signal. Exits with the launcher's status.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time


def main() -> int:
    number = getattr(signal, sys.argv[1])
    with subprocess.Popen(sys.argv[2:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        assert launcher.stdout
        signalled = 0.0
        for line in launcher.stdout:
            print(line, end="", flush=True)
            if not signalled and re.search(r"step \d+/", line):
                launcher.send_signal(number)
                signalled = time.monotonic()
        print(f"all ended {time.monotonic() - signalled:.1f} s after the signal", flush=True)
    return launcher.returncode


if __name__ == "__main__":
    sys.exit(main())
