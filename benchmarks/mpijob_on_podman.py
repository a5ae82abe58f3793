"""Runs the pods of env/container/mpijob.yaml as podman containers on this machine, as the MPI Operator would.

    python benchmarks/mpijob_on_podman.py --image localhost/hvd_bert --out DIR
    python benchmarks/mpijob_on_podman.py --image localhost/hvd_bert --out DIR --podman "podman --runtime runc"

Needs root, podman, `ip` and `ssh-keygen`. Each pod has a network namespace and the host name that the operator gives
it. What the operator adds to pods is as in its source (pkg/controller/mpi_job_controller.go): a key of ECDSA P-521 as
`id_rsa`, readable for all and owned by root, the hostfile in /etc/mpi, and variables of Open MPI. Commands, user,
mounts and shared memory are the job's. Changed are the image, the training (`--training`), and GPUs, which are left
out. Prints the launcher's output and ends with its status.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml
from shared import REPOSITORY

TRAINING = "--config sample --output_dir /runs/sample"
NETWORK = "10.79.0"
LIMIT_S = 1800.0


def run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True, stdin=subprocess.DEVNULL)


@contextmanager
def network_namespaces(names: Sequence[str]) -> Iterator[None]:
    """A namespace per name with the address NETWORK.(10 + index), joined by a bridge in a namespace of its own."""
    hub = "mpijob-hub"
    with ExitStack() as stack:
        for name in (hub, *names):
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "delete", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", hub, "link", "add", "bridge", "up", "type", "bridge")
        for index, name in enumerate(names):
            port = f"port{index}"
            peer = ("type", "veth", "peer", "eth0", "netns", name)
            run("ip", "-n", hub, "link", "add", port, "up", "master", "bridge", *peer)
            run("ip", "-n", name, "address", "add", f"{NETWORK}.{10 + index}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
        yield


def write_operators_files(out: Path, hosts: Sequence[str], slots: int) -> None:
    """The Secret of the job's keys, and the ConfigMap of its hostfile."""
    keys, settings = out / "ssh", out / "mpi"
    keys.mkdir()
    settings.mkdir()
    run("ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-C", "", "-f", keys / "id_rsa")
    (keys / "authorized_keys").write_bytes((keys / "id_rsa.pub").read_bytes())
    for path in keys.iterdir():
        path.chmod(0o644)
    (settings / "hostfile").write_text("".join(f"{host} slots={slots}\n" for host in hosts))


def variables(job: dict[str, Any], pod: dict[str, Any]) -> dict[str, str]:
    """Those of the operator for Open MPI, then the pod's own."""
    operators = {
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        "OMPI_MCA_orte_set_default_slots": str(job["slotsPerWorker"]),
    }
    return operators | {entry["name"]: entry["value"] for entry in pod["containers"][0].get("env", [])}


def podman_options(job: dict[str, Any], pod: dict[str, Any], out: Path, hosts: dict[str, str]) -> list[str]:
    """What all containers of a kind of pod share."""
    container = pod["containers"][0]
    user = container["securityContext"]
    assert not user["allowPrivilegeEscalation"]
    shared = next(v["emptyDir"] for v in pod["volumes"] if v["name"] == "shared-memory")
    options = [f"--user={user['runAsUser']}:{user['runAsGroup']}", "--security-opt=no-new-privileges"]
    options += [f"--shm-size={shared['sizeLimit'].removesuffix('i').lower()}"]
    options += [f"--add-host={host}:{address}" for host, address in hosts.items()]
    options += [f"--env={name}={value}" for name, value in variables(job, pod).items()]
    options += [f"--volume={out}/ssh:{job['sshAuthMountPath']}:ro", f"--volume={out}/mpi:/etc/mpi:ro"]
    runs = next(mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "runs")
    return [*options, f"--volume={out}/runs:{runs}", f"--entrypoint={container['command'][0]}"]


def training(args: Sequence[str], own: str) -> list[str]:
    """The launcher's arguments, with those of the trainer replaced."""
    return [*args[: args.index("hvd_bert.train") + 1], *shlex.split(own)]


def run_job(manifest: dict[str, Any], podman: Sequence[str], create: Sequence[str], out: Path, own: str) -> int:
    """Start the workers, then the launcher. Returns the launcher's status. `create`: own options, and the image."""
    job, name = manifest["spec"], manifest["metadata"]["name"]
    replicas = job["mpiReplicaSpecs"]
    launcher, worker = (replicas[kind]["template"]["spec"] for kind in ("Launcher", "Worker"))
    pods = [f"{name}-worker-{index}" for index in range(replicas["Worker"]["replicas"])] + [f"{name}-launcher"]
    full = {pod: f"{pod}.{name}.default.svc" for pod in pods}
    addresses = {full[pod]: f"{NETWORK}.{10 + index}" for index, pod in enumerate(pods)}
    write_operators_files(out, [full[pod] for pod in pods[:-1]], job["slotsPerWorker"])
    (out / "runs").mkdir()
    (out / "runs").chmod(0o777)

    def command(pod: str, spec: dict[str, Any], *more: str) -> list[str]:
        own_options = [f"--name={pod}", f"--hostname={pod}", f"--network=ns:/run/netns/{pod}", *more]
        return [*podman, "run", "--rm", *own_options, *podman_options(job, spec, out, addresses), *create]

    with ExitStack() as stack:
        stack.enter_context(network_namespaces(pods))
        for pod in pods[:-1]:
            run(*command(pod, worker, "--detach"), *worker["containers"][0]["args"])
            stack.callback(run, *podman, "stop", "--time=5", pod)
        stack.callback(run, *podman, "rm", "--force", "--ignore", pods[-1])  # it runs on if this program is ended
        words = [*command(pods[-1], launcher), *training(launcher["containers"][0]["args"], own)]
        print("+", shlex.join(words), flush=True)
        return subprocess.run(words, stdin=subprocess.DEVNULL, timeout=LIMIT_S).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", required=True)
    parser.add_argument("--out", required=True, type=Path, help="a new folder for keys, hostfile and the shared volume")
    parser.add_argument("--podman", default="podman", help="with its global options")
    parser.add_argument("--more", default="", help="options of `podman run` that this machine needs")
    parser.add_argument("--training", default=TRAINING, help="arguments of the trainer (default: %(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    manifest = yaml.safe_load((REPOSITORY / "env/container/mpijob.yaml").read_text(encoding="utf-8"))
    create = [*shlex.split(args.more), args.image]
    return run_job(manifest, shlex.split(args.podman), create, args.out.resolve(), args.training)


if __name__ == "__main__":
    sys.exit(main())
