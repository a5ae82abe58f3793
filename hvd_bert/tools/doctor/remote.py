"""Run the doctor on each host of --hosts or --hostfile, over ssh except on this one."""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from hvd_bert.config.settings import PACKAGE
from hvd_bert.distributed.interfaces import SETTING, own_address_at
from hvd_bert.startup import collector_paused
from hvd_bert.storage.reading import convert, parse_json
from hvd_bert.tools.doctor.lines import HostReport, Report, failure

CLONE = PACKAGE.parent
# horovodrun passes all variables on; the checks depend on these.
VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "HVD_BERT_CACHE", SETTING)
# A host whose key has changed is refused. horovodrun itself connects with StrictHostKeyChecking=no.
OPTIONS = ("-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new", "-o", "ConnectTimeout=5")
AT_ONCE = 64


def check_hosts(slots: Mapping[str, int], flags: argparse.Namespace, report: Report) -> int:
    """Check hosts for as many ranks as they have slots. Returns the exit status."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        examined = pool.map(lambda host: _examine(host, slots[host], flags), slots)
        with collector_paused():  # while the hosts run their checks
            from hvd_bert.tools.doctor.hosts import conclude
        return conclude(dict(zip(slots, examined, strict=True)), slots, flags, report)


def _ssh(flags: argparse.Namespace) -> list[str]:
    """The words that start ssh with the flags' port and key."""
    port = ["-p", str(flags.ssh_port)] if flags.ssh_port else []
    return ["ssh", *port, *(["-i", str(flags.ssh_identity_file.absolute())] if flags.ssh_identity_file else [])]


def _examine(host: str, slots: int, flags: argparse.Namespace) -> HostReport:
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        hint = f"Check its spelling, DNS and /etc/hosts with `getent hosts {host}`."
        return _failed("Name", f"does not resolve: {error.strerror}", hint)
    try:
        done = subprocess.run(
            _command(host, slots, flags),
            cwd=CLONE,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=flags.timeout,
        )
    except subprocess.TimeoutExpired:
        hint = f"Run `hvd-bert doctor` on {host}, or use a longer --timeout."
        return _failed("Doctor", f"not finished after {flags.timeout:.0f} s", hint)
    except OSError as error:
        return _failed("ssh", f"cannot be started: {error}", "Install OpenSSH's client.")
    try:
        return convert(parse_json(done.stdout.strip().rpartition("\n")[2]), HostReport)
    except ValueError:
        return _refused(host, done, flags)


def _command(host: str, slots: int, flags: argparse.Namespace) -> list[str]:
    """The doctor on that host: over ssh, unless it is this one."""
    doctor = [sys.executable, "-m", "hvd_bert", "doctor", "--json", "--slots", str(slots)]
    doctor += ["--timeout", str(flags.timeout), "--output_dir", str(flags.output_dir.absolute())]
    if own_address_at(host) is not None:
        return doctor
    environ = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    there = [shlex.join(["cd", str(CLONE)]), shlex.join(["exec", "env", *environ, *doctor])]
    return [*_ssh(flags), *OPTIONS, host, " && ".join(there)]


def _refused(host: str, done: subprocess.CompletedProcess[str], flags: argparse.Namespace) -> HostReport:
    """Why a host printed no report."""
    last = (done.stderr.strip() or "it printed nothing").splitlines()[-1].strip()
    if done.returncode != 255:  # that of ssh itself
        hint = f"{CLONE} and its environment must be the same on all hosts: share them, or set them up on each."
        return _failed("Clone", f"the doctor does not start: {last}", hint)
    if "key verification failed" in last:
        hint = f"Its key is not the one in known_hosts. If {host} was set up again: `ssh-keygen -R {host}`."
    else:
        test = shlex.join([*_ssh(flags), host, "true"])
        hint = f"`{test}` must work without a password. `ssh-copy-id {host}` installs your key there."
    return _failed("ssh", last, hint)


def _failed(name: str, found: str, hint: str) -> HostReport:
    return HostReport((failure(name, found, hint),))
