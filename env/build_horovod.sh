#!/usr/bin/env bash
# Builds Horovod 0.28.1, its last release, or --source for the torch of a Python environment, and installs it there.
# Independent of this project: the file can be copied and used alone, or with horovod_bf16.patch, without which
# Horovod can't send bf16, and mpirun_process.py, without which horovodrun passes no signals on to mpirun. See --help.
# shellcheck disable=SC2329  # logged() calls functions by name
set -Eeuo pipefail
trap 'echo "build_horovod: error: line $LINENO failed: $BASH_COMMAND" >&2' ERR

release=0.28.1
sdist_sha256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
recipe=3 # raise it with a change of the build, so that older wheels in the cache are not used

usage() {
  cat <<END
usage: build_horovod.sh [option...]

Builds Horovod $release against the torch installed in a Python and installs it into that Python.
The wheel is cached: the next environment with the same torch, MPI, CUDA and compiler takes seconds.

  --python PY           the Python that has torch (default: python3)
  --cache DIR           folder for cached wheels (default: \${XDG_CACHE_HOME:-~/.cache}/hvd_bert/wheels)
  --rebuild             build even if the cache has the wheel
  --with-mpi            fail if MPI can't be built in;    --without-mpi   build without MPI
                        (default: MPI if mpicxx is found)
  --with-nccl           fail if NCCL can't be built in;   --without-nccl  build without NCCL
                        (default: NCCL if torch is a CUDA build and nvcc is found)
  --cuda-home DIR       folder of the CUDA toolkit (default: \$CUDA_HOME, else nvcc's toolkit)
  --nccl-home DIR       folder with include/nccl.h and lib/libnccl.so* (default: torch's NCCL)
  --cuda-arch LIST      GPU architectures, such as 80,90 (default: those that torch and nvcc support)
  --cxx-std N           C++ standard (default: the one in torch's CMake files)
  --jobs N              number of parallel compilers (default: by cores and memory)
  --source PATH         another Horovod: an unpacked tree with its submodules, or a tar archive of one. The tree is
                        copied, not changed (default: release $release from the package index)
  --wheel FILE          install this wheel of an earlier build if it works here, build nothing
  --download DIR        only download the source and the tools to DIR, for a build without a network
  --dry-run             only print what would be built
  -h, --help            print this help
CXX, CXXFLAGS, LDFLAGS and HOROVOD_CPU_OPERATIONS are used, and are part of the cache key.
END
}

say() { printf 'build_horovod: %s\n' "$*"; }
warn() { printf 'build_horovod: warning: %s\n' "$*" >&2; }
die() {
  printf 'build_horovod: error: %s\n' "$1" >&2
  shift
  [ $# -eq 0 ] || printf '  %s\n' "$@" >&2
  exit 1
}

parse_arguments() {
  python=python3
  cache=${XDG_CACHE_HOME:-${HOME:?HOME is not set: use --cache DIR}/.cache}/hvd_bert/wheels
  rebuild=no mpi=auto nccl=auto cuda_home='' nccl_home='' cuda_arch='' cxx_std='' jobs='' source='' wheel='' download='' dry_run=no
  while [ $# -gt 0 ]; do
    case $1 in
      --python | --cache | --cuda-home | --nccl-home | --cuda-arch | --cxx-std | --jobs | --source | --wheel | --download)
        [ $# -ge 2 ] || die "$1 needs a value (see --help)"
        local name=${1#--}
        printf -v "${name//-/_}" '%s' "$2"
        shift
        ;;
      --rebuild) rebuild=yes ;;
      --with-mpi) mpi=yes ;;
      --without-mpi) mpi=no ;;
      --with-nccl) nccl=yes ;;
      --without-nccl) nccl=no ;;
      --dry-run) dry_run=yes ;;
      -h | --help) usage && exit 0 ;;
      *) die "unknown argument $1 (see --help)" ;;
    esac
    shift
  done
}

