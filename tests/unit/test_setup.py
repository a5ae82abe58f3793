"""The decisions of env/build_horovod.sh from torch, compiler, MPI and CUDA (--dry-run: nothing is built)."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import setuptools
from tables import each

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Machine:
    """A made-up machine: a torch with only the properties that the script reads, and programs first on PATH."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.torch("2.13.0+cpu")

    def torch(self, version: str, cuda: str = "None", standard: int = 20) -> None:
        package = self.folder / "torch"
        cmake = package / "share/cmake/Torch"
        cmake.mkdir(parents=True, exist_ok=True)
        (cmake / "TorchConfig.cmake").write_text(f"set_target_properties(torch CXX_STANDARD {standard})\n")
        (package / "utils").mkdir(exist_ok=True)
        (package / "utils/cpp_extension.py").write_text("'an example: -std=c++23'\n")
        (package / "__init__.py").write_text(
            "from types import SimpleNamespace\n"
            f"__version__ = {version!r}\n"
            f"version = SimpleNamespace(cuda={cuda}, git_version='abc')\n"
            "_C = SimpleNamespace(_cuda_getArchFlags=lambda: 'sm_70 sm_80 sm_90')\n"
        )

    def program(self, name: str, text: str, folder: str = "bin") -> None:
        path = self.folder / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n" + text)
        path.chmod(0o755)

    def toolkit(self, release: str) -> None:
        """Add a CUDA toolkit whose nvcc supports sm_80 and sm_90, and NCCL headers."""
        self.program(
            "nvcc",
            'case "$1" in\n'
            f"  --version) echo 'Cuda compilation tools, release {release}, V{release}.1' ;;\n"
            "  --list-gpu-code) printf 'sm_80\\nsm_90\\n' ;;\n"
            "esac\n",
            "cuda/bin",
        )
        nccl = self.folder / "nccl"
        for part in ("include", "lib"):
            (nccl / part).mkdir(parents=True, exist_ok=True)
        (nccl / "include/nccl.h").write_text("#define NCCL_VERSION_CODE 22803\n")
        (nccl / "lib/libnccl.so.2").touch()
        self.env |= {"CUDA_HOME": str(self.folder / "cuda"), "HOROVOD_NCCL_HOME": str(nccl)}

    def without(self, *names: str) -> None:
        """Hide programs: PATH becomes one folder of links to all others."""
        links = self.folder / "links"
        links.mkdir()
        for place in ("/usr/bin", "/bin"):
            for program in Path(place).iterdir():
                if program.name not in names and not (links / program.name).is_symlink():
                    (links / program.name).symlink_to(program)
        self.env["PATH"] = str(links)

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder / 'bin'}:{self.env.get('PATH', os.environ['PATH'])}"
        drop = ("CXX", "CXXFLAGS", "LDFLAGS", "CUDA_HOME", "CUDA_PATH")
        env = {k: v for k, v in os.environ.items() if k not in drop and not k.startswith("HOROVOD_")}
        env |= self.env | {"PATH": path, "PYTHONPATH": str(self.folder), "HOME": str(self.folder)}
        env["PYTHONDONTWRITEBYTECODE"] = "1"  # `torch` may change twice within the second that bytecode files keep
        command = ["/bin/bash", str(ROOT / "env" / script), *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)

    def plan(self, *arguments: str) -> dict[str, str]:
        """The lines of the dry run, by their first word."""
        result = self.run("build_horovod.sh", "--python", sys.executable, "--dry-run", *arguments)
        assert result.returncode == 0, result.stderr
        return dict(line.split(" ", 1) for line in result.stdout.splitlines())

    def refusal(self, *arguments: str) -> str:
        result = self.run("build_horovod.sh", "--python", sys.executable, "--dry-run", *arguments)
        assert result.returncode == 1 and not result.stdout
        return result.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_compiler_too_old_for_torch_is_refused_before_the_build(machine: Machine) -> None:
    machine.program("g++-8", 'case "$*" in *-std=c++20*) exit 1 ;; *) echo g++ 8.5.0 ;; esac\n')
    machine.env["CXX"] = "g++-8"
    assert "does not support C++20, which torch 2.13.0+cpu needs: g++ 8.5.0" in machine.refusal()


