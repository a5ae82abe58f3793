"""Strategies on two hosts: ranks of torch.distributed and of Horovod connect under each launcher."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import FOLDER, HOSTS, SMALL, Cluster, listening, results
from test_two_hosts import check

pytestmark = pytest.mark.cluster
STEPS = f"{SMALL} 4 --output_dir out --per_device_train_batch_size"
TORCHRUN = "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint a100-01:29400"
AGENTS = (
    """bash -c 'torchrun --nnodes=2 --node-rank=$SLURM_NODEID --master-addr=a100-01 --nproc-per-node=2 "$@"' bash"""
)
FOUR = "salloc --nodes=2 --ntasks-per-node=2 srun"
ONE_EACH = "salloc --nodes=2 --ntasks-per-node=1 srun --mpi=none"
BY_HAND = (
    "bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=4 MASTER_ADDR=a100-01 MASTER_PORT=29556"
    """ exec env -u SLURM_PROCID -u SLURM_STEP_NUM_TASKS "$@"' bash"""
)
SUBNET = "env HVD_BERT_INTERFACE=10.77.0.0/24"
# Set the interface on only one host, as a user might.
SOME = (
    """bash -c '[ $(hostname) = a100-02 ] || export GLOO_SOCKET_IFNAME=eth0 HOROVOD_GLOO_IFACE=eth0; exec "$@"' bash"""
)
STARTED = {
    "srun without PMI, fsdp": f"{FOUR} --mpi=none {SOME} python -m {{train}} --strategy fsdp",
    "srun --mpi=pmix, deepspeed": f"{SUBNET} {FOUR} --mpi=pmix python -m {{train}} --strategy deepspeed",
    "torchrun, horovod": f"{ONE_EACH} {SOME} {TORCHRUN} -m {{train}}",
    "torchrun, ddp": f"{ONE_EACH} {AGENTS} -m {{train}} --strategy ddp",
    "torch's variables, horovod": f"{FOUR} --mpi=none {BY_HAND} python -m {{train}}",
    "horovodrun, fsdp": "horovodrun -np 4 -H a100-01:2,a100-02:2 python -m {train} --strategy fsdp",
}
# Programs that listen on rank 0's host and on the other host, as listed in docs/guides/cluster.md.
RANK, LAUNCHER = {("rank", "eth0")}, {("launcher", "all")}
SLURM, MPI = ({(name, where) for where in ("all", "loopback")} for name in ("slurmstepd", "orted"))
LISTENING = {
    "srun without PMI, fsdp": (RANK, RANK),
    "srun --mpi=pmix, deepspeed": (RANK | SLURM, RANK | SLURM),
    "torchrun, horovod": (RANK | LAUNCHER, set()),
    "torchrun, ddp": (RANK | LAUNCHER, RANK),
    "torch's variables, horovod": (RANK, set()),
    "horovodrun, fsdp": (RANK | MPI | {("rank", "all")}, RANK | MPI | {("rank", "all")}),
}


@pytest.mark.parametrize("how", STARTED)
def test_four_ranks_on_two_hosts(
    cluster: Cluster, tmp_path: Path, one_process: list[float], listeners: Path, how: str
) -> None:
    if "deepspeed" in how:
        pytest.importorskip("deepspeed")
    (tmp_path / "altered.py").symlink_to(FOLDER / "altered.py")
    env = {"WATCHED_LOG": str(tmp_path / "watched.log"), "WATCHED_LISTENERS": str(listeners)}
    command = STARTED[how].format(train="altered -m hvd_bert.train")
    cluster.on("login", f"{command} {STEPS} 4", tmp_path, env).expect(0)
    assert (listening(listeners, 0), listening(listeners, 2)) == LISTENING[how]
    controller = "gloo" if "horovod" in how.split(", ")[1] else "torch.distributed"
    check(tmp_path / "out", controller, one_process, tolerance=1e-4)


# As in pods, each rank starts by torch's variables, on a host whose name the other rank cannot resolve.
POD = ["unshare", "--uts", "sh", "-c", 'hostname "pod-$RANK" && exec "$@"', "sh"]


def test_hosts_whose_names_do_not_resolve(cluster: Cluster, tmp_path: Path) -> None:
    words = [*POD, sys.executable, "-m", "hvd_bert.train", *STEPS.split(), "8", "--strategy", "ddp"]
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": HOSTS[0], "MASTER_PORT": "29555"}
    with ThreadPoolExecutor() as pool:
        ranks = [
            pool.submit(cluster.on, host, words, tmp_path, job | {"RANK": str(rank)}) for rank, host in enumerate(HOSTS)
        ]
    for rank in ranks:
        rank.result().expect(0)
    found = results(tmp_path / "out")
    assert (found["world_size"], found["hosts"]) == (2, ["pod-0", "pod-1"])
    assert [rank["local_rank"] for rank in found["ranks"]] == [0, 0]