# Reads the facts about Python and torch that the build needs, as name=value lines.
inspect_python() {
  command -v "$python" >/dev/null || die "no such Python: $python"
  py_soabi='' py_scripts='' py_include='' py_libc=''
  torch_version='' torch_git='' torch_cuda='' torch_std='' torch_arches='' torch_nccl=''
  local facts
  facts=$("$python" - 2>&1 <<'END'
import importlib.util, pathlib, platform, re, sys, sysconfig
if importlib.util.find_spec("torch") is None:
    sys.exit("torch is not installed in " + sys.executable)
import torch
root = pathlib.Path(torch.__file__).parent
standards = []
for name, pattern in (("share/cmake/Torch/TorchConfig.cmake", r"CXX_STANDARD (\d\d)"),
                      ("utils/cpp_extension.py", r"-std=c\+\+(\d\d)")):
    if (root / name).is_file() and not standards:
        standards = [int(n) for n in re.findall(pattern, (root / name).read_text())]
nccl = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
try:
    arches = re.findall(r"\bsm_(\d+)\b", torch._C._cuda_getArchFlags() or "")
except AttributeError:
    arches = []
print("py_soabi=" + str(sysconfig.get_config_var("SOABI")))
print("py_scripts=" + sysconfig.get_path("scripts"))
print("py_include=" + sysconfig.get_path("include"))
print("py_libc=" + "-".join(platform.libc_ver()))
print("torch_version=" + torch.__version__)
print("torch_git=" + str(torch.version.git_version))
print("torch_cuda=" + (torch.version.cuda or ""))
print("torch_std=" + str(max(standards, default="")))
print("torch_arches=" + " ".join(arches))
print("torch_nccl=" + (list(nccl.submodule_search_locations)[0] if nccl else ""))
END
  ) || die "$python can't be built for: ${facts##*$'\n'}" "Install torch there first: $python -m pip install torch==2.13.0"
  local line
  while IFS= read -r line; do
    case $line in py_*=* | torch_*=*) printf -v "${line%%=*}" '%s' "${line#*=}" ;; esac
  done <<<"$facts"
}

choose_compiler() {
  [ -f "$py_include/Python.h" ] || die "Python's headers are missing ($py_include/Python.h)" \
    "Debian or Ubuntu: apt-get install python3-dev    RHEL or Rocky: dnf install python3-devel"
  cxx=${CXX:-g++}
  command -v "${cxx%% *}" >/dev/null || die "no C++ compiler: $cxx" \
    "Debian or Ubuntu: apt-get install g++ make    RHEL or Rocky: dnf install gcc-c++ make    a cluster: module load gcc"
  command -v make >/dev/null || die "make is missing" "Debian or Ubuntu: apt-get install make    RHEL or Rocky: dnf install make"
  cxx_std=${cxx_std:-$torch_std}
  [ -n "$cxx_std" ] || die "the C++ standard of torch $torch_version is unknown" "Set it: --cxx-std 17 (torch 2.1+) or --cxx-std 20"
  # shellcheck disable=SC2086  # CXX may contain options, as for make
  cxx_identity="$($cxx --version | head -n 1) $($cxx -dumpmachine)"
  # shellcheck disable=SC2086
  echo 'int main() { return 0; }' | $cxx "-std=c++$cxx_std" -fsyntax-only -x c++ - 2>/dev/null ||
    die "this compiler does not support C++$cxx_std, which torch $torch_version needs: $cxx_identity" \
      "Use a newer one (g++ 11 or later supports C++20) by CXX=/path/to/g++, 'module load gcc/12' or 'dnf install gcc-toolset-12'," \
      "or an older torch (2.8 needs C++17 only)."
}

# Name and version of the MPI that mpirun belongs to. MPICH's mpirun prints its version on the second line.
mpirun_version() { mpirun --version 2>/dev/null | sed '/^HYDRA/d; s/^ *Version: */MPICH /; q' || true; }

choose_mpi() {
  mpi_identity=none
  [ "$mpi" != no ] || return 0
  if ! command -v mpicxx >/dev/null; then
    [ "$mpi" = auto ] || die "MPI was requested, but mpicxx is not on PATH" \
      "Debian or Ubuntu: apt-get install libopenmpi-dev openmpi-bin    a cluster: module load openmpi"
    mpi=no
    return 0
  fi
  mpi=yes
  mpi_identity="$(mpicxx -show) | $(mpicxx --showme:version 2>/dev/null || mpirun_version)"
}

