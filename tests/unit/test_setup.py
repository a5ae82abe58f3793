"""env/: the set-up's checks, decisions and refusals, and a complete set-up without a network."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "env" / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


checks, commands, horovod_source, toolchain, build_horovod = map(
    load, ("checks", "horovod_commands", "horovod_source", "horovod_toolchain", "build_horovod")
)


def refusal(call, *arguments) -> str:
    with pytest.raises(SystemExit) as raised:
        call(*arguments)
    return str(raised.value.code)


# Requirements


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    tag: str = "py3-none-any",
    needs: str = "",
    files: dict[str, str] | None = None,
) -> None:
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    info = f"{name}-{version}.dist-info"
    content = {
        f"{info}/METADATA": head + (f"Requires-Dist: {needs}\n" if needs else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n",
        f"{info}/RECORD": f"{info}/RECORD,,\n",
    }
    for path, text in (files or {}).items():
        content[path] = text
        content[f"{info}/RECORD"] += f"{path},,\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as file:
        for path, text in content.items():
            file.writestr(path, text)


def repack(folder: Path, name: str) -> None:
    """Make a wheel from an installed package, without its console scripts."""
    package = checks.metadata.distribution(name)
    with zipfile.ZipFile(folder / f"{package.name.lower()}-{package.version}-py3-none-any.whl", "w") as file:
        for path in package.files or ():
            if ".." not in path.parts and path.suffix != ".pyc":
                file.write(path.locate(), str(path))


def test_all_missing_packages_are_named_with_the_packages_that_need_them(tmp_path: Path) -> None:
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
    checks.torch("torch>=2.6")
    assert "is not torch>=99" in refusal(checks.torch, "torch>=99")
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


# Decisions when building Horovod

TORCH = toolchain.Torch("2.13.0+cu130", "abc", "13.0", 20, ("70", "80", "90"), None)
COMPILER = toolchain.Compiler("g++", 20, "g++ 12")
PLAN = build_horovod.Plan(TORCH, COMPILER, horovod_source.Source(None, "0.28.1", "0"), "Open MPI", None, "-mavx")


def test_the_installed_torch_is_inspected() -> None:
    torch = toolchain.inspect_torch()
    assert torch.version == checks.own_torch_version() and torch.standard >= 17
    compiler = toolchain.choose_compiler(None, torch)
    assert compiler.standard == torch.standard
    assert "does not support C++99" in refusal(toolchain.choose_compiler, 99, torch)


def test_cxx_standard_of_an_older_torch(tmp_path: Path) -> None:
    assert toolchain.cxx_standard(tmp_path) is None
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils/cpp_extension.py").write_text("cflags += ['-std=c++14', '-std=c++17']\n")
    assert toolchain.cxx_standard(tmp_path) == 17
    (tmp_path / "share/cmake/Torch").mkdir(parents=True)
    (tmp_path / "share/cmake/Torch/TorchConfig.cmake").write_text("set_target_properties(torch CXX_STANDARD 20)\n")
    assert toolchain.cxx_standard(tmp_path) == 20


def test_the_version_of_mpi() -> None:
    mpich = "HYDRA build details:\n    Version:                                 5.0.2\n    CC:       cc\n"
    assert toolchain.mpirun_version(mpich) == "MPICH 5.0.2"
    assert toolchain.mpirun_version("mpirun (Open MPI) 4.1.4\n\n") == "mpirun (Open MPI) 4.1.4"
    assert toolchain.mpirun_version("") == "", "there is only srun"


def test_mpi_is_optional_unless_required(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert toolchain.find_mpi(False) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert toolchain.find_mpi(None) is None
    assert "mpicxx is not on PATH" in refusal(toolchain.find_mpi, True)


def test_nccl_needs_a_cuda_torch_and_a_toolkit_of_its_major_version() -> None:
    args = SimpleNamespace(cuda_home="", nccl_home="/nowhere", cuda_arch="")
    cpu_torch = dataclasses.replace(TORCH, cuda="")
    assert toolchain.find_nccl(None, cpu_torch, args) is None
    assert "not a CUDA build" in refusal(toolchain.find_nccl, True, cpu_torch, args)
    assert toolchain.common_arches(TORCH.arches, ["sm_80", "sm_90", "sm_100"]) == "80,90"
    cuda_home = toolchain.find_cuda_home("")
    if cuda_home is None:
        pytest.skip("the rest needs nvcc")
    other = dataclasses.replace(TORCH, cuda="9.2")
    message = refusal(toolchain.find_nccl, None, other, args)
    assert "is for CUDA 9.2, but nvcc in" in message and "--without-nccl" in message
    release = toolchain.re.search(r"release ([\d.]+)", commands.output(cuda_home / "bin/nvcc", "--version"))
    same = dataclasses.replace(TORCH, cuda=release[1])
    assert "no NCCL headers: '/nowhere/include/nccl.h'" in refusal(toolchain.find_nccl, None, same, args)


@pytest.mark.parametrize(
    "change",
    [
        {"torch": dataclasses.replace(TORCH, git="def")},
        {"compiler": dataclasses.replace(COMPILER, identity="g++ 13")},
        {"source": horovod_source.Source(None, "0.28.1", "1")},
        {"mpi": None},
        {"arch_flags": ""},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_key_of_a_wheel_depends_on_the_build(change: dict) -> None:
    assert PLAN.key == dataclasses.replace(PLAN).key != dataclasses.replace(PLAN, **change).key
    assert PLAN.local_version == f"torch2.13.0.cu130.k{PLAN.key}"


# --source: a Horovod source tree, here with only the lines that the build patches

REPLACED = [
    *horovod_source.WITHOUT_NCCL,
    horovod_source.WITHOUT_CFFI,
    *horovod_source.WITHOUT_DEADLOCK,
    horovod_source.PASSES_SIGNALS,
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    standard = "set(CMAKE_CXX_STANDARD 14)\n"
    files = {name: f"before\n{old}\nafter\n" for _, name, old, _ in REPLACED}
    files["CMakeLists.txt"] = standard + files["CMakeLists.txt"]
    files["horovod/torch/CMakeLists.txt"] = f"if(TORCH)\n    {standard}"
    files |= {"horovod/__init__.py": "__version__ = '0.29.0'\n", "third_party/gloo/CMakeLists.txt": ""}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_another_source_is_patched_once(tree: Path, tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "horovod"), "gztar", tmp_path, "tree")
    source = horovod_source.open_source(archive, tmp_path)
    assert source.version == "0.29.0" and source.sha256 != horovod_source.open_source(str(tree), tmp_path).sha256
    before = horovod_source.hash_tree(source.folder)
    planned = horovod_source.patch_source(source.folder, 20, nccl=False, change=False)
    assert horovod_source.hash_tree(source.folder) == before
    assert horovod_source.patch_source(source.folder, 20, nccl=False, change=True) == planned
    assert sum(note.startswith("patch: ") for note in planned) == 7
    assert "no patch: bf16 in allreduce: horovod_bf16.patch does not fit this source" in planned
    for _, name, old, new in REPLACED:
        text = (source.folder / name).read_text()
        assert text.endswith(f"before\n{new}\nafter\n") and old not in text.replace(new, "")
    assert (source.folder / "horovod/runner/mpirun_process.py").exists()
    again = horovod_source.patch_source(source.folder, 14, nccl=False, change=True)
    assert all(note.startswith("no patch: ") for note in again)


@pytest.mark.parametrize(
    ("missing", "words"), [("third_party/gloo", "git clone --recursive"), ("horovod", "no Horovod source")]
)
def test_folders_without_a_source_are_refused(tree: Path, tmp_path: Path, missing: str, words: str) -> None:
    shutil.rmtree(tree / missing)
    message = refusal(horovod_source.open_source, str(tree), tmp_path)
    assert f"--source {tree}: " in message and words in message


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


TORCH_STAND_IN = """from .version import __version__
class ones:
    def __init__(self, size): pass
    def sum(self): return self
    def item(self): return 2