def test_the_key_is_stable_and_depends_on_the_build(machine: Machine) -> None:
    machine.program("mpicxx", "echo $MPI_VERSION\n")
    keys = []
    for change in ({}, {}, {"MPI_VERSION": "Open MPI 5.0.1"}, {"CXXFLAGS": "-O1"}):
        machine.env |= change
        keys.append(machine.plan()["key"])
    machine.torch("2.12.0+cpu")
    keys += [machine.plan()["key"], machine.plan("--without-mpi")["key"]]
    assert keys[0] == keys[1] and len(set(keys)) == 5


HYDRA = """\
HYDRA build details:
    Version:                                 5.0.2
    Release Date:                            Fri Sep 25 20:45:26 UTC 2026
    CC:                              cc
"""


@each(
    ("mpirun", "version"),
    [
        (f"cat <<END\n{HYDRA}END\n", "MPICH 5.0.2"),
        ("echo 'mpirun (Open MPI) 4.1.4'\necho\n", "mpirun (Open MPI) 4.1.4"),
        ("exit 127\n", ""),  # MPI whose only launcher is srun
    ],
)
def test_the_version_of_the_mpi(machine: Machine, mpirun: str, version: str) -> None:
    machine.program("mpicxx", 'case "$1" in -show) echo c++ -lmpi ;; *) exit 1 ;; esac\n')  # as MPICH's
    machine.program("mpirun", mpirun)
    assert machine.plan()["MPI"] == f"c++ -lmpi | {version}"


def test_mpi_is_optional_unless_required(machine: Machine) -> None:
    machine.without("mpicxx", "mpicxx.openmpi", "nvcc")
    assert machine.plan()["MPI"] == "none"
    assert "mpicxx is not on PATH" in machine.refusal("--with-mpi")


def test_nccl_needs_a_cuda_torch_and_a_toolkit_of_its_major_version(machine: Machine) -> None:
    assert "not a CUDA build" in machine.refusal("--with-nccl")
    machine.torch("2.8.0+cu128", cuda="'12.8'", standard=17)
    machine.toolkit("12.4")
    found = machine.plan()
    assert found["NCCL"] == "NCCL 22803 CUDA 12.4 sm 80,90" and "C++17," in found["compiler"]
    assert machine.plan("--cuda-arch", "80")["NCCL"].endswith("sm 80")
    machine.toolkit("13.0")
    message = machine.refusal()
    assert "torch 2.8.0+cu128 is for CUDA 12.8, but nvcc in" in message and "--without-nccl" in message


# Another source than the release: a tree that has only what the patches change

# Line of the release -> of a source that needs no patch
PATCHES = {
    "cmake/Modules/FindPytorch.cmake": (
        'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)', "set(Pytorch_CUDA FALSE)",
    ),
    "CMakeLists.txt": ("    enable_language(CUDA)", '    message(STATUS "CUDA is left out")'),
    "horovod/runner/mpi_run.py": (
        "        os.execve('/bin/sh', ['/bin/sh', '-c', mpirun_command], env)",
        "        from horovod.runner.mpirun_process import run; sys.exit(run(mpirun_command, env))",
    ),
    "setup.py": ("    require_list.append('cffi>=1.4.0')", "    pass  # cffi is not used"),
}  # fmt: skip
# Stands in for a Python whose pip copies the source and the compiler in place of building.
PYTHON = """\
case "$*" in
  "-m pip wheel "*)
    while [ "$1" != -w ]; do shift; done
    mkdir "$2" && touch "$2/horovod-0.whl" && cp -r "$3" HERE/built && cp "$CXX" HERE/built/compiler ;;
  "-m pip "*) ;;
  *) PYTHON "$@" | sed "s|^py_scripts=.*|py_scripts=HERE/bin|" ;;
esac
"""