# Sets the toolkit's folder. nvcc may be a link or a script elsewhere, so nvcc itself is queried.
find_cuda_home() {
  cuda_home=${cuda_home:-${CUDA_HOME:-${CUDA_PATH:-}}}
  if [ -z "$cuda_home" ] && command -v nvcc >/dev/null; then
    cuda_home=$(nvcc --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p' | head -n 1) || true
  fi
  [ -n "$cuda_home" ] || { [ ! -x /usr/local/cuda/bin/nvcc ] || cuda_home=/usr/local/cuda; }
  [ -z "$cuda_home" ] || cuda_home=$(realpath -m "$cuda_home")
  if [ -x "$cuda_home/bin/nvcc" ]; then
    nvcc_version=$("$cuda_home/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
  fi
}

choose_nccl() {
  nccl_identity=none nvcc_version=''
  [ "$nccl" != no ] || return 0
  if [ -z "$torch_cuda" ]; then
    [ "$nccl" = auto ] || die "NCCL was requested, but torch $torch_version is not a CUDA build"
    nccl=no
    return 0
  fi
  find_cuda_home
  if [ -z "$nvcc_version" ]; then
    [ "$nccl" = auto ] || die "NCCL was requested, but no nvcc was found" "Load a CUDA ${torch_cuda%%.*} toolkit (module load cuda/$torch_cuda) or set CUDA_HOME to one."
    warn "torch $torch_version is a CUDA build, but nvcc was not found: Horovod is built without NCCL and can't train on GPUs."
    warn "For GPUs, load a CUDA ${torch_cuda%%.*} toolkit (module load cuda/$torch_cuda) and rerun this script."
    nccl=no
    return 0
  fi
  [ "${nvcc_version%%.*}" = "${torch_cuda%%.*}" ] ||
    die "torch $torch_version is for CUDA $torch_cuda, but nvcc in $cuda_home is $nvcc_version: the major versions must be equal" \
      "Load a CUDA ${torch_cuda%%.*} toolkit (module load cuda/$torch_cuda) or set CUDA_HOME to one," \
      "or install a torch for CUDA ${nvcc_version%%.*}, or build without GPUs: --without-nccl."
  nccl_home=${nccl_home:-${HOROVOD_NCCL_HOME:-$torch_nccl}}
  [ -f "$nccl_home/include/nccl.h" ] || die "no NCCL headers: '$nccl_home/include/nccl.h'" "Set the folder: --nccl-home DIR"
  nccl_library=$(find -L "$nccl_home/lib" "$nccl_home/lib64" -maxdepth 1 -name 'libnccl.so*' 2>/dev/null | sort | tail -n 1) || true
  [ -n "$nccl_library" ] || die "no libnccl.so* in $nccl_home/lib" "Set the folder: --nccl-home DIR"
  nccl=yes
  cuda_arch=${cuda_arch:-${HOROVOD_BUILD_CUDA_CC_LIST:-$(common_arches)}}
  nccl_identity="NCCL $(sed -n 's/^#define NCCL_VERSION_CODE *//p' "$nccl_home/include/nccl.h") CUDA $nvcc_version sm $cuda_arch"
}

# Prints the architectures that torch was built for and this nvcc supports; 80,90 if there are none.
common_arches() {
  local known arch list=''
  known=" $("$cuda_home/bin/nvcc" --list-gpu-code 2>/dev/null | tr '\n' ' ') "
  for arch in $torch_arches; do
    case $known in *" sm_$arch "*) list+="${list:+,}$arch" ;; esac
  done
  echo "${list:-80,90}"
}

# Sets the version and the SHA-256 of the source. Of --source it also reads, or unpacks, the tree.
open_source() {
  horovod_version=$release source_sha256=$sdist_sha256 source_dir=''
  [ -n "$source" ] || return 0
  if [ -d "$source" ]; then
    source_dir=$source
    source_sha256=$(tar -C "$source" --exclude=.git --exclude=./build --sort=name --mtime=@0 --owner=0 --group=0 -cf - . | sha256sum)
  elif [ -f "$source" ]; then
    source_dir=$work/unpacked
    mkdir "$source_dir"
    tar -xf "$source" -C "$source_dir" --strip-components=1 || die "--source $source: not a tar archive"
    source_sha256=$(sha256sum "$source")
  else
    die "--source $source: no such file or folder"
  fi
  source_sha256=${source_sha256%% *}
  horovod_version=$(sed -n "s/^__version__ = '\(.*\)'$/\1/p" "$source_dir/horovod/__init__.py" 2>/dev/null) || true
  [ -n "$horovod_version" ] || die "--source $source: no Horovod source (horovod/__init__.py has no __version__)"
  [ -f "$source_dir/third_party/gloo/CMakeLists.txt" ] ||
    die "--source $source: third_party/gloo is empty. GitHub's own archives lack the submodules" \
      "Use a clone: git clone --recursive https://github.com/horovod/horovod, then git checkout --recurse-submodules COMMIT"
}

# Looks for the patch next to this file. Without it or the program `patch`, Horovod is built without bf16.
find_patch() {
  bf16_patch=$here/horovod_bf16.patch bf16_missing='' bf16_identity=no
  if [ ! -f "$bf16_patch" ]; then
    bf16_missing="$bf16_patch is missing"
  elif ! command -v patch >/dev/null; then
    bf16_missing="the program 'patch' is missing"
  else
    bf16_identity=$(sha256sum <"$bf16_patch" | cut -c 1-16)
  fi
}

# Collects everything that distinguishes wheels. The hash of it names the wheel.
compute_key() {
  local flag arch_flags=''
  for flag in f16c avx fma; do
    grep -qsw -m 1 "$flag" /proc/cpuinfo && arch_flags+="-m$flag "
  done
  arch_flags=${HOROVOD_BUILD_ARCH_FLAGS:-$arch_flags}
  build_arch_flags=$arch_flags
  key_text="recipe $recipe
Horovod $horovod_version $source_sha256
Python $py_soabi, $py_libc, $(uname -m)
torch $torch_version (${torch_cuda:+CUDA $torch_cuda, }$torch_git)
compiler $cxx_identity, C++$cxx_std, ${arch_flags:-no -m flags}
flags CXXFLAGS='${CXXFLAGS:-}' LDFLAGS='${LDFLAGS:-}' HOROVOD_CPU_OPERATIONS='${HOROVOD_CPU_OPERATIONS:-}'
MPI $mpi_identity
NCCL $nccl_identity
Gloo yes
bf16 $bf16_identity$([ -f "$here/mpirun_process.py" ] || echo ', horovodrun passes no signals on')"
  key=$(printf '%s' "$key_text" | sha256sum | cut -c 1-16)
  # The key is part of the version, so that 'pip list' and the next run show which build is installed.
  local_version="torch$(tr -c 'A-Za-z0-9\n' . <<<"$torch_version").k$key"
  features="PyTorch $torch_version, Gloo$([ "$mpi" = no ] || echo ', MPI')$([ "$nccl" = no ] || echo ', NCCL')"
}

# They stay installed, because Horovod needs them too: setuptools for the distutils that Python 3.12 lacks.
tools=('setuptools>=77' packaging cloudpickle psutil pyyaml)
install_tools() { "$python" -m pip install -q "${tools[@]}"; }

# cmake 4 builds Horovod's bundled Gloo only with this variable, which older ones ignore.
provide_cmake() {
  export CMAKE_POLICY_VERSION_MINIMUM=3.5
  local version
  version=$(cmake --version 2>/dev/null | sed -n 's/^cmake version \([0-9.]*\).*/\1/p') || true
  [ "$(printf '%s\n' "$version" 3.18 | sort -V | head -n 1)" != 3.18 ] || return 0
  "$python" -m pip install -q --target "$work/tools" 'cmake>=3.18'
  export PATH="$work/tools/bin:$PATH" PYTHONPATH="$work/tools${PYTHONPATH:+:$PYTHONPATH}"
}

# $1: a folder
download_source() {
  printf 'horovod==%s --hash=sha256:%s\n' "$release" "$sdist_sha256" |
    "$python" -m pip download -q --no-deps --no-build-isolation --no-binary :all: -d "$1" -r /dev/stdin
}

# Provides a copy of the source that may be changed, in $work/source.
unpack_source() {
  mkdir "$work/source"
  if [ -n "$source_dir" ]; then
    tar -C "$source_dir" --exclude=.git --exclude=./build -cf - . | tar -C "$work/source" -xf -
    return 0
  fi
  download_source "$work"
  tar -xzf "$work/horovod-$release.tar.gz" -C "$work/source" --strip-components=1
}

# Applies the patches to the tree $1 that it still needs, and prints which it does not need. Only prints in a dry run.
patch_source() {
  # Gloo has the standard of the first file. With another one than the rest, it does not link.
  local own_std file
  own_std=$(for file in "$1/CMakeLists.txt" "$1/horovod/torch/CMakeLists.txt"; do
    sed -n 's/^ *set(CMAKE_CXX_STANDARD \([0-9]*\)).*/\1/p' "$file" | sort -n | tail -n 1
  done | sort -n | head -n 1)
  std_flag=''
  if [ "${own_std:-0}" -ge "$cxx_std" ]; then
    not_patched "C++$cxx_std" "already there"
  else
    std_flag=" -std=c++$cxx_std"
    patched "C++$cxx_std instead of C++${own_std:-?}"
  fi
  if [ "$nccl" = no ]; then
    # A CUDA torch, or just an nvcc on PATH, would pull CUDA into a build without NCCL.
    # shellcheck disable=SC2016  # ${Pytorch_CUDA} is CMake's
    replace_line "torch without CUDA" "$1/cmake/Modules/FindPytorch.cmake" \
      'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)' 'set(Pytorch_CUDA FALSE)' || true
    replace_line "nvcc left out" "$1/CMakeLists.txt" '    enable_language(CUDA)' '    message(STATUS "CUDA is left out")' || true
  fi
  replace_line "cffi, which Horovod does not use, is not required" "$1/setup.py" \
    "    require_list.append('cffi>=1.4.0')" '    pass  # cffi is not used' || true
  # Over MPI, horovodrun becomes a shell that waits for mpirun. A signal ends that shell only, and the ranks continue.
  # The patched horovodrun waits for mpirun itself, and passes signals on.
  if [ ! -f "$here/mpirun_process.py" ]; then
    not_patched "horovodrun passes signals on" "$here/mpirun_process.py is missing"
  elif replace_line "horovodrun passes signals on" "$1/horovod/runner/mpi_run.py" \
    "        os.execve('/bin/sh', ['/bin/sh', '-c', mpirun_command], env)" \
    '        from horovod.runner.mpirun_process import run; sys.exit(run(mpirun_command, env))'; then
    [ "$dry_run" = yes ] || cp "$here/mpirun_process.py" "$1/horovod/runner/"
  fi
  if [ -n "$bf16_missing" ]; then
    not_patched "bf16 in allreduce" "$bf16_missing"
  elif ! patch -d "$1" -p1 -s -f --fuzz=0 --dry-run <"$bf16_patch" >/dev/null; then
    not_patched "bf16 in allreduce" "${bf16_patch##*/} does not fit this source"
  else
    patched "bf16 in allreduce"
    [ "$dry_run" = yes ] || patch -d "$1" -p1 -s -f --fuzz=0 <"$bf16_patch"
  fi
}

# $1: what it is for; $2: file; $3: its line; $4: the new line. Fails if there is nothing to replace.
replace_line() {
  if grep -qsxF -- "$4" "$2"; then
    not_patched "$1" "already there"
    return 1
  elif ! grep -qsxF -- "$3" "$2"; then
    not_patched "$1" "${2##*/} of this source has no line '${3#"${3%%[! ]*}"}'"
    return 1
  fi
  patched "$1"
  [ "$dry_run" = no ] || return 0
  "$python" - "${@:2}" <<'END'
import pathlib, sys
path, old, new = pathlib.Path(sys.argv[1]), *sys.argv[2:]
path.write_text(path.read_text(encoding="utf-8").replace(f"{old}\n", f"{new}\n"), encoding="utf-8")
END
  grep -qxF -- "$4" "$2" || die "$2 cannot be changed"
}
patched() { [ -z "$source" ] || say "patch: $1"; }
not_patched() { say "no patch: $1: $2"; }

# Horovod's CMake files set C++14 and drop any -std from CXXFLAGS. The last -std on the line wins, so a compiler
# wrapper that adds its own needs no change to these files; newer sources may have a standard that is new enough.
# -g0: 1 MB instead of 77 MB.
# nvcc calls the same compiler with its own standard, so its calls are not changed.
make_compiler_wrapper() {
  local link=''
  # shellcheck disable=SC2016  # $ORIGIN is for the loader, which finds torch's NCCL next to this package
  [ "$nccl" = no ] || link=' -Wl,-rpath,\$ORIGIN/../../nvidia/nccl/lib'
  cat >"$work/c++" <<END
#!/bin/sh
case "\$*" in
  *-D__CUDA* | *-D__NVCC* | *-DFATBINFILE*) exec $cxx "\$@" ;;
esac
exec $cxx "\$@"$std_flag -g0$link
END
  chmod +x "$work/c++"
}