"""
HOROVOD_STAND_IN = {
    "horovod/__init__.py": "def run(): print('[X] PyTorch [X] Gloo')\n",
    "horovod/torch/__init__.py": "mpi_built = nccl_built = lambda: False\ngloo_built = lambda: True\n",
}


def make_torch(folder: Path, metadata_version: str, version: str) -> None:
    """Make a stub wheel of torch. `version`: torch.__version__; PyPI's metadata lacks its suffix (+cu130)."""
    files = {"torch/__init__.py": TORCH_STAND_IN, "torch/version.py": f"__version__ = '{version}'\n"}
    make_wheel(folder, "torch", metadata_version, files=files)


def make_horovod(folder: Path, torch_version: str) -> None:
    """Make a stub wheel of Horovod that claims to be built for `torch_version`."""
    version = f"0.28.1+torch{torch_version.replace('+', '.')}.k1"
    program = {f"horovod-{version}.dist-info/entry_points.txt": "[console_scripts]\nhorovodrun = horovod:run\n"}
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tag = f"{python}-{python}-linux_{os.uname().machine}"
    make_wheel(folder, "horovod", version, tag, files=HOROVOD_STAND_IN | program)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Make a clone whose env/build_horovod.sh appends its options to env/calls."""
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "env", clone / "env")
    shutil.copytree(ROOT / "hvd_bert", clone / "hvd_bert", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "requirements.txt", "README.md"):
        shutil.copy(ROOT / name, clone / name)
    script = clone / "env/build_horovod.sh"
    script.write_text(script.read_text().replace("\nset ", f'\necho "$@" >>"{clone}/env/calls"\nset ', 1))
    return clone


class StandIns:
    """Runs the set-up of `clone` with a folder of wheels, in which torch, Horovod and transformers are stubs."""

    def __init__(self, clone: Path, folder: Path, torch: tuple[str, str]) -> None:
        self.clone, self.wheels, self.venv = clone, folder / "its wheels", folder / "venv"
        self.wheels.mkdir()
        for name in ("setuptools", "packaging", "cloudpickle", "psutil", "pyyaml"):
            repack(self.wheels, name)
        make_wheel(self.wheels, "transformers", "5.0", files={"transformers/__init__.py": ""})
        make_torch(self.wheels, *torch)
        make_horovod(self.wheels, torch[1])
        (clone / "requirements.txt").write_text("torch==2.13.0\nhorovod==0.28.1\ntransformers\n")

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        return run(*command, PIP_INDEX_URL="http://localhost:9/", PIP_CONFIG_FILE=os.devnull, PYTHONPATH="")

    def first(self, torch: str) -> subprocess.CompletedProcess[str]:
        return self.again("--python", sys.executable, "--without-mpi", "--wheels", self.wheels, "--torch", torch)

    def again(self, *options: str | Path) -> subprocess.CompletedProcess[str]:
        return self.run("bash", self.clone / "env/setup.sh", "--venv", self.venv, "--no-apt", *options)

    def check(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return self.run(self.venv / "bin/python", self.clone / "env/checks.py", *words)


PYPI, CPU = ("2.13.0", "2.13.0+cu130"), ("2.13.0+cpu", "2.13.0+cpu")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("option", "torch"), [("2.13.0", PYPI), ("cpu", CPU)], ids=["pypi", "cpu"])
def test_setup_is_done_once(clone: Path, tmp_path: Path, option: str, torch: tuple[str, str]) -> None:
    stand_ins = StandIns(clone, tmp_path, torch)
    done = stand_ins.first(option)
    assert done.returncode == 0 and "installed, not built" in done.stdout, done.stderr
    has_driver = run("bash", "-c", f". {ROOT}/env/apt.sh; has_nvidia_driver").returncode == 0
    assert ("--without-nccl" in (clone / "env/calls").read_text()) == (option == "cpu" and not has_driver)
    assert "up to date" in stand_ins.again().stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torch_is_replaced_only_together_with_horovod(clone: Path, tmp_path: Path) -> None:
    stand_ins = StandIns(clone, tmp_path, PYPI)
    assert stand_ins.first("cpu").returncode == 0
    make_torch(stand_ins.wheels, "2.13.0+cpu", "2.13.0+cpu")  # available, but not requested
    make_torch(stand_ins.wheels, "2.14.1", "2.14.1+cu130")
    assert stand_ins.again("--torch", "2.14.1").returncode == 1  # no Horovod can be built for this torch
    assert stand_ins.check("torch_version").stdout.strip() == "2.13.0+cu130"
    assert stand_ins.check("installed", clone).returncode == 0
    (stand_ins.venv / "bin/hvd-bert").unlink()
    assert stand_ins.again("--torch", "cpu").returncode == 0
    assert stand_ins.check("torch_version").stdout.strip() == "2.13.0+cu130"
    make_horovod(stand_ins.wheels, "2.14.1+cu130")
    assert stand_ins.again("--torch", "2.14.1").returncode == 0
    assert stand_ins.check("torch_version").stdout.strip() == "2.14.1+cu130"
    assert stand_ins.check("installed", clone).returncode == 0
    assert sorted(path.name for path in tmp_path.glob("venv*")) == ["venv", "venv.lock", "venv.setup.log"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_environment_from_another_python_and_wheels(clone: Path, tmp_path: Path) -> None:
    """Set up without a network: packages come from this Python environment, and Horovod from a cached wheel."""
    pytest.importorskip("horovod")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvd_bert/wheels"
    wheel = next(cache.glob(f"horovod-{checks.metadata.version('horovod')}-*.whl"), None)
    if wheel is None:
        pytest.skip("the cache of wheels does not have the installed Horovod")
    wheels, venv = tmp_path / "its wheels", tmp_path / "venv"
    env = {"PIP_INDEX_URL": "http://localhost:9/", "PIP_CONFIG_FILE": os.devnull, "PYTHONPATH": ""}
    setup = ("bash", clone / "env/setup.sh", "--venv", venv, "--no-apt")
    wheels.mkdir()
    with (clone / "requirements.txt").open("a") as file:
        file.write("\nabsent==1\n")
    options = ("--python", sys.executable, "--torch-in-place", "--wheels", wheels)
    shutil.copy(wheel, wheels)
    result = run(*setup, *options, **env)
    assert result.returncode == 0, result.stderr  # pyproject.toml's bounds apply, not requirements.txt
    code = "import hvd_bert, horovod, torch; print(horovod.__file__, torch.__file__, hvd_bert.__file__, sep='\\n')"
    found = [Path(line) for line in run(venv / "bin/python", "-c", code, **env).stdout.splitlines()]
    assert found[0].is_relative_to(venv) and not found[1].is_relative_to(venv) and found[2].is_relative_to(clone)
    assert "up to date" in run(*setup, **env).stdout
    (venv / "bin/hvd-bert").unlink()
    shutil.rmtree(wheels)
    result = run(*setup, **env)
    assert result.returncode == 1 and f"--wheels {wheels}: no such folder" in result.stderr  # --wheels was recorded


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
