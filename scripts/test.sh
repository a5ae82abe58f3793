#!/usr/bin/env bash
# Sets up and runs every check: ruff, import-linter, mypy, shellcheck, then the tests in the tiers unit, integration,
# parallel, cluster.
#   bash scripts/test.sh                       all of that
#   bash scripts/test.sh tests/unit -k plan    only pytest, with these arguments
# The tier cluster (docs/guides/cluster.md) needs root and Debian's packages of Slurm, which this installs; it skips
# elsewhere.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash env/setup.sh --dev --deepspeed </dev/null
export PATH="$PWD/.venv/bin:$PATH"
# One thread per process: the tests start up to four ranks, often on two cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
# Nothing in the tests may depend on a network, or on how many GPUs there are.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 CUDA_VISIBLE_DEVICES=""
if [ "$(id -u)" -eq 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

if [ $# -eq 0 ] || [[ $* == *tests/cluster* ]]; then
  bash env/cluster_packages.sh </dev/null || echo "-- without these the tests on two hosts are skipped"
fi
if [ $# -gt 0 ]; then
  exec python -m pytest "$@" </dev/null
fi

check() {
  printf -- '-- %s\n' "$*"
  "$@" </dev/null
}
check ruff check .
check ruff format --check .
check lint-imports
check mypy
mapfile -t shell_scripts < <(git ls-files --cached --others --exclude-standard 2>/dev/null -- '*.sh' '*.slurm' .ci/run |
  grep . || find env scripts .ci -type f \( -name '*.sh' -o -name '*.slurm' -o -name run \))
check shellcheck "${shell_scripts[@]}"
status=0
trap 'exit 130' INT
# Two at a time, for most of the time goes into starting processes; a file's tests stay together, they share runs.
check python -m pytest -n 2 --dist loadfile -m "not alone" tests/unit tests/integration || status=1
check python -m pytest -m alone tests/unit tests/integration || status=1
check python -m pytest tests/parallel tests/cluster || status=1
exit $status