provide_nccl() {
  mkdir -p "$work/nccl/lib"
  ln -s "$nccl_home/include" "$work/nccl/include"
  ln -s "$nccl_library" "$work/nccl/lib/libnccl.so"
  ln -s "$nccl_library" "$work/nccl/lib/libnccl.so.2"
  export CUDA_HOME=$cuda_home HOROVOD_CUDA_HOME=$cuda_home PATH="$cuda_home/bin:$PATH"
  export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_HOME=$work/nccl HOROVOD_NCCL_LINK=SHARED HOROVOD_BUILD_CUDA_CC_LIST=$cuda_arch
}

count_jobs() {
  local cores memory_gib
  cores=$(nproc)
  memory_gib=$(awk '/^MemAvailable/ { print int($2 / 1048576) }' /proc/meminfo)
  local by_memory=$((memory_gib / 2)) # one of torch's translation units takes up to 2 GiB
  [ "$by_memory" -ge 1 ] || by_memory=1
  echo $((cores < by_memory ? cores : by_memory))
}

build_wheel() {
  local name
  for name in $(compgen -e HOROVOD_ || true); do # keep only the variables of this script
    case $name in HOROVOD_CPU_OPERATIONS) ;; *) unset "$name" ;; esac
  done
  make_compiler_wrapper
  [ "$nccl" = no ] || provide_nccl
  export PATH="$py_scripts:$PATH" CXX="$work/c++" MAKEFLAGS="-j${jobs:-$(count_jobs)}"
  export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1
  if [ "$mpi" = yes ]; then export HOROVOD_WITH_MPI=1; else export HOROVOD_WITHOUT_MPI=1; fi
  [ -z "$build_arch_flags" ] || export HOROVOD_BUILD_ARCH_FLAGS=$build_arch_flags
  provide_cmake
  export HOROVOD_LOCAL_VERSION=$local_version # only now: pip refuses an archive with another version
  "$python" -m pip wheel -v --no-deps --no-build-isolation --no-cache-dir -w "$work/wheel" "$work/source"
}

