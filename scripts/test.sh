#!/usr/bin/env bash
# Sets up and runs the checks: ruff, import-linter, mypy, mkdocs, shellcheck, and the tests in the tiers unit,
# integration, parallel and cluster. Prints the slowest tests and the total time.
#   bash scripts/test.sh                       everything except the campaigns
#   bash scripts/test.sh --quick               before a commit: static checks, most unit tests, one test of a stopped run
#   bash scripts/test.sh --versions            the models' tests with the oldest transformers that pyproject.toml allows
#                                              and with the newest, both from the package index
#   bash scripts/test.sh --full                everything, also the campaigns, which wait for timers, and --versions
#   bash scripts/test.sh tests/unit -k plan    only pytest, with these arguments
# The tier cluster (docs/guides/cluster.md) needs root and Debian's Slurm packages, which this script installs unless
# --no-apt is given. Without root or Debian, the tier is skipped.
set -euo pipefail
case ${1:-} in -h | --help) exec sed -n '2,/^set/s/^# //p' "$0" ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extent=default apt=() words=()
for word in "$@"; do
  if [ "$word" = --no-apt ]; then apt=(--no-apt); else words+=("$word"); fi
done
set -- ${words[@]+"${words[@]}"}
case ${1:-} in --quick | --full | --versions) extent=${1#--} && shift ;; esac

bash env/setup.sh --dev --deepspeed ${apt[@]+"${apt[@]}"} </dev/null
SECONDS=0
export PATH="$PWD/.venv/bin:$PATH"
unset PYTHONDONTWRITEBYTECODE # otherwise each process would compile this package, and each run of pytest all tests
# One thread per process: the tests start up to four ranks, often on two cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
# Clones share this cache, because mypy compares the files' content. Without the cache, mypy takes a minute.
export MYPY_CACHE_DIR="${MYPY_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/hvd_bert-mypy}"
# The tests must not depend on a network or on the number of GPUs.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 CUDA_VISIBLE_DEVICES=""
if [ "$(id -u)" -eq 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

if [ $# -eq 0 ] && [[ $extent != @(quick|versions) ]] || [[ $* == *tests/cluster* ]]; then
  bash env/cluster_packages.sh ${apt[@]+"${apt[@]}"} </dev/null || echo "-- without these the tests on two hosts are skipped"
fi
if [ $# -gt 0 ]; then
  exec python -m pytest "$@" </dev/null
fi

check() {
  printf -- '-- %s\n' "$*"
  "$@" </dev/null
}
status=0
reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
trap 'exit 130' INT
tests() {
  check python -m pytest --durations=20 "$@" || status=1
}
versions() {
  local range requirement folder
  range=$(grep -o 'transformers>=[0-9.]*' pyproject.toml)
  for requirement in "${range/>=/==}" "$range"; do
    folder=$(mktemp -d -p "$reports")
    check python -m pip install --quiet --no-warn-conflicts --target "$folder" "$requirement" || { status=1 && continue; }
    printf -- '-- with %s\n' "$(basename "$folder"/transformers-*.dist-info .dist-info)"
    PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH} tests -n 2 --dist loadfile tests/unit/test_{families,bert,cpu_kernels}.py
  done
}
if [ "$extent" = versions ]; then
  versions
  exit $status
fi
check ruff check .
check ruff format --check .
static_checks() {
  local shell_scripts
  mapfile -t shell_scripts < <(git ls-files --cached --others --exclude-standard 2>/dev/null -- '*.sh' '*.slurm' 'scripts/hvd.*' .ci/run |
    grep . || find env scripts .ci -type f \( -name '*.sh' -o -name '*.slurm' -o -name 'hvd.*' -o -name run \))
  check lint-imports && check shellcheck "${shell_scripts[@]}" && check mypy && check mkdocs build --strict --quiet
}
static_checks >"$reports/checks" 2>&1 & # takes half a minute, while the tests run
checks=$!
campaign='not campaign'
if [ "$extent" = full ]; then campaign='campaign or not campaign'; fi
# Three processes run the tests that do not disturb each other. Each process starts its own test cluster, whose tests
# wait more than they compute. A file's tests run in the same process, because they share runs. The tier with the
# longest files comes first.
if [ "$extent" = quick ]; then
  stopped="tests/integration/test_resume.py::test_signal_to_one_rank_stops_all[mpi-SIGTERM]"
  tests -n 2 --dist loadfile -m "not slow and not campaign" "$stopped" tests/unit
else
  tiers=(tests/parallel tests/cluster tests/integration tests/unit)
  tests -n 3 --dist loadfile --no-loadscope-reorder -m "not alone and ($campaign)" "${tiers[@]}"
  tests -m "alone and ($campaign)" tests/cluster tests/integration
fi
if [ "$extent" = full ]; then versions; fi
wait "$checks" || status=1
cat "$reports/checks"
printf -- '-- %d:%02d minutes without set-up\n' $((SECONDS / 60)) $((SECONDS % 60))
exit $status