@dataclass
class Source:
    """A source in the folder `tree` whose lines are the release's, in C++14, and its build."""

    here: Path

    def __post_init__(self) -> None:
        self.tree, self.machine = self.here / "tree", Machine(self.here)
        standard = "set(CMAKE_CXX_STANDARD 14)\n"
        files = {f"tree/{name}": self.text(old) for name, (old, _) in PATCHES.items()}
        files["tree/CMakeLists.txt"] = standard + files["tree/CMakeLists.txt"]
        files["tree/horovod/torch/CMakeLists.txt"] = f"if(TORCH)\n    {standard}"
        files |= {"tree/horovod/__init__.py": "__version__ = '0.29.0'\n", "tree/third_party/gloo/CMakeLists.txt": ""}
        # What is installed after the build
        files |= {"horovod/__init__.py": "", "horovod/torch.py": "mpi_built = nccl_built = bool\ngloo_built = object\n"}
        for name, text in files.items():
            (self.here / name).parent.mkdir(parents=True, exist_ok=True)
            (self.here / name).write_text(text)
        self.machine.program("python", PYTHON.replace("HERE", str(self.here)).replace("PYTHON", sys.executable))
        self.machine.program("horovodrun", "echo '[X] PyTorch [X] Gloo'\n")

    def text(self, line: str) -> str:
        return f"before\n{line}\nafter\n"

    def build(self, path: Path) -> str:
        """What the build of `path` prints; its files are then in the folder `built`."""
        python = str(self.here / "bin/python")
        done = self.machine.run("build_horovod.sh", "--python", python, "--without-mpi", "--source", str(path))
        assert done.returncode == 0 and "Horovod 0.29.0 for" in done.stdout, done
        return done.stdout

    def has(self, name: str, line: str) -> bool:
        return (self.here / name).read_text().endswith(self.text(line))


def test_another_source_is_patched_in_a_copy(tmp_path: Path) -> None:
    source = Source(tmp_path)
    said = source.build(Path(shutil.make_archive(str(tmp_path / "horovod"), "gztar", tmp_path, "tree")))
    assert said.count(": patch: ") == 5 and said.count("no patch") == 1
    assert "no patch: bf16 in allreduce: horovod_bf16.patch does not fit this source" in said
    for name, (old, new) in PATCHES.items():
        assert source.has(f"built/{name}", new) and source.has(f"tree/{name}", old)
    assert "-std=c++20" in (tmp_path / "built/compiler").read_text()
    assert (tmp_path / "built/horovod/runner/mpirun_process.py").exists()


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    source = Source(tmp_path)
    for missing, words in (("third_party/gloo", "git clone --recursive"), ("horovod", "no Horovod source")):
        shutil.rmtree(source.tree / missing)
        refusal = source.machine.refusal("--source", str(source.tree))
        assert f"--source {source.tree}: " in refusal and words in refusal


def test_setup_does_not_touch_a_folder_that_is_no_environment(machine: Machine) -> None:
    precious = machine.folder / "papers"
    precious.mkdir()
    (precious / "thesis.tex").write_text("done")
    result = machine.run("setup.sh", "--venv", str(precious))
    assert result.returncode == 1 and "no virtual environment" in result.stderr
    assert [path.name for path in precious.iterdir()] == ["thesis.tex"]


@each("arguments", [["--torch", "newest"], ["--tarch"], ["--python"], ["--horovod", "nowhere"]])
def test_setup_refuses_unknown_arguments(tmp_path: Path, arguments: list[str]) -> None:
    result = Machine(tmp_path).run("setup.sh", "--venv", str(tmp_path / "venv"), *arguments)
    assert result.returncode == 1 and result.stderr.startswith("env/setup.sh: error: ")
    assert not (tmp_path / "venv").exists()


def test_torch_in_place_needs_a_python_with_torch(machine: Machine) -> None:
    (machine.folder / "torch/__init__.py").write_text("raise ImportError('libcudart')\n")
    where = ["--venv", str(machine.folder / "venv"), "--python", sys.executable, "--no-apt"]
    result = machine.run("setup.sh", *where, "--torch-in-place")
    assert f"--torch-in-place: {sys.executable} has no torch that works" in result.stderr
    assert not (machine.folder / "venv").exists()


# Without a network: packages come from a folder of wheels, and with --torch-in-place from another Python.