# Moves the wheel into the cache by one rename, so that another run never finds half of it.
publish_wheel() {
  mkdir "$work/publish"
  mv "$work"/wheel/horovod-*.whl "$work/publish/"
  printf '%s\n' "$key_text" >"$work/publish/BUILD.txt"
  [ "$rebuild" = no ] || rm -rf "${cache:?}/$key"
  mv -T "$work/publish" "$cache/$key" 2>/dev/null || [ -f "$cache/$key/BUILD.txt" ]
}

logged() {
  # Not 'if "$@"': inside a condition the shell ignores 'set -e' and would miss a failed step.
  local status errors trap_on_error
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
  [ $status -ne 0 ] || return 0
  errors=$(grep -nE -A 4 'CMake Error|[Ee]rror: |fatal' "$log" | head -n 20) || true
  tail -n 20 "$log" >&2
  [ -z "$errors" ] || printf 'The first errors in the log:\n%s\n' "$errors" >&2
  die "$1 failed (status $status); above are the last lines and the first errors of $log"
}

lock_cache() {
  command -v flock >/dev/null || return 0
  exec 9>"$cache/$key.lock"
  flock -n 9 || {
    say "another run is building the same wheel: waiting for it"
    flock 9 || warn "$cache does not support locks: continuing without one"
  }
}

