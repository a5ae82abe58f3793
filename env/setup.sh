#!/usr/bin/env bash
# Sets up a virtual environment with torch, Horovod built for it, and this package.
# Safe to repeat: it takes a moment if there is nothing to do. See --help.
# shellcheck disable=SC2329  # logged() calls functions by name
set -Eeuo pipefail
trap 'echo "env/setup.sh: error: line $LINENO failed: $BASH_COMMAND" >&2' ERR

default_torch=2.13.0
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=env/apt.sh
. "$root/env/apt.sh"

usage() {
  cat <<END
usage: env/setup.sh [option...]

Creates .venv with torch, Horovod built against it (env/build_horovod.sh), requirements.txt and this package.
The environment remembers these options. Later runs without an option keep its value.
As root on Debian it prints which system packages are missing, and why it needs them, and installs them with apt.

  --python PY       Python 3.10 or later for the environment (default: python3, else the newest on PATH)
  --venv DIR        the environment's folder (default: .venv in this clone)
  --torch SPEC      a version (2.8.0), a requirement ('torch>=2.8,<2.9') or a wheel file (default: $default_torch)
  --torch-in-place  use the torch that --python already has, with its packages; nothing is installed there
  --torch-index URL package index for torch only, such as the CPU index on pytorch.org
  --with-mpi | --without-mpi      require MPI, or build without (default: MPI if mpicxx is found or apt can install it)
  --with-nccl | --without-nccl    require NCCL, or build without (default: NCCL if torch has CUDA and nvcc is found)
  --horovod SOURCE  another Horovod: a tree or tar archive for env/build_horovod.sh --source; 'release' (default)
  --download DIR    only fill DIR with the packages that these options need, for --wheels on a machine without a network
  --wheels DIR      install from DIR and from no package index; 'none' (default) returns to the index.
                    With --torch-in-place, packages that are new enough there (pyproject.toml) are not needed in DIR
  --locked | --not-locked         install exactly the files whose hashes env/locked/ has (exceptions:
                    docs/start/install.md). Default: requirements.txt, with the newest of what that needs in turn
  --auto            forget the --with-... and --without-... options
  --dev             add packages for scripts/test.sh (env/requirements-dev.txt)
  --bench           add packages for benchmarks/compare_peers.py (env/requirements-bench.txt)
  --deepspeed       add packages for --strategy deepspeed (env/requirements-deepspeed.txt)
  --no-apt          never install system packages, even as root (not remembered)
  -h, --help        print this help
END
}

die() {
  printf 'env/setup.sh: error: %s\n' "$1" >&2
  shift
  [ $# -eq 0 ] || printf '  %s\n' "$@" >&2
  exit 1
}
warn() { printf 'env/setup.sh: warning: %s\n' "$*" >&2; }
say() { printf '%s\n' "$*"; }

parse_arguments() {
  local name
  python='' venv=$root/.venv download='' extras=() auto=no
  given_torch='' given_torch_index='' given_mpi='' given_nccl='' given_locked='' given_horovod='' given_wheels=''
  while [ $# -gt 0 ]; do
    case $1 in
      --python | --venv | --download | --torch | --torch-index | --horovod | --wheels)
        [ $# -ge 2 ] && [ -n "$2" ] || die "$1 needs a value (see --help)"
        name=${1#--}
        case $name in torch* | horovod | wheels) name=given_${name/-/_} ;; esac
        printf -v "$name" '%s' "$2"
        shift
        ;;
      --with-mpi | --with-nccl) printf -v "given_${1#--with-}" yes ;;
      --without-mpi | --without-nccl) printf -v "given_${1#--without-}" no ;;
      --locked) given_locked=yes ;;
      --not-locked) given_locked=no ;;
      --torch-in-place) given_torch=in-place ;;
      --auto) auto=yes ;;
      --dev | --bench | --deepspeed) extras+=("${1#--}") ;;
      --no-apt) use_apt=no ;;
      -h | --help) usage && exit 0 ;;
      *) die "unknown argument $1 (see --help)" ;;
    esac
    shift
  done
  venv=$(realpath -m "$venv")
  case $given_torch in
    '' | in-place | torch*) ;;
    *.whl)
      [ -f "$given_torch" ] || die "--torch: no such file: $given_torch"
      given_torch="torch @ file://$(realpath "$given_torch")"
      ;;
    [0-9]*) given_torch="torch==$given_torch" ;;
    *) die "--torch $given_torch: must be a version (2.8.0), a requirement ('torch>=2.8,<2.9') or a wheel file" ;;
  esac
  case $given_horovod in
    '' | release) ;;
    *)
      [ -e "$given_horovod" ] || die "--horovod $given_horovod: no such file or folder. It can also be 'release'"
      given_horovod=$(realpath "$given_horovod")
      ;;
  esac
  case $given_wheels in '' | none) ;; *) given_wheels=$(realpath -m "$given_wheels") ;; esac
}

