#!/usr/bin/env bash
# Sets up a virtual environment with torch, Horovod built for it, and this package.
# Safe to repeat: it takes a moment if there is nothing to do. See --help.
# shellcheck disable=SC2034  # settings are read by their names
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
  --torch SPEC      a version (2.8.0), a requirement ('torch>=2.8,<2.9'), a wheel file, or 'cpu': the CPU build of
                    $default_torch where the package index has one, which saves several GB, else its default build;
                    Horovod without NCCL, unless this machine has an NVIDIA driver
                    (default: $default_torch. scripts/demo.sh selects 'cpu' for a new environment on a machine without
                    an NVIDIA driver. To train on GPUs in that environment later: --torch $default_torch)
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
try() { "$@" </dev/null >>"$log" 2>&1; }
logged() {
  try "$@" && return
  tail -n 25 "$log" >&2
  die "this command failed, and above are the last lines of $log:" "$*"
}

parse_arguments() {
  python='' venv=$root/.venv download='' auto=no given_extras=()
  declare -gA given=()
  while [ $# -gt 0 ]; do
    case $1 in
      --python | --venv | --download | --torch | --torch-index | --horovod | --wheels)
        [ $# -ge 2 ] && [ -n "$2" ] || die "$1 needs a value (see --help)"
        case $1 in
          --torch) select_torch "$2" ;;
          --torch-index) given[torch_index]=$2 ;;
          --horovod | --wheels) select_path "$1" "$2" ;;
          *) printf -v "${1#--}" '%s' "$2" ;;
        esac
        shift
        ;;
      --with-mpi | --with-nccl) given[${1#--with-}]=yes ;;
      --without-mpi | --without-nccl) given[${1#--without-}]=no ;;
      --locked) given[locked]=yes ;;
      --not-locked) given[locked]=no ;;
      --torch-in-place) given[torch]=in-place ;;
      --auto) auto=yes ;;
      --dev | --bench | --deepspeed) given_extras+=("${1#--}") ;;
      --no-apt) use_apt=no ;;
      -h | --help) usage && exit 0 ;;
      *) die "unknown argument $1 (see --help)" ;;
    esac
    shift
  done
  venv=$(realpath -m "$venv")
}

# $1: the value of --torch
select_torch() {
  case $1 in
    cpu | torch*) given[torch]=$1 ;;
    *.whl)
      [ -f "$1" ] || die "--torch: no such file: $1"
      given[torch]="torch @ file://$(realpath "$1")"
      ;;
    [0-9]*) given[torch]="torch==$1" ;;
    *) die "--torch $1: must be a version (2.8.0), a requirement ('torch>=2.8,<2.9'), a wheel file, or 'cpu'" ;;
  esac
}

# $1: --horovod or --wheels; $2: its value
select_path() {
  case $1=$2 in
    --horovod=release | --wheels=none) given[${1#--}]=$2 ;;
    --wheels=*) given[wheels]=$(realpath -m "$2") ;;
    *)
      [ -e "$2" ] || die "$1 $2: no such file or folder. It can also be 'release'"
      given[horovod]=$(realpath "$2")
      ;;
  esac
}

# The environment keeps the options, because scripts/demo.sh and scripts/test.sh run this file without them. Of earlier
# runs it also keeps from where torch came, and which MPI and CUDA compilers there were.
settings=(torch torch_index mpi nccl locked horovod wheels extras torch_installed mpi_seen nvcc_seen)
load_settings() {
  torch="torch==$default_torch" torch_index='' mpi=auto nccl=auto locked=no horovod=release wheels=none extras=''
  torch_installed='' mpi_seen=none nvcc_seen=none
  local name value
  if [ -f "$venv/hvd_bert.settings" ]; then
    while IFS='=' read -r name value; do
      case " ${settings[*]} " in *" $name "*) printf -v "$name" '%s' "$value" ;; esac
    done <"$venv/hvd_bert.settings"
  fi
  [ "$auto" = no ] || mpi=auto nccl=auto
  [ -z "${given[torch]:-}" ] || torch_index=''
  for name in "${!given[@]}"; do printf -v "$name" '%s' "${given[$name]}"; done
  for name in ${given_extras[@]+"${given_extras[@]}"}; do
    case " $extras " in *" $name "*) ;; *) extras+="${extras:+ }$name" ;; esac
  done
}