build_and_publish() {
  if [ "$rebuild" = no ] && [ -f "$cache/$key/BUILD.txt" ]; then
    say "the wheel is in the cache: $cache/$key"
    return 0
  fi
  logged install_tools
  logged unpack_source
  patch_source "$work/source"
  say "building for $features, C++$cxx_std; about 5 minutes on 2 cores; log: $log"
  local start=$SECONDS
  logged build_wheel
  logged publish_wheel
  say "built in $((SECONDS - start)) s: $cache/$key"
}

# $1: a wheel of Horovod
install_wheel() {
  logged install_tools
  logged "$python" -m pip install -q --no-deps --force-reinstall "$1"
}

# A build does not report a missing part, so this checks both of Horovod's own lists.
# $1: what is checked; then what to do if it fails
check_build() {
  local report wanted missing=''
  report=$("$py_scripts/horovodrun" --check-build 2>&1) || die "$1 is installed, but horovodrun --check-build fails:" "$report" "${@:2}"
  wanted="PyTorch Gloo$([ "$mpi" != yes ] || echo ' MPI')$([ "$nccl" != yes ] || echo ' NCCL')"
  local part
  for part in $wanted; do
    grep -qF "[X] $part" <<<"$report" || missing+=" $part"
  done
  local built
  built=$("$python" - 2>&1 <<'END'
import horovod.torch as hvd
found = {"Gloo": hvd.gloo_built(), "MPI": hvd.mpi_built(), "NCCL": hvd.nccl_built()}
print("built:", *(name for name, there in found.items() if there), "")
END
  ) || die "$1 is installed, but can't be imported:" "$built" "${@:2}"
  built=$(grep '^built: ' <<<"$built")
  for part in ${wanted#PyTorch }; do
    case " $built " in *" $part "*) ;; *) missing+=" $part(import)" ;; esac
  done
  [ -z "$missing" ] || die "$1 was built without:$missing" "$report" "${@:2}"
}