class Offline:
    """A copy of the project's files, a Python whose packages are at the lower bounds, and a folder of wheels."""

    def __init__(self, folder: Path) -> None:
        self.machine = Machine(folder / "home")
        shutil.rmtree(self.machine.folder / "torch")  # on PYTHONPATH
        self.clone, self.wheels, self.venv = (folder / name for name in ("clone", "its wheels", "venv"))
        self.wheels.mkdir()
        shutil.copytree(ROOT / "env", self.clone / "env")
        for name in ("hvd_bert/__init__.py", "hvd_bert/model/cpu/fused.cpp", "hvd_bert/model/cpu/fused.py"):
            (self.clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.clone / name)
        for name in ("pyproject.toml", "requirements.txt", "README.md"):
            shutil.copy(ROOT / name, self.clone / name)
        place = folder / "another's Python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
        self.python = place / "bin/python"
        self.packages = next(place.glob("lib/python*/site-packages"))
        declared = (ROOT / "pyproject.toml").read_text().split("\ndependencies = [")[1].split("\n]")[0]
        self.bounds = dict(re.findall(r'"([\w-]+)>=([\d.]+)"', declared))
        for name, version in {**self.bounds, "cloudpickle": "3", "packaging": "24"}.items():
            self.add(name, version)
        (self.packages / "transformers").mkdir()
        Machine(self.packages).torch("2.11.0+cu130")
        with (self.packages / "torch/__init__.py").open("a") as file:
            file.write("from unittest.mock import MagicMock\nones = MagicMock()\n")
        # setuptools lies in a folder that a .pth file of that Python names.
        real = Path(setuptools.__file__).parents[1]
        tools = folder / "tools"
        tools.mkdir()
        for path in (real / "setuptools", real / "_distutils_hack", *real.glob("setuptools-*.dist-info")):
            (tools / path.name).symlink_to(path)
        (self.packages / "tools.pth").write_text(f"{tools}\n")

    def add(self, name: str, version: str) -> None:
        info = self.packages / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def remove(self, name: str) -> None:
        shutil.rmtree(next(self.packages.glob(f"{name.replace('-', '_')}-*.dist-info")))

    def wheel(self, name: str, version: str, tag: str = "py3-none-any", needs: str = "", **files: str) -> None:
        info = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(self.wheels / f"{name}-{version}-{tag}.whl", "w") as file:
            for path, text in files.items():
                file.writestr(f"{name}/{path}.py", text)
            head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            file.writestr(f"{info}/METADATA", head + f"Requires-Dist: {needs}\n" * bool(needs))
            file.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
            file.writestr(f"{info}/entry_points.txt", f"[console_scripts]\n{name}run = {name}.run:main\n")
            file.writestr(f"{info}/RECORD", "")

    def horovod(self, **files: str) -> None:
        """A wheel as of env/build_horovod.sh, for this Python and torch."""
        python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
        tag = f"{python}-{python}-linux_{platform.machine()}"
        self.wheel("horovod", "0.28.1+torch2.11.0.cu130.k0", tag, **files)

    def set_up(self) -> subprocess.CompletedProcess[str]:
        script = str(self.clone / "env/setup.sh")
        where = ["--venv", str(self.venv), "--python", str(self.python), "--torch-in-place"]
        self.machine.env |= {"PIP_INDEX_URL": "http://localhost:9/", "PIP_CONFIG_FILE": os.devnull}
        return self.machine.run(script, *where, "--wheels", str(self.wheels), "--without-mpi", "--no-apt")


@pytest.fixture
def offline(tmp_path: Path) -> Offline:
    return Offline(tmp_path)


@pytest.mark.slow
def test_all_packages_that_are_missing_are_named_before_anything_is_installed(offline: Offline) -> None:
    offline.remove("numpy")
    offline.add("numpy", "1.0")
    for name in ("datasets", "plotly", "msgspec", "cloudpickle"):
        offline.remove(name)
    offline.wheel("datasets", "99", needs="dill<0.5")
    offline.wheel("plotly", "1")
    offline.wheel("msgspec", "99", "cp27-cp27m-linux_x86_64")  # for another Python
    result = offline.set_up()
    assert result.returncode == 1 and "--download" in result.stderr, result
    bounds = {name: f"{name}>={offline.bounds[name]}" for name in ("numpy", "plotly", "msgspec")}
    for line in (bounds["numpy"] + " (1.0 ", bounds["plotly"] + " (1 ", bounds["msgspec"], "dill<0.5 (", "cloudpickle"):
        assert f"\n  {line}" in result.stderr, line
    named = re.findall(r"^  ([a-z]\w*)", result.stderr, re.MULTILINE)
    assert set(named) == {*bounds, "dill", "cloudpickle", "horovod"}
    assert not list(offline.venv.glob("lib/python*/site-packages/datasets"))