show_settings() {
  local name
  for name in "${settings[@]}"; do printf '%s=%s\n' "$name" "${!name}"; done
}
save_settings() {
  show_settings >"$venv/hvd_bert.settings.new"
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

# The environment is ready for the settings and the files of the clone that its last complete set-up had.
up_to_date() {
  [ "$(cat "$venv/hvd_bert.ready" 2>/dev/null)" = "$(show_settings && echo "$inputs")" ] && same_base &&
    checks installed "$root" "$venv"/hvd_bert.requirements*.txt >/dev/null 2>&1
}
checksum_inputs() {
  cat "$root"/{requirements.txt,pyproject.toml,hvd_bert/model/cpu/fused.{cpp,py}} \
    "$root"/env/{setup.sh,build_horovod.{sh,py},horovod_*.py,checks.py,horovod_bf16.patch,mpirun_process.py,requirements-*.txt,locked/*.txt} | sha256sum
}

checks() { "$venv/bin/python" "$root/env/checks.py" "$@"; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
version_of() { "$venv/bin/python" -c 'import importlib.metadata as m, sys; print(m.version(sys.argv[1]))' "$1" 2>/dev/null; }
python_version() { "$1" -c 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null; }

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

# Whether the environment works, and was created from the Python of --python, if that is given.
venv_works() { [ "$("$venv/bin/python" -c 'import sys; print(sys.prefix)' 2>/dev/null)" = "$venv" ] && pip --version >/dev/null 2>&1; }
same_base() { [ -z "$python" ] || [ "$(python_version "$python")" = "$(python_version "$venv/bin/python")" ]; }

# Whether the environment takes torch from another Python, if it should, and only then.
same_place() {
  local there=no
  ! grep -qs addsitedir "$venv"/lib/python*/site-packages/torch_in_place.pth || there=yes
  [ "$there" = "$([ "$torch" = in-place ] && echo yes || echo no)" ]
}

make_venv() {
  if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ "$venv" != "$root/.venv" ] && [ -n "$(ls -A "$venv")" ]; then
    die "--venv $venv: this folder exists and is no virtual environment; choose another one"
  fi
  ! { venv_works && same_base && same_place; } || return 0
  find_python
  local torch_place=''
  if [ "$torch" = in-place ]; then
    torch_place=$("$python" "$root/env/checks.py" place 2>/dev/null) ||
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
  torch_installed='' mpi_seen=none nvcc_seen=none # the options stay; what was installed is gone
}

provide_system_packages() {
  local packages=()
  if [[ " $extras " = *" dev "* ]] && ! command -v chromedriver >/dev/null; then
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
  if [ -n "$horovod_wheel" ] || [ "$mpi" = no ] || command -v mpicxx >/dev/null; then return 0; fi
  [ "$mpi_seen" = none ] || die "this environment's Horovod has MPI, but mpicxx is not on PATH now" \
    "It was: $mpi_seen" "Load the same MPI again (module load openmpi), or use --without-mpi"
  [ "$mpi" = auto ] || die "--with-mpi: mpicxx is not on PATH" \
    "Debian or Ubuntu: apt-get install openmpi-bin libopenmpi-dev    RHEL or Rocky: dnf install openmpi-devel" \
    "a cluster: module load openmpi"
  warn "no MPI (mpicxx is not on PATH): Horovod is built with Gloo only, which works under horovodrun and torchrun,"
  warn "but not under srun or mpirun. With srun, use --strategy ddp, fsdp or deepspeed: they need no MPI."
  warn "For MPI, run 'module load openmpi' or 'apt-get install openmpi-bin libopenmpi-dev', then rerun this script."
}

by_hash=(--require-hashes --no-deps)

# $1...: pip's command, which installs or downloads torch. PyPI has no versions such as 2.13.0+cpu, other indexes do.
get_torch() {
  local index=(${torch_index:+--index-url "$torch_index"}) wanted=$torch
  if [ "$torch" = cpu ]; then
    wanted="torch==$default_torch"
    ! try pip "$@" ${index[@]+"${index[@]}"} "$wanted+cpu" || return 0
    say "      the package index has no $wanted+cpu: taking its default build"
  fi
  if [ "$locked$wanted$torch_index" = "yestorch==$default_torch" ]; then
    logged pip "$@" "${by_hash[@]}" -r "$root/env/locked/torch.txt"
  else
    logged pip "$@" ${index[@]+"${index[@]}"} "$wanted"
  fi
}

install_torch() {
  local command=(install --progress-bar off) wanted=$torch
  case $torch in
    cpu) wanted="torch==$default_torch" ;; # any build of it
    in-place) wanted=torch ;;
  esac
  if [ "$torch" != in-place ] && ! { [ "$torch_installed" = "$torch@$torch_index" ] && try checks torch "$wanted"; }; then
    ! try checks horovod || build_for_next_torch
    # Another index or file may have another build of the same version, which pip would not install.
    case $torch_installed in '' | "$torch@$torch_index") ;; *) command+=(--force-reinstall) ;; esac
    get_torch "${command[@]}"
    torch_installed=$torch@$torch_index
    save_settings
    try checks torch "$wanted" || get_torch "${command[@]}" --force-reinstall
  fi
  logged checks torch "$wanted"
}