installed_version() {
  "$python" -c 'import importlib.metadata as m; print(m.version("horovod"))' 2>/dev/null || true
}

main() {
  parse_arguments "$@"
  if [ -n "$download" ]; then
    install_tools # pip asks setuptools for the name of a source
    "$python" -m pip download -q -d "$download" pip "${tools[@]}" 'cmake>=3.18'
    download_source "$download"
    return 0
  fi
  inspect_python
  [ "$dry_run" = yes ] || { mkdir -p "$cache" && cache=$(cd "$cache" && pwd); }
  if [ -n "$wheel" ]; then
    log=$cache/wheel.log
    : >"$log"
    install_wheel "$wheel"
    check_build "$wheel" "To build Horovod here instead, remove this wheel, and rerun."
    say "installed, not built: ${wheel##*/}"
    return 0
  fi
  choose_compiler
  choose_mpi
  choose_nccl
  work=$(if [ "$dry_run" = yes ]; then mktemp -d; else mktemp -d "$cache/.build.XXXXXX"; fi)
  trap 'rm -rf "$work"' EXIT
  open_source
  find_patch
  compute_key
  if [ "$dry_run" = yes ]; then
    printf '%s\nkey %s\n' "$key_text" "$key"
    [ -z "$source" ] || patch_source "$source_dir"
    exit 0
  fi
  log=$cache/$key.log
  if [ "$rebuild" = no ] && [ "$(installed_version)" = "$horovod_version+$local_version" ]; then
    check_build Horovod
    say "already installed: Horovod $horovod_version for $features"
    return 0
  fi
  lock_cache
  : >"$log"
  build_and_publish
  install_wheel "$cache/$key"/horovod-*.whl
  check_build Horovod
  say "installed: Horovod $horovod_version for $features"
}

main "$@"; exit # on one line: the file may be changed while it runs
