#!/usr/bin/env bash
# Sets up this clone for the machine's GPUs (builds Horovod with NCCL if needed), then runs the checks of tests/gpu and
# the measurements of benchmarks/gpu_speed.py (docs/evidence/gpu-acceptance.md) in at most 20 minutes. The first set-up
# takes longer: it downloads torch and builds Horovod. Once the packages are installed, no network is needed.
#   bash scripts/gpu_acceptance.sh                      in .venv
#   bash scripts/gpu_acceptance.sh --torch-in-place     with the torch of python3, or of --python PY, in .venv-in-place
#   bash scripts/gpu_acceptance.sh --without-mpi        Horovod with Gloo and NCCL only; --with-mpi requires MPI
#   bash scripts/gpu_acceptance.sh --no-set-up          with python3 (or --python PY), installing nothing
#   bash scripts/gpu_acceptance.sh --device cpu         only the checks that need no GPU
# Prints a table; DIR/gpu_acceptance.json has all figures. All other arguments go to pytest: --out DIR, --minutes N (for
# the checks), --rounds N, --only WORD...
# Exit status: 0 no check failed, 1 a check failed or ran out of time, 2 bad input or failed set-up, 3 no GPU.
set -euo pipefail

device=cuda python='' out='' venv=.venv setup=yes minutes=20 set_up=() words=()
while [ $# -gt 0 ]; do
  case $1 in
    --torch-in-place) venv=.venv-in-place set_up+=("$1") ;;
    --with-mpi | --without-mpi | --no-apt) set_up+=("$1") ;;
    --no-set-up) setup=no ;;
    --python=* | --device=* | --minutes=* | --out=*)
      set -- "${1%%=*}" "${1#*=}" "${@:2}"
      continue
      ;;
    --python | --device | --minutes | --out)
      [ $# -ge 2 ] || { echo "gpu_acceptance: error: $1 needs a value" >&2 && exit 2; }
      printf -v "${1#--}" '%s' "$2"
      shift
      ;;
    *) words+=("$1") ;;
  esac
  shift
done

if [ "$device" = cuda ] && [ ! -e /proc/driver/nvidia/version ] && [ ! -e /dev/nvidiactl ] && ! nvidia-smi -L >/dev/null 2>&1; then
  echo "gpu_acceptance: no GPU: this machine has no NVIDIA driver. --device cpu runs the checks that need no GPU." >&2
  exit 3
fi

# Make paths absolute before the change of folder. Do not resolve links: an environment's python is a link.
[ -z "$out" ] || words+=("--out=$(realpath -ms -- "$out")")
case $python in */*) python=$(realpath -ms -- "$python") ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "$setup" = yes ]; then
  set_up+=(--dev)
  [ "$device" = cpu ] || set_up+=(--with-nccl)
  [ -z "$python" ] || set_up+=(--python "$python")
  bash env/setup.sh --venv "$venv" "${set_up[@]}" </dev/null || exit 2
  python=$venv/bin/python
fi
status=0
# Pass each option as a single word, and -c. Otherwise, pytest would take options' values for folders with tests.
"${python:-python3}" -m pytest -c pyproject.toml tests/gpu benchmarks/gpu_speed.py \
  -q --tb=no --no-summary -p no:cacheprovider \
  "--device=$device" "--minutes=$minutes" ${words[@]+"${words[@]}"} </dev/null || status=$?
case $status in 30) exit 3 ;; 4 | 5) exit 2 ;; 0 | 2) exit "$status" ;; *) exit 1 ;; esac