# Builds Horovod for the new torch in a second environment, so that this one stays usable meanwhile.
build_for_next_torch() {
  say "      building Horovod for it first: until then the environment stays as it is"
  next=$venv.next
  trap 'rm -rf "$next"' EXIT
  logged "$venv/bin/python" -m venv --clear "$next"
  local venv=$next
  get_torch install --progress-bar off
  build_horovod
  rm -rf "$next"
}

build_horovod() {
  local options=()
  [ "$horovod" = release ] || options+=(--source "$horovod")
  case $mpi in yes) options+=(--with-mpi) ;; no) options+=(--without-mpi) ;; esac
  case $nccl in
    yes) options+=(--with-nccl) ;;
    no) options+=(--without-nccl) ;;
    auto) [ "$torch" != cpu ] || has_nvidia_driver || options+=(--without-nccl) ;;
  esac
  find_horovod_wheel
  [ -z "$horovod_wheel" ] || options+=(--wheel "$horovod_wheel")
  bash "$root/env/build_horovod.sh" --python "$venv/bin/python" ${options[@]+"${options[@]}"} </dev/null |
    sed -u 's/^build_horovod: /      /' || exit 1
}

# Sets `horovod_wheel` to the wheel in --wheels for this Python and torch (any torch while there is none), or to ''.
find_horovod_wheel() {
  horovod_wheel=''
  [ "$wheels" != none ] && [ "$horovod" = release ] || return 0
  local version
  version=$(checks torch_version 2>/dev/null | tr -c 'A-Za-z0-9\n' .) || version='*'
  horovod_wheel=$(compgen -G "$wheels/horovod-*+torch$version.k*-$(python_tag)-linux_$(uname -m).whl" | tail -n 1) || true
}
python_tag() { "$venv/bin/python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])'; }

# Sets `files` to pip's arguments for the requirements, and fills the environment's lists, which `up_to_date` compares.
# torch and Horovod must stay as they are. $1: yes if MPI is built in, without which mpi4py is not needed
select_requirements() {
  local skip='^(torch|horovod)\b' extra list=$venv/hvd_bert.requirements version
  [ "$1" = yes ] || skip='^(torch|horovod|mpi4py)\b'
  rm -f "$list"*.txt
  if [ "$locked" = yes ]; then
    # A package takes several lines, all but the last with a backslash.
    sed -E "/$skip/,/[^\\]\$/d" "$root/env/locked/base.txt" >"$list.txt"
    for extra in $extras; do cp "$root/env/locked/$extra.txt" "$list-$extra.txt"; done
    files=("${by_hash[@]}")
  else
    # With --torch-in-place and --wheels, packages that are there need only be new enough.
    if [ "$torch" = in-place ] && [ "$wheels" != none ]; then
      sed -n 's/^mpi4py==/mpi4py>=/p' "$root/requirements.txt"
      sed -n '/^dependencies = \[/,/^\]/s/^ *"\(.*\)",.*/\1/p' "$root/pyproject.toml"
    else
      cat "$root/requirements.txt"
    fi | grep -vE "$skip" >"$list.txt"
    for extra in $extras; do cp "$root/env/requirements-$extra.txt" "$list-$extra.txt"; done
    version=$(version_of torch) || true
    echo "torch${version:+==$version}" >"$venv/hvd_bert.constraints.txt"
    files=(-c "$venv/hvd_bert.constraints.txt")
  fi
  lists=("$list"*.txt)
  files+=("${lists[@]/#/--requirement=}")
}

# Before anything is installed, so that one message has all that --wheels lacks.
check_wheels() {
  [ "$wheels" != none ] || return 0
  local needs=('setuptools>=77' cloudpickle) with_mpi=no missing
  case $torch in in-place) ;; cpu) needs+=("torch==$default_torch") ;; *) needs+=("$torch") ;; esac
  if [ -z "$horovod_wheel" ]; then
    [ "$mpi" = no ] || ! command -v mpicxx >/dev/null || with_mpi=yes
    command -v cmake >/dev/null || needs+=('cmake>=3.18')
    [ "$horovod" != release ] || needs+=("$(sed -n 's/^horovod[^=]*\([^ ]*\).*/horovod=\1/p' "$root/requirements.txt")")
  fi
  select_requirements $with_mpi
  missing=$(checks missing "$wheels" "${needs[@]}" "${lists[@]/#/--requirement=}")
  [ -z "$missing" ] || die "--wheels $wheels: packages for $(python_tag) on $(uname -m) are missing" "${missing//$'\n'/$'\n  '}" \
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
  local get=(download --progress-bar off -d "$download" --find-links "$download") # the torch of --torch-index lies there
  [ "$torch" = in-place ] || get_torch "${get[@]}"
  select_requirements yes
  logged pip "${get[@]}" "${files[@]}"
  logged pip "${get[@]}" --no-deps --no-binary mpi4py "$(mpi4py_requirement)" # match_mpi4py may need it
  logged pip "${get[@]}" wheel build cython # which mpi4py and deepspeed need to be built from source
  say "Done. Copy it, and run there, with the same options: bash env/setup.sh --wheels DIR"
}

