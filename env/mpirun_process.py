"""Runs mpirun for horovodrun, in a process between them that stops the ranks when horovodrun is stopped or killed.

The ranks get SIGUSR1, which mpirun forwards to all hosts. After SIGTERM or SIGINT it would kill them within a second.
With Open MPI, Ctrl-C is SIGUSR2, and CTRL_C tells them so.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import psutil

CTRL_C = "OMPI_MCA_horovodrun_ctrl_c"  # Open MPI passes variables of this prefix on to all ranks
OPEN_MPI = "--tag-output"  # horovodrun gives it to no other mpirun
SAVED = 75  # the status of a rank that has saved, as in sysexits.h: try again
AT_ONCE_S = 1  # `timeout` and job scripts may send one request twice, to horovodrun and to its process group
PR_SET_PDEATHSIG = 1


def run(command, env):
    """Runs a shell command that starts mpirun. Returns its exit status.

    After a signal that ends mpirun before its ranks can save, that is the signal's.
    """
    open_mpi = OPEN_MPI in command
    env = {**env, CTRL_C: "SIGUSR2"} if open_mpi else env
    lifeline, held = os.pipe()  # the other end is closed when this process ends, also by SIGKILL
    process = None
    received = []  # signals, each with its time

    def stop(number, frame):
        received.append((number, time.monotonic()))  # first, because another signal may interrupt this
        requests = [when for number, when in received if number in (signal.SIGTERM, signal.SIGINT)]
        if len(received) == 1:
            if number == signal.SIGINT and open_mpi:
                os.write(held, b"\n")
            os.close(held)
        elif process and requests and requests[-1] - requests[0] > AT_ONCE_S:  # Ctrl-C again: at once
            process.terminate()

    def suspend_or_resume(number, frame):
        if process:
            process.send_signal(number)
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    handlers = {
        signal.SIGTERM: stop,
        signal.SIGINT: stop,
        signal.SIGUSR1: stop,
        signal.SIGUSR2: stop,
        signal.SIGTSTP: suspend_or_resume,
        signal.SIGCONT: suspend_or_resume,
    }
    for number, handler in handlers.items():
        if signal.getsignal(number) != signal.SIG_IGN:  # a shell's background job ignores Ctrl-C
            signal.signal(number, handler)
    terminal = os.isatty(0)
    process = subprocess.Popen(
        [sys.executable, "-I", __file__, command, str(lifeline)],
        env=env,
        pass_fds=[lifeline],
        stdin=subprocess.PIPE if terminal else None,
        bufsize=0,  # only this session can read its terminal
        start_new_session=True,
    )  # the keys Ctrl-C and Ctrl-Z signal horovodrun alone
    os.close(lifeline)
    if terminal:
        threading.Thread(target=_copy_terminal, args=(process.stdin,), daemon=True).start()
    status = _shell_status(process.wait())
    if received and status in (0, 128 + signal.SIGUSR1, 128 + signal.SIGUSR2):
        status = 128 + received[0][0]
    return status


def _copy_terminal(to):
    # Blocked, SIGTTIN makes a read in the background fail instead of stopping this process.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        try:
            typed = os.read(0, 65536)
        except OSError:
            time.sleep(1)  # until the job is in the foreground
            continue
        if not typed:  # Ctrl-D
            return to.close()
        to.write(typed)


def _shell_status(status):
    return status if status >= 0 else 128 - status


def _main(command, lifeline):
    shell = ["/bin/sh", "-c", "exec " + command]
    mpirun = subprocess.Popen(shell, stderr=subprocess.PIPE, bufsize=0, preexec_fn=_stop_with_parent)
    asked = threading.Event()
    own = [] if OPEN_MPI in command else None
    errors = threading.Thread(target=_copy_errors, args=(mpirun.stderr, asked, own), daemon=True)
    errors.start()
    for number in (signal.SIGTERM, signal.SIGTSTP, signal.SIGCONT):
        signal.signal(number, lambda number, frame: mpirun.send_signal(number))
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: mpirun.send_signal(signal.SIGUSR1))
    threading.Thread(target=_stop_when_lost, args=(mpirun, int(lifeline), asked), daemon=True).start()
    status = _shell_status(mpirun.wait())
    errors.join(AT_ONCE_S)  # an ssh that mpirun has started may keep it open
    if own and status != SAVED:
        _print_errors(b"".join(line + b"\n" for line in own))
    return status


def _copy_errors(errors, asked, own):
    """Copies standard error. Once the ranks are asked to stop, mpirun's own lines, which call that a failure, go to the
    list `own`, unless it is None.
    """
    rest, boxed = b"", False
    with errors:
        while chunk := errors.read(65536):
            if own is None or not asked.is_set():
                _print_errors(chunk)
                continue
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                edge = line.startswith(b"-" * 70)
                if boxed or edge or b": Forwarding signal" in line:
                    own.append(line)
                else:
                    _print_errors(line + b"\n")
                boxed ^= edge
    _print_errors(rest)


def _print_errors(text):
    with contextlib.suppress(OSError):  # its reader may have ended
        sys.stderr.buffer.write(text)
        sys.stderr.buffer.flush()


def _stop_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)


def _stop_when_lost(mpirun, lifeline, asked):
    number = signal.SIGUSR2 if os.read(lifeline, 1) else signal.SIGUSR1
    asked.set()
    pause = 2
    with contextlib.suppress(psutil.NoSuchProcess):
        while True:  # again, because mpirun forwards nothing before it has started the ranks
            if psutil.Process(mpirun.pid).children():  # once the ranks have ended, a signal could kill mpirun
                mpirun.send_signal(number)
            time.sleep(pause)
            pause *= 2  # a signal may interrupt the saving


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