@pytest.mark.slow
def test_packages_of_another_python_and_a_wheel_of_horovod_make_an_environment(offline: Offline) -> None:
    (offline.packages / "horovod").mkdir()  # the environment's own wins
    offline.horovod(
        __init__="", torch="mpi_built = nccl_built = bool\ngloo_built = object\n",
        run="def main():\n    import setuptools\n    print('[X] PyTorch [X] Gloo')\n",
    )  # fmt: skip
    result = offline.set_up()
    assert result.returncode == 0, result
    code = "import hvd_bert, horovod, setuptools, torch; print(horovod.__file__, torch.__file__, sep='\\n')"
    found = subprocess.check_output([offline.venv / "bin/python", "-c", code], text=True).splitlines()
    assert Path(found[0]).is_relative_to(offline.venv) and Path(found[1]).is_relative_to(offline.packages)
    assert "up to date" in offline.set_up().stdout
    shutil.rmtree(offline.wheels)
    assert "up to date" in offline.machine.run(str(offline.clone / "env/setup.sh"), "--venv", str(offline.venv)).stdout


@pytest.mark.slow
def test_a_wheel_of_horovod_that_does_not_load_is_named(offline: Offline) -> None:
    offline.horovod(
        __init__="", torch="raise ImportError('libmpi.so.40')\n",
        run="def main():\n    print('[X] PyTorch [X] Gloo')\n",
    )  # fmt: skip
    result = offline.set_up()
    assert result.returncode == 1 and "libmpi.so.40" in result.stderr, result
    assert str(next(offline.wheels.iterdir())) in result.stderr and "remove" in result.stderr


# System packages: set-up names each with its reason before it installs it, and --no-apt installs none

PYTHONS = ("python3", *(f"python3.{minor}" for minor in range(10, 16)))


@pytest.fixture
def debian(tmp_path: Path) -> Machine:
    """A Debian without Python and Slurm, where the user is root and apt-get only writes down what it is told."""
    if not Path("/etc/debian_version").exists():
        pytest.skip("needs Debian")
    made = Machine(tmp_path)
    made.program("id", "echo 0\n")
    made.program("apt-get", f'echo "$@" >>{tmp_path}/apt\n')
    made.without(*PYTHONS, "srun")
    return made


def installed(debian: Machine) -> str:
    file = debian.folder / "apt"
    return file.read_text() if file.exists() else ""


def test_packages_are_named_with_their_reasons_before_they_are_installed(debian: Machine) -> None:
    result = debian.run("setup.sh", "--venv", str(debian.folder / "venv"))
    assert result.returncode == 1 and "no Python 3.10 or later" in result.stderr, result
    assert "install -y --no-install-recommends python3 python3-venv python3-dev\n" in installed(debian)
    assert "installing with apt (--no-apt prevents this" in result.stdout
    assert re.search(r"^ +python3-dev +Python's headers, to build Horovod$", result.stdout, re.MULTILINE)


def test_no_apt_installs_nothing(debian: Machine) -> None:
    for script, *words, status in (("setup.sh", "--venv", f"{debian.folder}/venv", 1), ("cluster_packages.sh", 3)):
        result = debian.run(script, *words, "--no-apt")
        assert result.returncode == status and "apt-get install" in result.stderr, result  # what the user can do
        assert installed(debian) == "" and "installing" not in result.stdout


def discover(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.run(
        [ROOT / "scripts/discover_hosts.sh"], cwd=folder, env=clean | env, capture_output=True, text=True, check=False
    )


def test_file_in_either_form(tmp_path):
    (tmp_path / "mine").write_text("# ours\na100-01:2\na100-02 slots=4 max_slots=4\n\na100-03  # one\n")
    done = discover(tmp_path, HVD_BERT_HOSTFILE="mine")
    assert (done.returncode, done.stdout) == (0, "a100-01:2\na100-02:4\na100-03:1\n")
    done = discover(tmp_path)
    assert done.returncode == 2 and "no file 'hosts' and not in a Slurm job" in done.stderr


def test_slurms_nodes(tmp_path):
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"\n')
    (tmp_path / "scontrol").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = discover(tmp_path, PATH=path, SLURM_JOB_NODELIST="n[1-2]", SLURM_NTASKS_PER_NODE="2")
    assert (done.returncode, done.stdout) == (0, "n1:2\nn2:2\n")
