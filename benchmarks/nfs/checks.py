"""What the trainer needs of a shared file system, tried by two hosts on NFS: checks.py c1|c2, in the shared folder.

The hosts wait for each other through files. c1 ends without a word to the server, as a host that loses its power.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvd_bert.storage import locks, writing

HOLD = """
import signal
from pathlib import Path
from hvd_bert.storage import locks
lock = locks.take(Path("lock"), wait=False)
print(repr(lock.missing), flush=True)
signal.pause()
"""
TRAIN = (
    "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 10.78.0.11:29400 -m hvd_bert.train"
    " --config sample --max_train_samples 64 --max_eval_samples 8 --save_steps 4 --output_dir out --max_steps 12"
)
REPLACED_S, PATIENCE_S = 15.0, 600.0
role = sys.argv[1]


def say(*words: object) -> None:
    print(f"{role}:", *words, flush=True)


def done(name: str) -> None:
    Path(name).touch()


def await_file(name: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while name not in {path.name for path in Path().iterdir()}:
        if time.monotonic() > deadline:
            sys.exit(f"{role}: WRONG: the other host did not make {name}")
        time.sleep(0.1)  # between looks, which the deadline ends


@contextmanager
def within_limit(what: str) -> Iterator[None]:
    """End this program if the block takes longer than PATIENCE_S."""

    def expired(*_: object) -> None:
        sys.exit(f"{role}: WRONG: {what} took more than {PATIENCE_S:.0f} s")

    signal.signal(signal.SIGALRM, expired)
    signal.alarm(int(PATIENCE_S))
    try:
        yield
    finally:
        signal.alarm(0)


def train() -> None:
    with within_limit("the training"):
        say("training ended with status", subprocess.run(TRAIN.split()).returncode)


def holder() -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with within_limit("taking the lock"):
        say("holds the lock; excludes only this host because:", process.stdout.readline().strip())
    return process


def first() -> None:
    process = holder()
    done("held")
    await_file("refused")
    process.kill()
    process.wait()
    done("killed")
    await_file("taken")
    number, end = 0, time.monotonic() + REPLACED_S
    while time.monotonic() < end:
        number += 1
        writing.write_json(Path("state.json"), {"number": number, "text": "x" * 5000})
    say("replaced a file", number, "times")
    done("replaced")
    begin = time.monotonic()
    with writing.replacing(Path("durable"), durable=True) as partial:
        partial.write_bytes(bytes(1_000_000))
    say(f"wrote 1 MB durably in {time.monotonic() - begin:.2f} s")
    writing.write_once(Path("once"), b"same" * 1000)
    train()
    await_file("trained")
    holder()
    done("held again")
    await_file("waits")
    Path("/proc/sysrq-trigger").write_text("b")


def second() -> None:
    await_file("held")
    try:
        locks.take(Path("lock"), wait=False)
        say("WRONG: took a lock that another host holds")
    except locks.InUse as refused:
        say("is refused; the lock is held by", refused.holder)
    done("refused")
    await_file("killed")
    begin = time.monotonic()
    with within_limit("the lock of a killed process"), locks.take(Path("lock"), wait=True):
        say(f"took the lock {time.monotonic() - begin:.2f} s after its holder was killed")
    done("taken")
    seen: set[int] = set()
    errors = 0
    with within_limit("the other host's writes"):
        while "replaced" not in {path.name for path in Path().iterdir()}:  # lists: names alone are cached for 30 s
            try:
                seen.add(json.loads(Path("state.json").read_text())["number"])
            except FileNotFoundError:
                pass
            except (OSError, ValueError):
                errors += 1
    say("WRONG:" if errors else "read", len(seen), "different versions of the replaced file; errors:", errors)
    writing.write_once(Path("once"), b"same" * 1000)
    train()
    done("trained")
    await_file("held again")
    done("waits")
    begin = time.monotonic()
    with within_limit("the lock of a lost host"), locks.take(Path("lock"), wait=True):
        say(f"took the lock {time.monotonic() - begin:.1f} s after its holder's host was gone")


if __name__ == "__main__":
    first() if role == "c1" else second()
