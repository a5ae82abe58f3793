"""Replace `python` in the tests' commands: server.py runs the command, and this process exits with its status.

    python -m MODULE ARGUMENTS...   or   python SCRIPT ARGUMENTS...   or   horovodrun|torchrun|hvd-bert ARGUMENTS...

The command runs in a new interpreter if no server runs on this host, if another option of Python is given, or if the
environment has HVD_BERT_TEST_COLD or changes a variable that libraries read on import.

This program imports little, because it runs for every rank.
"""

import json
import os
import signal
import socket
import struct
import sys
from contextlib import suppress

FOLDER = os.path.dirname(os.path.realpath(sys.argv[0]))
READ_AT_IMPORT = ("ATEN_", "HF_", "LD_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "TRANSFORMERS_")
FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    with open(os.path.join(FOLDER, "server.json"), encoding="utf-8") as file:
        served = json.load(file)
    name, words, environ = os.path.basename(sys.argv[0]), sys.argv[1:], dict(os.environ)
    if name != "python":
        words = [os.path.join(os.path.dirname(served["python"]), name), *words]
    if words[:1] == ["-u"] and "PYTHONUNBUFFERED" in environ:  # torchrun adds -u, which PYTHONUNBUFFERED implies
        words = words[1:]
    read = {name for name in {**served["environ"], **environ} if name.startswith(READ_AT_IMPORT)}
    alike = all(served["environ"].get(name) == environ.get(name) for name in read)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if "HVD_BERT_TEST_COLD" in environ or not alike or not words or (words[0].startswith("-") and words[0] != "-m"):
            raise OSError("not for the server")
        connection.connect(os.path.join(FOLDER, socket.gethostname()))
    except OSError:
        os.execve(served["python"], [served["python"], *words], environ)
    command = {"argv": words, "environ": environ, "cwd": os.getcwd(), "python": os.path.join(FOLDER, "python")}
    sys.exit(follow(connection, json.dumps(command).encode()))


def follow(connection: socket.socket, message: bytes) -> int:
    """Let the server run the command, and forward signals to the command.

    Returns the command's status. If a signal ended the command, the same signal ends this process.
    """
    early: list[int] = []
    for number in FORWARDED:
        signal.signal(number, lambda number, _: early.append(number))
    socket.send_fds(connection, [struct.pack("!I", len(message))], [0, 1, 2])
    connection.sendall(message)
    (pid,) = struct.unpack("!I", connection.recv(4))
    for number in FORWARDED:
        signal.signal(number, lambda number, _: send(pid, number))
    for number in early:
        send(pid, number)
    ended = connection.recv(4)
    if not ended:
        sys.exit("the fork server is gone")
    status = os.waitstatus_to_exitcode(struct.unpack("!I", ended)[0])
    if status < 0:
        if -status in FORWARDED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # the command has ended in the meantime
        os.kill(pid, number)


if __name__ == "__main__":
    main()