# The environment keeps the options, because scripts/demo.sh and scripts/test.sh run this file without them.
settings=(torch torch_index torch_installed mpi nccl locked horovod wheels mpi_seen nvcc_seen horovod_version)
load_settings() {
  torch="torch==$default_torch" torch_index='' mpi=auto nccl=auto locked=no horovod=release wheels=none
  mpi_seen=none nvcc_seen=none torch_installed='' horovod_version=''
  local name value
  if [ -f "$venv/hvd_bert.settings" ]; then
    while IFS='=' read -r name value; do
      case " ${settings[*]} " in *" $name "*) printf -v "$name" '%s' "$value" ;; esac
    done <"$venv/hvd_bert.settings"
  fi
  [ "$auto" = no ] || mpi=auto nccl=auto
  if [ -n "$given_torch" ]; then torch=$given_torch torch_index=''; fi
  torch_index=${given_torch_index:-$torch_index}
  mpi=${given_mpi:-$mpi}
  nccl=${given_nccl:-$nccl}
  locked=${given_locked:-$locked}
  horovod=${given_horovod:-$horovod}
  wheels=${given_wheels:-$wheels}
  [ "$horovod" != none ] || horovod=release # of an environment set up by an earlier version
}

save_settings() {
  local name
  for name in "${settings[@]}"; do
    printf '%s=%s\n' "$name" "${!name}"
  done >"$venv/hvd_bert.settings.new"
  mv "$venv/hvd_bert.settings.new" "$venv/hvd_bert.settings"
}

# Name and version of the MPI that mpirun belongs to. MPICH's mpirun prints its version on the second line.
mpirun_version() { mpirun --version 2>/dev/null | sed '/^HYDRA/d; s/^ *Version: */MPICH /; q' || true; }

# A compiler module that is not loaded now, as on a compute node, must not undo an earlier choice of MPI or NCCL.
look_for_mpi_and_cuda() {
  if [ "$mpi" != no ] && command -v mpicxx >/dev/null; then
    mpi_seen="$(command -v mpicxx) $(mpicxx -show 2>&1 | tr '\n' ' ') $(mpirun_version)"
  fi
  local nvcc=${CUDA_HOME:+$CUDA_HOME/bin/}nvcc
  if [ "$nccl" != no ] && command -v "$nvcc" >/dev/null; then
    nvcc_seen="$(command -v "$nvcc") $("$nvcc" --version 2>&1 | tail -n 1)"
  fi
}

venv_python_identity() { "$venv/bin/python" -c 'import sys; print(sys.prefix, sys.base_prefix, sys.version, sep="|")' 2>/dev/null; }

