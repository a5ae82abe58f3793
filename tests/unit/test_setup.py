"""env/: the checks and decisions of the set-up, its locked packages, and the job of the MPI operator."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from packaging.requirements import Requirement

from hvd_bert.config import command_line

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "env" / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


checks, build_horovod = load("checks"), load("build_horovod")


def refusal(call, *arguments) -> str:
    with pytest.raises(SystemExit) as raised:
        call(*arguments)
    return str(raised.value.code)


# Requirements


def make_wheel(folder: Path, name: str, version: str, tag: str = "py3-none-any", needs: str = "") -> None:
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as file:
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        file.writestr(f"{name}-{version}.dist-info/METADATA", head + (f"Requires-Dist: {needs}\n" if needs else ""))


def test_all_missing_packages_are_named_with_what_needs_them(tmp_path: Path) -> None:
    make_wheel(tmp_path, "needy", "2", needs="absent<0.5")
    make_wheel(tmp_path, "old", "1")
    make_wheel(tmp_path, "foreign", "1", "cp27-cp27m-linux_x86_64")
    listed = tmp_path / "list.txt"
    listed.write_text("needy==2 \\\n    --hash=sha256:1\nold>=2\nnumpy>=999  # why\nnever; sys_platform == 'never'\n")
    found = checks.find_missing(tmp_path, f"--requirement={listed}", "foreign", "packaging")
    numpy = checks.metadata.version("numpy")
    assert found == {
        "absent<0.5 (needed by needy)",
        "old>=2 (1 is in the folder)",
        f"numpy>=999 ({numpy} is installed)",
        "foreign",
    }


def test_this_environment_is_complete(tmp_path: Path) -> None:
    pytest.importorskip("horovod")
    checks.torch()
    checks.installed(str(ROOT), str(ROOT / "requirements.txt"))
    (tmp_path / "more.txt").write_text("pytest\nabsent==1\n")
    assert "absent==1" in refusal(checks.installed, str(ROOT), str(tmp_path / "more.txt"))
    assert "this package" in refusal(checks.installed, str(tmp_path))


@pytest.mark.slow
def test_the_parts_of_the_installed_horovod() -> None:
    hvd = pytest.importorskip("horovod.torch")
    found = {"MPI": hvd.mpi_built(), "NCCL": hvd.nccl_built()}
    checks.horovod(*(part for part, built in found.items() if built))
    for part in (part for part, built in found.items() if not built):
        assert f"without {part}" in refusal(checks.horovod, part)
    if found["MPI"]:
        subprocess.run([sys.executable, ROOT / "env/checks.py", "one_mpi"], check=True)


# Decisions of a build of Horovod

TORCH = build_horovod.Torch("2.13.0+cu130", "abc", "13.0", 20, ("70", "80", "90"), None)
COMPILER = build_horovod.Compiler("g++", 20, "g++ 12")
PLAN = build_horovod.Plan(TORCH, COMPILER, build_horovod.Source(None, "0.28.1", "0"), "Open MPI", None, "-mavx")


def test_the_installed_torch_is_inspected() -> None:
    torch = build_horovod.inspect_torch()
    assert torch.version == checks.metadata.version("torch") and torch.standard >= 17
    compiler = build_horovod.choose_compiler(None, torch)
    assert compiler.standard == torch.standard
    assert "does not support C++99" in refusal(build_horovod.choose_compiler, 99, torch)


def test_mpi_is_optional_unless_required(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert build_horovod.find_mpi(False) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build_horovod.find_mpi(None) is None
    assert "mpicxx is not on PATH" in refusal(build_horovod.find_mpi, True)


def test_nccl_needs_a_cuda_torch() -> None:
    args = SimpleNamespace(cuda_home="", nccl_home="/nowhere", cuda_arch="")
    cpu_torch = dataclasses.replace(TORCH, cuda="")
    assert build_horovod.find_nccl(None, cpu_torch, args) is None
    assert "not a CUDA build" in refusal(build_horovod.find_nccl, True, cpu_torch, args)
    assert build_horovod.common_arches(TORCH.arches, ["sm_80", "sm_90", "sm_100"]) == "80,90"


def test_the_key_of_a_wheel_depends_on_the_build() -> None:
    for change in ({"torch": dataclasses.replace(TORCH, git="def")}, {"mpi": None}, {"arch_flags": ""}):
        assert PLAN.key == dataclasses.replace(PLAN).key != dataclasses.replace(PLAN, **change).key
    assert PLAN.local_version == f"torch2.13.0.cu130.k{PLAN.key}"


# env/setup.sh


def run(*command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    environ = os.environ | env
    return subprocess.run(words, cwd="/", env=environ, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    "arguments",
    [["--torch", "newest"], ["--tarch"], ["--python"], ["--horovod", "nowhere"]],
    ids=lambda words: words[0],
)
def test_setup_refuses_unknown_arguments(tmp_path: Path, arguments: list[str]) -> None:
    result = run("bash", ROOT / "env/setup.sh", "--venv", tmp_path / "venv", *arguments)
    assert result.returncode == 1 and result.stderr.startswith("env/setup.sh: error: ")
    assert not (tmp_path / "venv").exists()


def test_setup_does_not_touch_a_folder_that_is_no_environment(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("done")
    result = run("bash", ROOT / "env/setup.sh", "--venv", tmp_path)
    assert result.returncode == 1 and "no virtual environment" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_every_system_package_has_a_reason() -> None:
    lists = f'source {ROOT}/env/apt.sh; eval "$(grep ^packages= {ROOT}/env/cluster_packages.sh)"'
    packages = '"${packages[@]}" g++ make patch python3.12-dev openmpi-bin chromium'
    script = f"{lists}; for package in {packages}; do apt_reason $package; done"
    result = run("bash", "-euc", script)
    assert result.returncode == 0 and len(result.stdout.splitlines()) == 15


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_environment_from_another_python_and_wheels(tmp_path: Path) -> None:
    """Without a network: of this Python's packages, and of a wheel of its Horovod if the cache has it."""
    pytest.importorskip("horovod")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvd_bert/wheels"
    wheel = next(cache.glob(f"horovod-{checks.metadata.version('horovod')}-*.whl"), None)
    if wheel is None:
        pytest.skip("the cache of wheels does not have the installed Horovod")
    clone, wheels, venv = (tmp_path / name for name in ("clone", "its wheels", "venv"))
    shutil.copytree(ROOT / "env", clone / "env")
    shutil.copytree(ROOT / "hvd_bert", clone / "hvd_bert", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "requirements.txt", "README.md"):
        shutil.copy(ROOT / name, clone / name)
    env = {"PIP_INDEX_URL": "http://localhost:9/", "PIP_CONFIG_FILE": os.devnull, "PYTHONPATH": ""}
    where = ("bash", clone / "env/setup.sh", "--venv", venv, "--no-apt")
    wheels.mkdir()
    with (clone / "requirements.txt").open("a") as file:
        file.write("\nabsent==1\n")
    options = ("--python", sys.executable, "--torch-in-place", "--wheels", wheels)
    shutil.copy(wheel, wheels)
    result = run(*where, *options, **env)
    assert result.returncode == 0, result.stderr  # the bounds of pyproject.toml count, not requirements.txt
    code = "import hvd_bert, horovod, torch; print(horovod.__file__, torch.__file__, hvd_bert.__file__, sep='\\n')"
    found = [Path(line) for line in run(venv / "bin/python", "-c", code, **env).stdout.splitlines()]
    assert found[0].is_relative_to(venv) and not found[1].is_relative_to(venv) and found[2].is_relative_to(clone)
    assert "up to date" in run(*where, **env).stdout
    (venv / "bin/hvd-bert").unlink()
    shutil.rmtree(wheels)
    result = run(*where, **env)
    assert result.returncode == 1 and f"--wheels {wheels}: no such folder" in result.stderr  # it is remembered