install_requirements() {
  local has_mpi=no
  ! try checks horovod MPI || has_mpi=yes
  select_requirements $has_mpi
  logged pip install --progress-bar off "${files[@]}"
  [ $has_mpi = no ] || match_mpi4py
  logged pip install --no-deps --no-build-isolation --config-settings editable_mode=compat -e "$root"
  try pip check || true # for the log
  # Only some CPUs use it, and the others' kernels compute the same.
  [ "$(uname -m)" != x86_64 ] || try "$venv/bin/python" -m hvd_bert.model.cpu.fused || echo "fused.cpp was not compiled" >>"$log"
}

# mpi4py's wheel loads the first libmpi that it finds. Two different ones crash a process.
mpi4py_requirement() { sed -n 's/^\(mpi4py[^ ]*\).*/\1/p' "$root/requirements.txt"; }
match_mpi4py() {
  ! try checks one_mpi || return 0
  say "      mpi4py's wheel does not load the MPI of Horovod: building it from source"
  MPICC=$(command -v mpicc) logged pip install --no-binary mpi4py --no-deps --no-cache-dir --force-reinstall "$(mpi4py_requirement)"
  logged checks one_mpi
}

set_up() {
  local start=$SECONDS
  say "Setting up $venv (details: $log)"
  rm -f "$venv/hvd_bert.ready"
  make_venv
  say "[1/5] Python: $("$venv/bin/python" --version)"
  save_settings # now, so that an interrupted run keeps the options
  find_horovod_wheel
  check_wheels
  provide_system_packages
  say "[2/5] system packages: $(${CXX:-g++} --version 2>/dev/null | head -n 1 | grep . || echo 'no compiler'), $(mpirun_version | grep . || echo 'no MPI')"
  say "[3/5] torch: $torch$(case $torch in torch*) echo ' (a CUDA build is several GB; without GPUs: --torch cpu)' ;; esac)"
  install_torch
  say "[4/5] Horovod for torch $(checks torch_version)$([ "$horovod" = release ] || echo ": $horovod")"
  build_horovod
  say "[5/5] requirements.txt${extras:+ with those for ${extras// /, }} and this package"
  install_requirements
  save_settings
  { show_settings && echo "$inputs"; } >"$venv/hvd_bert.ready"
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
  inputs=$(checksum_inputs) # at the start: if a file changes during a run, the next run must notice
  load_settings             # again, because another run may have changed them
  look_for_mpi_and_cuda
  # A given source of Horovod may have changed.
  if [[ ${given[horovod]:-} != /* ]] && up_to_date; then
    say "Set-up is up to date: $venv"
  else
    if [ "$wheels" != none ]; then
      [ -d "$wheels" ] || die "--wheels $wheels: no such folder" "Name it again, or 'none' to use the package index"
      export PIP_NO_INDEX=1 PIP_FIND_LINKS="file://${wheels// /%20}" # pip splits at spaces
    fi
    : >"$log"
    set_up
  fi
  case $torch$(checks torch_version)$(has_nvidia_driver || echo +cpu) in
    cpu*+cpu) say "Set up for CPUs. For GPUs: bash env/setup.sh --torch $default_torch" ;;
  esac
}

main "$@"; exit # on one line: the file may be changed while it runs