# Read once at the start: if a file changes during a run, the next run must notice.
read_inputs() {
  local files=("$root"/{requirements.txt,pyproject.toml,env/setup.sh,env/{build_horovod.sh,horovod_bf16.patch,mpirun_process.py},hvd_bert/model/cpu/fused.{cpp,py}} "$root"/env/locked/{torch,base}.txt)
  declare -gA inputs
  inputs[base]=$(cat "${files[@]}" | sha256sum)
  local extra
  for extra in dev bench deepspeed; do
    inputs[$extra]=$(cat "${files[@]}" "$root"/env/{requirements-$extra,locked/$extra}.txt | sha256sum)
  done
}

# Prints what to install: base, and the requested extras.
kinds() { printf '%s\n' base ${extras[@]+"${extras[@]}"}; } # an empty array is unset before bash 4.4

# $1: one of kinds
fingerprint() {
  local there=''
  [ "$torch" != in-place ] || there=$(version_of torch || true) # it may be replaced without this script
  printf '%s\n' "${inputs[$1]}" "$root" "$(venv_python_identity)" "$torch$there" "$torch_index" "$mpi" "$nccl" "$locked" "$horovod" "$mpi_seen" "$nvcc_seen" |
    sha256sum | cut -c 1-32
}

# Whether everything that the stamp records is still installed. Fast, because it reads package metadata only.
still_there() {
  [ -x "$venv/bin/hvd-bert" ] && "$venv/bin/python" - "$horovod_version" "$(takes_bounds || echo "$root/requirements.txt")" <<'END' >/dev/null 2>&1
import importlib.metadata as metadata, importlib.util, re, sys
assert not sys.argv[1] or metadata.version("horovod") == sys.argv[1] and importlib.util.find_spec("horovod")
assert all(importlib.util.find_spec(name) for name in ("pip", "torch", "transformers", "hvd_bert"))
for line in open(sys.argv[2] or "/dev/null"):
    pin = re.match(r"([\w-]+)==([\w.]+)\s*(?:#.*)?$", line)
    if pin and pin[1] not in ("torch", "mpi4py"):
        assert metadata.version(pin[1]) == pin[2], line
END
}

up_to_date() {
  local kind
  for kind in $(kinds); do
    [ "$(cat "$venv/hvd_bert.$kind.stamp" 2>/dev/null)" = "$(fingerprint "$kind")" ] || return 1
  done
  still_there
}

works_as_base() {
  "$1" -c 'import sys, venv, ensurepip, ssl; sys.exit(not ((3, 10) <= sys.version_info[:2]))' >/dev/null 2>&1
}

find_python() {
  local candidate
  if [ -n "$python" ]; then
    command -v "$python" >/dev/null || die "--python $python: no such program"
    works_as_base "$python" || try_apt "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])' 2>/dev/null)"
    works_as_base "$python" || die "--python $python: must be Python 3.10 or later with its venv and ssl modules" \
      "Debian or Ubuntu: apt-get install python3-venv python3-dev"
    return 0
  fi
  for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
    if works_as_base "$candidate"; then
      python=$candidate
      return 0
    fi
  done
  try_apt python3 python3-venv python3-dev
  python=python3
  works_as_base "$python" || die "no Python 3.10 or later (with its venv module) was found" \
    "Debian or Ubuntu: apt-get install python3 python3-venv python3-dev" \
    "RHEL or Rocky: dnf install python3.11 python3.11-devel    a cluster: module load python    or select one: --python PY"
}

# Installs Debian packages if possible. The caller checks the result.
try_apt() {
  can_apt && [ -n "$*" ] || return 0
  apt_install "$log" "$@" || warn "apt-get install $* failed; see $log"
}