def discover(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    script = ROOT / "scripts/discover_hosts.sh"
    return subprocess.run([script], cwd=folder, env=clean | env, capture_output=True, text=True, check=False)


def test_file_of_hosts_in_either_form(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("# ours\na100-01:2\na100-02 slots=4 max_slots=4\n\na100-03  # one\n")
    done = discover(tmp_path, HVD_BERT_HOSTFILE="mine")
    assert (done.returncode, done.stdout) == (0, "a100-01:2\na100-02:4\na100-03:1\n")
    done = discover(tmp_path)
    assert done.returncode == 2 and "no file 'hosts' and not in a Slurm job" in done.stderr


LOCKED = ROOT / "env" / "locked"
FILES = {
    "base": ROOT / "requirements.txt",
    "torch": ROOT / "requirements.txt",
    "dev": ROOT / "env" / "requirements-dev.txt",
    "deepspeed": ROOT / "env" / "requirements-deepspeed.txt",
    "bench": ROOT / "env" / "requirements-bench.txt",
}
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")


def pins(path: Path, python: str) -> dict[str, str]:
    """Package -> "==version", of the lines that count on Linux with this Python."""
    found = {}
    for line in path.read_text().splitlines():
        text = line.partition("#")[0].rstrip(" \\")
        if not text or text.startswith(" "):
            continue
        requirement = Requirement(text)
        environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
        if requirement.marker is None or requirement.marker.evaluate(environment):
            found[requirement.name.lower().replace("_", "-")] = str(requirement.specifier)
    return found


@pytest.mark.parametrize("python", SUPPORTED)
@pytest.mark.parametrize("name", FILES)
def test_the_locked_versions_are_the_required_ones(name: str, python: str) -> None:
    required, locked = pins(FILES[name], python), pins(LOCKED / f"{name}.txt", python)
    if FILES[name].name == "requirements.txt":  # torch has a file of its own, and Horovod's hash is in its build
        required = {package: pin for package, pin in required.items() if (package == "torch") == (name == "torch")}
        required.pop("horovod", None)
    assert required and required.items() <= locked.items(), "run `bash env/lock.sh`"


@pytest.mark.parametrize("python", SUPPORTED)
def test_pip_installs_what_is_required_except_horovod_and_mpi(python: str) -> None:
    declared = re.search(r"^dependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert declared
    allowed = {r.name.lower(): r.specifier for r in map(Requirement, re.findall(r'"(.+?)"', declared[1]))}
    required = {name.replace("-", "_"): pin for name, pin in pins(ROOT / "requirements.txt", python).items()}
    allowed = {name.replace("-", "_"): specifier for name, specifier in allowed.items()}
    assert required.keys() - allowed.keys() == {"horovod", "mpi4py"} and allowed.keys() <= required.keys()
    assert all(specifier.contains(required[name].removeprefix("==")) for name, specifier in allowed.items())


@pytest.mark.parametrize("name", FILES)
def test_every_locked_package_has_hashes_and_no_address(name: str) -> None:
    text = (LOCKED / f"{name}.txt").read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)
    assert "://" not in text and "--index" not in text


CONTAINER = ROOT / "env" / "container"
DOCKERFILE = (CONTAINER / "Dockerfile").read_text(encoding="utf-8")


def found(pattern: str, text: str = DOCKERFILE) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    assert match, pattern
    return match[1]


def test_a_job_of_the_mpi_operator() -> None:
    """Its ranks are the slots and the GPUs, the trainer takes its command, and user and folders are the image's."""
    job = yaml.safe_load((CONTAINER / "mpijob.yaml").read_text())["spec"]
    pods = {name: replica["template"]["spec"] for name, replica in job["mpiReplicaSpecs"].items()}
    args = pods["Launcher"]["containers"][0]["args"]
    slots = job["slotsPerWorker"]
    assert int(args[args.index("-np") + 1]) == job["mpiReplicaSpecs"]["Worker"]["replicas"] * slots
    assert pods["Worker"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == slots
    start = args.index("hvd_bert.train")
    assert args[start - 2 : start] == ["python", "-m"]
    command_line.parse(args[start + 1 :])
    home = f"/home/{found(r'--uid [0-9]+ .*? ([a-z_]+) &&')}/.ssh"
    assert job["sshAuthMountPath"] == home and f"HostKey {home}/" in DOCKERFILE
    for pod in pods.values():
        container = pod["containers"][0]
        assert container["securityContext"]["runAsUser"] == int(found(r"--uid ([0-9]+) "))
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
