"""The doctor's conclusions from the reports of several hosts, and the commands that start a training."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from documented import undocumented
from refusals import refused

from hvd_bert.distributed import launchers
from hvd_bert.storage.reading import GIB
from hvd_bert.tools.doctor import __main__ as command
from hvd_bert.tools.doctor import hosts, launch_line, probes
from hvd_bert.tools.doctor.hosts import HostReport
from hvd_bert.tools.doctor.lines import FAILURE, CheckResult, Report, failure, ok
from hvd_bert.tools.doctor.probes import HorovodBuild, Slurm
from hvd_bert.tools.doctor.ranks import Rank

ADDRESSES = {"a": "10.1.0.5", "b": "10.1.0.6", "c": "10.1.0.7"}
RANK = Rank(0, "its-name", 0, "cpu", None, frozenset({0, 1}), {"torch": "2.13"}, 2)
START, TRAIN = "horovodrun -np 4 -H a:2,b:2", "python -m hvd_bert.train"
SSH = "--ssh-port 22 --ssh-identity-file"


def test_hostfile(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# two nodes\na100-01 slots=2\n\na100-02:2  # the other\na100-02")
    assert command.read_hostfile(file) == {"a100-01": 2, "a100-02": 3}
    for text in ("# none\n\n", "a100-01 2", "a:two", "a:0", "a:2,", "-oProxyCommand=x:2", "a b:2"):
        file.write_text(text)
        with refused(file, "no hosts" if "#" in text else "must be HOST:SLOTS"):
            command.read_hostfile(file)
    with refused("cannot be read"):
        command.read_hostfile(tmp_path / "none")


@pytest.fixture
def concluded(monkeypatch, capsys):
    """Return `conclude(reports, *flags)`, which checks hosts with two slots each and returns the report as JSON."""
    monkeypatch.setattr(hosts, "own_address_at", lambda host: None)
    monkeypatch.setattr(hosts, "_address", lambda host, _: ADDRESSES[host])
    monkeypatch.setattr(launch_line.shutil, "which", lambda name: str(Path(sys.executable).with_name(name)))
    monkeypatch.setattr(launchers, "without_cache", list)
    monkeypatch.delenv("HVD_BERT_INTERFACE", raising=False)

    def conclude(reports: dict[str, HostReport], *flags: str):
        parsed, report = command.make_parser().parse_args([*flags]), Report(as_json=True, shown=True)
        monkeypatch.setattr(hosts, "_examine", lambda host, *_: reports[host])
        status = hosts.check_hosts(dict.fromkeys(reports, 2), parsed, report)
        found = json.loads(capsys.readouterr().out)
        assert found["ready"] == (status == 0) == bool(found["command"])
        return found

    return conclude


def host(name: str, *lines: CheckResult, interface: str = "ib0", **different: object) -> HostReport:
    rank = asdict(replace(RANK, addresses={"lo": ["127.0.0.1"], interface: [ADDRESSES[name]]}, **different))
    passed = [ok("Python", "3.11"), ok("Output", "runs"), ok("World", "1 rank(s)")]
    return HostReport((*passed, *lines), (rank | {"cores": [0, 1]},))


def with_gpus(name: str, *models: str) -> HostReport:
    return host(name, device="cuda:0", device_id=f"GPU-{name}", gpus=models, driver="570.86")


def test_ranks_of_all_hosts(concluded):
    found = concluded({"a": with_gpus("a", "A100", "A100"), "b": with_gpus("b", "A100", "A100")})
    shown = [(rank["rank"], rank["host"], rank["local_rank"], rank["device"]) for rank in found["ranks"]]
    assert shown == [(0, "a", 0, "cuda:0"), (1, "a", 1, "cuda:1"), (2, "b", 0, "cuda:0"), (3, "b", 1, "cuda:1")]
    assert {rank["interface"] for rank in found["ranks"]} == {"ib0"}
    assert undocumented(found, "Preflight check JSON", without=("versions", "addresses")) == []
    lines = [(check["name"], check["found"], check["hosts"]) for check in found["checks"]]
    ranks = ("Ranks", "4 rank(s) on 2 host(s), each with a GPU", [])
    assert lines[:3] == [("Python", "3.11", []), ("Output", "runs", ["a"]), ranks]
    assert found["command"] == f"{START} {TRAIN}"


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (host("a"), host("b", failure("Output", "on another host than rank 0's"), failure("Disk", "full")), "full"),
        (host("a"), with_gpus("b", "A100", "A100"), "those on a have none"),
        (with_gpus("a", "A100", "A100"), with_gpus("b", "A100"), "2 ranks on b would share one GPU (GPU-b)"),
        (host("a"), HostReport((ok("Python", "3.11"),)), "b reports no ranks"),  # its clone has another version
        (host("a"), host("b", versions={"torch": "2.12"}), "torch is 2.13 on ranks 0, 1 and 2.12 on ranks 2, 3"),
    ],
)
def test_hosts_that_do_not_fit(concluded, first, second, words):
    found = concluded({"a": first, "b": second})
    assert [words in check["found"] for check in found["checks"] if check["status"] == FAILURE] == [True]


def test_command_with_a_common_subnet(concluded):
    line = f"HVD_BERT_INTERFACE=10.1.0.4/30 {START} {SSH} 'a key' --network-interfaces ib0 {TRAIN}"
    reports = {"a": host("a"), "b": host("b", interface="ib1")}
    assert concluded(reports, *SSH.split(), "a key")["command"] == line


@pytest.mark.parametrize("address", ["", "fd00::6", "192.0.2.6"])  # unknown; IPv6; in another network
def test_command_without_a_common_subnet(concluded, monkeypatch, address):
    monkeypatch.setitem(ADDRESSES, "b", address)
    reports = {"a": host("a"), "b": replace(host("b"), ranks=host("a", interface="ib1").ranks)}
    reports["b"].ranks[0]["interface"] = "ib1"
    assert concluded(reports)["command"] == f"{START} {TRAIN}"


def test_command_without_an_active_environment(concluded, monkeypatch):
    monkeypatch.setattr(launch_line.shutil, "which", lambda name: None)
    words = concluded({"a": host("a")})["command"].split()
    folder = Path(sys.executable).parent
    assert words[0] == str(folder / "horovodrun")
    assert words[-3:] == [str(folder / "python"), "-m", "hvd_bert.train"]


@pytest.mark.parametrize(
    ("gpus", "mpirun", "environ", "commands"),
    [
        (0, True, {}, ["python {} --config sample", "horovodrun -np 3 -H localhost:3 python {} --config sample"]),
        (4, False, {}, ["python {}", "horovodrun -np 4 -H localhost:4 --gloo python {}"]),
        (1, True, {}, ["python {}"]),
        (1, True, {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"}, ["srun --mpi=pmix_v4 python {}"]),
    ],
)
def test_commands_that_start_a_training(monkeypatch, gpus, mpirun, environ, commands):
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(launch_line.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(64)})
    monkeypatch.setattr(launch_line, "free_memory", lambda: 10 * GIB)  # enough for 3 ranks of 3 GiB
    monkeypatch.setattr(probes, "horovod", lambda: HorovodBuild("0.28.1", mpi=True, gloo=True))
    monkeypatch.setattr(probes, "slurm", lambda: Slurm("25.05", ("pmix_v4",) if environ else ()))
    monkeypatch.setattr(launch_line.shutil, "which", lambda name: name if mpirun else None)
    monkeypatch.setattr(launch_line, "cpu_limit", lambda: None)
    monkeypatch.setattr(launch_line, "_program", str)
    monkeypatch.setattr(launchers, "without_cache", list)
    assert [*launch_line.on_this_host().values()] == [command.format("-m hvd_bert.train") for command in commands]
