"""Lists of hosts with their slots, as horovodrun and mpirun take them."""

from __future__ import annotations

import re
from pathlib import Path

from hvd_bert.distributed.launch import host_name
from hvd_bert.errors import UserError
from hvd_bert.storage.reading import read_text

_HOST = re.compile(r"(\w[\w.-]*)(?::([1-9][0-9]{0,3}))?", re.ASCII)  # "-" first would be an option of ssh


def host_slots(hosts: str, source: str = "-H") -> dict[str, int]:
    """The slots of each host of HOST:SLOTS,... Raises UserError, which names the source, if the list is malformed."""
    slots: dict[str, int] = {}
    for entry in hosts.split(","):
        match = _HOST.fullmatch(entry)
        if match is None:
            raise UserError(f"{source}: {entry[:80]!r} must be HOST:SLOTS, such as a100-01:2.")
        host = host_name(match[1], source)
        slots[host] = slots.get(host, 0) + int(match[2] or 1)
    return slots


def read_hostfile(path: Path) -> dict[str, int]:
    """The slots of each host of a file with lines of `a100-01 slots=2` or `a100-01:2`. Raises UserError."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise UserError(f"--hostfile {path} cannot be read: {error}") from None
    lines = (re.sub(r"\s+slots\s*=\s*", ":", line.partition("#")[0].strip()) for line in text.splitlines())
    hosts = ",".join(line for line in lines if line)
    if not hosts:
        raise UserError(f"--hostfile {path} has no hosts. Write lines such as a100-01:2.")
    return host_slots(hosts, f"--hostfile {path}")