provide_system_packages() {
  local packages=()
  if kinds | grep -qx dev && ! command -v chromedriver >/dev/null; then
    try_apt chromium chromium-driver # without them the tests of HTML pages are skipped
  fi
  command -v "${CXX:-g++}" >/dev/null || packages+=(g++)
  command -v make >/dev/null || packages+=(make)
  command -v patch >/dev/null || packages+=(patch)
  [ -f "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
    packages+=("$("$venv/bin/python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')")
  if [ "$mpi" != no ] && { ! command -v mpicxx || ! command -v mpirun; } >/dev/null; then
    packages+=(openmpi-bin libopenmpi-dev openssh-client)
  fi
  [ ${#packages[@]} -eq 0 ] || try_apt "${packages[@]}"
  look_for_mpi_and_cuda
  [ -z "$horovod_wheel" ] || return 0
  { command -v "${CXX:-g++}" && command -v make; } >/dev/null || die "building Horovod needs a C++ compiler and make" \
    "Debian or Ubuntu: apt-get install g++ make    RHEL or Rocky: dnf install gcc-c++ make    a cluster: module load gcc"
  if [ "$mpi" = no ] || command -v mpicxx >/dev/null; then return 0; fi
  [ "$mpi_seen" = none ] || die "this environment's Horovod has MPI, but mpicxx is not on PATH now" \
    "It was: $mpi_seen" "Load the same MPI again (module load openmpi), or use --without-mpi"
  [ "$mpi" = auto ] || die "--with-mpi: mpicxx is not on PATH" \
    "Debian or Ubuntu: apt-get install openmpi-bin libopenmpi-dev    RHEL or Rocky: dnf install openmpi-devel" \
    "a cluster: module load openmpi"
  warn "no MPI (mpicxx is not on PATH): Horovod is built with Gloo only, which does not work under srun or mpirun."
  warn "For MPI, run 'module load openmpi' or 'apt-get install openmpi-bin libopenmpi-dev', then rerun this script."
}

make_venv() {
  if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ "$venv" != "$root/.venv" ] && [ -n "$(ls -A "$venv")" ]; then
    die "--venv $venv: this folder exists and is no virtual environment; choose another one"
  fi
  local identity
  identity=$(venv_python_identity) || identity=''
  if [ "${identity%%|*}" = "$venv" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1 && same_base && same_place; then
    return 0
  fi
  find_python
  local torch_place=''
  if [ "$torch" = in-place ]; then
    # Python reads the .pth files of a folder only if the folder is added by addsitedir.
    torch_place=$("$python" -c 'import pathlib, sys, torch; place = str(pathlib.Path(torch.__file__).parents[1])
print("import site;", *(f"site.addsitedir({p!a});" for p in sys.path if p == place or p.endswith("-packages")))' 2>/dev/null) ||
      die "--torch-in-place: $python has no torch that works" "Name the Python that has it: --python PY"
  fi
  # The base Python of an active environment, because that environment may be the one to recreate.
  python=$("$python" -c 'import sys; print(getattr(sys, "_base_executable", None) or sys.executable)')
  [ ! -e "$venv" ] || say "      $venv is incomplete or has another Python: recreating it"
  logged "$python" -m venv --clear "$venv"
  logged pip install -q 'pip>=22.1' # for --config-settings
  # Not --system-site-packages: of a Python in another environment, that would take the packages of its base.
  if [ -n "$torch_place" ]; then
    echo "$torch_place" >"$(echo "$venv"/lib/python*/site-packages)/torch_in_place.pth"
    logged pip uninstall -q -y setuptools # before Python 3.12, venv installs an old one, which hides that Python's
  fi
  torch_installed='' mpi_seen=none nvcc_seen=none horovod_version='' # the options stay; what was installed is gone
}

# Whether the environment takes torch from another Python, if it should, and only then.
same_place() {
  local text
  text=$(cat "$venv"/lib/python*/site-packages/torch_in_place.pth 2>/dev/null) || true
  if [ "$torch" = in-place ]; then [[ $text == *addsitedir* ]]; else [ -z "$text" ]; fi
}

# Whether the environment was created from the Python of --python.
same_base() {
  [ -z "$python" ] || [ "$("$python" -c 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null)" = \
    "$("$venv/bin/python" -c 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null)" ]
}

by_hash=(--require-hashes --no-deps)
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
version_of() { "$venv/bin/python" -c 'import importlib.metadata as m, sys; print(m.version(sys.argv[1]))' "$1" 2>/dev/null; }

# Sets `files` to what pip installs, or downloads, as torch.
select_torch() {
  files=(${torch_index:+--index-url "$torch_index"} "$torch")
  if [ "$locked" = yes ] && [ "$torch@$torch_index" = "torch==$default_torch@" ]; then
    files=("${by_hash[@]}" -r "$root/env/locked/torch.txt")
  fi
}

install_torch() {
  if [ "$torch" = in-place ]; then
    torch_works && return
    echo "--torch-in-place needs a torch that works. Name the Python that has it: --python PY"
    return 1
  fi
  select_torch
  local command=(install --progress-bar off "${files[@]}")
  # Another index or file may have another build of the same version, which pip would not install.
  if [ -n "$torch_installed" ] && [ "$torch_installed" != "$torch@$torch_index" ]; then command+=(--force-reinstall); fi
  pip "${command[@]}"
  torch_works || {
    echo "torch is installed but does not work: installing it again"
    pip "${command[@]}" --force-reinstall
    torch_works
  }
}
# transformers 5 ignores an older torch.
torch_is_new_enough() { [ "$(printf '2.6\n%s\n' "$(version_of torch)" | sort -V | head -n 1)" = 2.6 ]; }
torch_works() { "$venv/bin/python" -c 'import torch; torch.ones(2).sum().item()'; }

build_horovod() {
  local options=()
  horovod_version=''
  [ "$horovod" = release ] || options+=(--source "$horovod")
  [ "$mpi" = auto ] || options+=("$(choice "$mpi" mpi)")
  [ "$nccl" = auto ] || options+=("$(choice "$nccl" nccl)")
  find_horovod_wheel
  [ -z "$horovod_wheel" ] || options+=(--wheel "$horovod_wheel")
  bash "$root/env/build_horovod.sh" --python "$venv/bin/python" ${options[@]+"${options[@]}"} </dev/null | sed -u 's/^build_horovod: /      /' || exit 1
  horovod_version=$(version_of horovod)
}
choice() { if [ "$1" = yes ]; then echo "--with-$2"; else echo "--without-$2"; fi; }
has_mpi() { "$venv/bin/python" -c 'import sys, horovod.torch as hvd; sys.exit(not hvd.mpi_built())' 2>/dev/null; }

# Sets `horovod_wheel` to the wheel in --wheels for this Python and torch (any torch while there is none), or to ''.
find_horovod_wheel() {
  horovod_wheel=''
  [ "$wheels" != none ] && [ "$horovod" = release ] || return 0
  local version
  version=$("$venv/bin/python" -c 'import torch; print(torch.__version__)' 2>/dev/null | tr -c 'A-Za-z0-9\n' .) || version='*'
  horovod_wheel=$(compgen -G "$wheels/horovod-*+torch$version.k*-$(python_tag)-linux_$(uname -m).whl" | tail -n 1) || true
}
python_tag() { "$venv/bin/python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])'; }

# Whether packages that are there need only be new enough.
takes_bounds() { [ "$torch" = in-place ] && [ "$wheels" != none ]; }

# Sets `lists` to the requirements files and `files` to pip's arguments for them. torch and Horovod must stay as they are.
# $1: yes if MPI is built in, without which mpi4py is not needed
select_requirements() {
  local skip='^(torch|horovod)\b' version extra list=$venv/hvd_bert.requirements.txt
  [ "$1" = yes ] || skip='^(torch|horovod|mpi4py)\b'
  lists=("$list")
  if [ "$locked" = yes ]; then
    # A package takes several lines, all but the last with a backslash.
    sed -E "/$skip/,/[^\\]\$/d" "$root/env/locked/base.txt" >"$list"
    for extra in ${extras[@]+"${extras[@]}"}; do lists+=("$root/env/locked/$extra.txt"); done
    files=("${by_hash[@]}" "${lists[@]/#/--requirement=}")
    return 0
  fi
  if takes_bounds; then
    sed -n 's/^mpi4py==/mpi4py>=/p' "$root/requirements.txt"
    sed -n '/^dependencies = \[/,/^\]/s/^ *"\(.*\)",.*/\1/p' "$root/pyproject.toml"
  else
    cat "$root/requirements.txt"
  fi | grep -vE "$skip" >"$list"
  version=$(version_of torch) || true
  echo "torch${version:+==$version}" >"$venv/hvd_bert.constraints.txt"
  for extra in ${extras[@]+"${extras[@]}"}; do lists+=("$root/env/requirements-$extra.txt"); done
  files=(-c "$venv/hvd_bert.constraints.txt" "${lists[@]/#/--requirement=}")
}

# Before anything is installed, so that one message has all that --wheels lacks.
check_wheels() {
  [ "$wheels" != none ] || return 0
  local needs=('setuptools>=77' cloudpickle) with_mpi=no missing
  [ "$torch" = in-place ] || needs+=("$torch")
  if [ -z "$horovod_wheel" ]; then
    [ "$mpi" = no ] || ! command -v mpicxx >/dev/null || with_mpi=yes
    command -v cmake >/dev/null || needs+=('cmake>=3.18')
    [ "$horovod" != release ] || needs+=("$(sed -n 's/^horovod[^=]*\([^ ]*\).*/horovod=\1/p' "$root/requirements.txt")")
  fi
  select_requirements $with_mpi
  mapfile -t missing < <("$venv/bin/python" "$root/env/missing.py" "$wheels" "${needs[@]}" "${lists[@]/#/--requirement=}")
  [ ${#missing[@]} -eq 0 ] || die "--wheels $wheels: packages for $(python_tag) on $(uname -m) are missing" "${missing[@]}" \
    "To get all: run 'bash env/setup.sh --download DIR' with the same options on such a machine with a network, then copy DIR."
}

# For --wheels on another machine
download_packages() {
  mkdir -p "$download"
  download=$(realpath "$download") log=$download/download.log
  : >"$log"
  find_python
  say "Downloading packages for $("$python" --version) to $download (details: $log)"
  venv=$(mktemp -d)
  trap 'rm -rf "$venv"' EXIT
  logged "$python" -m venv "$venv"
  logged bash "$root/env/build_horovod.sh" --python "$venv/bin/python" --download "$download"
  logged download_requirements
  say "Done. Copy it, and run there, with the same options: bash env/setup.sh --wheels DIR"
}

download_requirements() {
  local get=(download --progress-bar off -d "$download" --find-links "$download") # the torch of --torch-index lies there
  if [ "$torch" != in-place ]; then
    select_torch
    pip "${get[@]}" "${files[@]}"
  fi
  select_requirements yes
  pip "${get[@]}" "${files[@]}"
  pip "${get[@]}" --no-deps --no-binary mpi4py "$(mpi4py_requirement)" # match_mpi4py may need it
  pip "${get[@]}" wheel build cython # which mpi4py and deepspeed need to be built from source
}

install_requirements() {
  select_requirements "$(has_mpi && echo yes)"
  pip install --progress-bar off "${files[@]}"
  ! has_mpi || match_mpi4py
  pip install --no-deps --no-build-isolation --config-settings editable_mode=compat -e "$root"
  pip check || true # for the log
  # Only some CPUs use it, and the others' kernels compute the same.
  [ "$(uname -m)" != x86_64 ] || "$venv/bin/python" -m hvd_bert.model.cpu.fused || echo "fused.cpp was not compiled"
}

# mpi4py's wheel loads the first libmpi that it finds. Two different ones crash a process.
mpi4py_requirement() { sed -n 's/^\(mpi4py[^ ]*\).*/\1/p' "$root/requirements.txt"; }
match_mpi4py() {
  one_libmpi && return 0
  echo "mpi4py's wheel does not load the MPI of Horovod: building it from source"
  MPICC=$(command -v mpicc) pip install --no-binary mpi4py --no-deps --no-cache-dir --force-reinstall "$(mpi4py_requirement)"
  one_libmpi
}
one_libmpi() {
  "$venv/bin/python" - <<'END'
import mpi4py
mpi4py.rc.initialize = False
import horovod.torch
from mpi4py import MPI
found = {line.split()[-1] for line in open("/proc/self/maps") if "/libmpi.so" in line or "/libmpich" in line}
print("MPI libraries in use:", *sorted(found))
raise SystemExit(len(found) != 1)
END
}

logged() {
  # Not 'if "$@"': inside a condition the shell ignores 'set -e' and would miss a failed step.
  local status trap_on_error
  trap_on_error=$(trap -p ERR)
  trap - ERR
  set +e
  (
    set -e
    "$@"
  ) </dev/null >>"$log" 2>&1
  status=$?
  set -e
  eval "$trap_on_error"
  [ $status -eq 0 ] || {
    tail -n 25 "$log" >&2
    die "$1 failed (status $status); above are the last lines of $log"
  }
}

set_up() {
  local start=$SECONDS
  say "Setting up $venv (details: $log)"
  rm -f "$venv"/hvd_bert.*.stamp
  make_venv
  say "[1/5] Python: $("$venv/bin/python" --version)"
  save_settings # now, so that an interrupted run keeps the options
  find_horovod_wheel
  check_wheels
  provide_system_packages
  say "[2/5] system packages: $(${CXX:-g++} --version 2>/dev/null | head -n 1 | grep . || echo 'no compiler'), $(mpirun_version | grep . || echo 'no MPI')"
  say "[3/5] torch: $torch$([ "$torch" = in-place ] || echo ' (the CUDA builds are several GB)')"
  logged install_torch
  torch_is_new_enough || die "torch $(version_of torch) is too old: transformers needs 2.6 or later" "Select another: --torch 2.8.0"
  torch_installed=$torch@$torch_index
  save_settings
  say "[4/5] Horovod for torch $(version_of torch)$([ "$horovod" = release ] || echo ": $horovod")"
  build_horovod
  say "[5/5] requirements.txt$(kinds | sed -n '2,$s/.*/, env\/requirements-&.txt/p' | tr -d '\n') and this package"
  logged install_requirements
  save_settings
  local kind
  for kind in $(kinds); do fingerprint "$kind" >"$venv/hvd_bert.$kind.stamp"; done
  say "Ready in $((SECONDS - start)) s: $venv/bin/python (or: source $venv/bin/activate)"
}

lock() {
  mkdir -p "$(dirname "$venv")"
  command -v flock >/dev/null || return 0
  exec 8>"$venv.lock"
  flock -n 8 || {
    say "Another env/setup.sh is working on $venv: waiting for it"
    flock 8 || warn "$venv.lock: this file system has no locks: continuing without one"
  }
}

main() {
  parse_arguments "$@"
  load_settings
  if [ -n "$download" ]; then
    download_packages
    return 0
  fi
  log=$venv.setup.log
  lock
  read_inputs
  load_settings # again, because another run may have changed them
  look_for_mpi_and_cuda
  # A given source of Horovod may have changed.
  if [[ $given_horovod != /* ]] && same_base && up_to_date; then
    say "Set-up is up to date: $venv"
    return 0
  fi
  if [ "$wheels" != none ]; then
    [ -d "$wheels" ] || die "--wheels $wheels: no such folder" "Name it again, or 'none' to use the package index"
    export PIP_NO_INDEX=1 PIP_FIND_LINKS="file://${wheels// /%20}" # pip splits at spaces
  fi
  : >"$log"
  set_up
}

main "$@"; exit # on one line: the file may be changed while it runs
