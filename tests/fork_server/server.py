"""Import the libraries once, and fork for each Python command that tests run.

    python server.py SOCKET [PID]  runs the commands that client.py sends, until standard input closes

With PID, it serves in the PID namespace of that process. A command runs in its client's other namespaces.

Imports take two thirds of a short training. A forked command still has its own process, streams, environment,
arguments, working directory, signals and exit status. But the modules in PRELOADED are already imported. The modules in
PRELOADED_IF_NAMED are imported for the first command that names them, and remain imported for later commands.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
from typing import Any, NoReturn

PRELOADED = [
    "hvd_bert.training.loop",
    "hvd_bert.output.reporters.tensorboard",
    "hvd_bert.predict.answering",
    "hvd_bert.config.command_line",
    "transformers.models.bert.modeling_bert",
    "transformers.models.bert.tokenization_bert",
    "transformers.conversion_mapping",
    "hvd_bert.distributed.runner",
    "hvd_bert.distributed.torch_world",
    "hvd_bert.strategies.horovod",
    "hvd_bert.strategies.ddp",
    "hvd_bert.strategies.fsdp",
    "hvd_bert.tools.doctor.diagnosis",
    "hvd_bert.tools.bench.speed",
    "horovod.torch",
    "horovod.runner.launch",
    "torch.distributed.run",
]
# Imported for the first command that names them: DeepSpeed trainings also import torch's compiler, which takes 5 s per
# rank.
PRELOADED_IF_NAMED = {"deepspeed": ["deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer"]}
NUMBER = struct.Struct("!I")
PEER_CREDENTIALS = struct.Struct("3i")  # process, user and group id
PR_SET_PDEATHSIG = 1
HOST = ("net", "uts", "mnt")  # namespaces; mnt must be the last, since it may change /proc


def serve(path: str) -> dict[str, Any]:
    """Fork for each command, and send the client the child's process id and, once the child ends, its status.

    Kills the child if the client is killed. Returns only in the child processes, with the command and its streams.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    ready = selectors.DefaultSelector()
    ready.register(listener, selectors.EVENT_READ)
    ready.register(0, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if key.fd == 0:
                os.unlink(path)
                os._exit(0)
            elif key.fileobj is listener:
                client, _ = listener.accept()
                try:
                    command = receive(client)
                except (OSError, ValueError, struct.error):  # the client was killed before it had sent all
                    client.close()
                    continue
                preload_named(command["argv"])
                pid = os.fork()
                if pid == 0:
                    for other in [*ready.get_map().values()]:
                        if other.fd != 0:
                            os.close(other.fd)
                    ready.close()
                    client.close()
                    return command
                for stream in command["streams"]:
                    os.close(stream)
                with contextlib.suppress(OSError):
                    client.send(NUMBER.pack(pid))
                ready.register(client, selectors.EVENT_READ, (pid, client))
                ready.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, client))
            else:
                pid, client = key.data
                if key.fileobj is client:  # the client was killed, unless its command has ended
                    if client.fileno() != -1:
                        ready.unregister(client)
                        os.kill(pid, signal.SIGKILL)
                    continue
                ready.unregister(key.fd)
                os.close(key.fd)
                with contextlib.suppress(KeyError):
                    ready.unregister(client)
                with client, contextlib.suppress(OSError):
                    client.send(NUMBER.pack(os.waitpid(pid, 0)[1]))


def preload_named(words: list[str]) -> None:
    """Import the modules that PRELOADED_IF_NAMED lists for each name in the command. Later commands have them, too."""
    for name in [name for name in PRELOADED_IF_NAMED if any(name in word for word in words)]:
        os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise DeepSpeed probes for an accelerator
        with contextlib.suppress(Exception):  # the command then imports the module itself, and reports the error
            for module in PRELOADED_IF_NAMED.pop(name):
                importlib.import_module(module)
        gc.freeze()


def receive(client: socket.socket) -> dict[str, Any]:
    """Receive a command: its length together with the three standard streams, then the command as JSON."""
    header, streams, _, _ = socket.recv_fds(client, NUMBER.size, 3)
    with client.makefile("rb") as file:
        command: dict[str, Any] = json.loads(file.read(NUMBER.unpack(header)[0]))
    peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
    return command | {"streams": streams, "client": PEER_CREDENTIALS.unpack(peer)[0]}


def enter(pid: int, namespaces: tuple[str, ...]) -> None:
    """Move this process to those namespaces of process `pid` that differ from its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    files = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in namespaces]
    for name, file in zip(namespaces, files, strict=True):
        if not os.path.samestat(os.fstat(file), os.stat(f"/proc/self/ns/{name}")) and libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter namespace {name} of process {pid}")
        os.close(file)


def continue_inside(pid: int) -> None:
    """Continue in a child process in all namespaces of process `pid`. This process exits with the child's status."""
    enter(pid, ("pid", *HOST))
    child = os.fork()  # a process can change only its children's PID namespace
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)


def become(command: dict[str, Any]) -> None:
    """Give this process the command's namespaces, streams, folder, environment and arguments, and a new session.

    The kernel kills this process when the server ends.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    enter(command["client"], HOST)
    os.setsid()
    for number, stream in enumerate(command["streams"]):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(command["cwd"])
    os.environ.clear()
    os.environ.update(command["environ"])
    through = "PYTHONUNBUFFERED" in os.environ
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")  # type: ignore[misc]
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        raw = io.FileIO(number, "w", closefd=False)
        buffer = raw if through else io.BufferedWriter(raw)
        text = io.TextIOWrapper(buffer, "utf-8", errors, line_buffering=number == 2, write_through=through)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    sys.argv, sys.executable = command["argv"], command["python"]


def execute() -> int:
    """Run the command in sys.argv, `-m MODULE ...` or `SCRIPT ...`, as Python does.

    Returns the exit status, or the negative number of the signal that must end the process.
    """
    try:
        if sys.argv[0] == "-m":
            del sys.argv[0]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.realpath(sys.argv[0])))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def leave(status: int) -> NoReturn:
    """Exit as Python does, or by the signal -`status`, but do not free objects.

    Freeing would copy the memory that this process shares with the server, which takes 0.3 s.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()  # mpi4py does this only when Python itself exits
    sys.stdout.flush()
    sys.stderr.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    gc.disable()
    for module in PRELOADED:
        importlib.import_module(module)
    # Build transformers' table of weight names, which each rank would otherwise build when it saves.
    sys.modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("bert")
    gc.freeze()
    gc.enable()
    del sys.path[0]  # remove this folder
    if len(sys.argv) > 2:
        continue_inside(int(sys.argv[2]))
    become(serve(sys.argv[1]))
    leave(execute())
