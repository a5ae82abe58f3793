#!/usr/bin/env bash
# Sets up the environment, trains a small BERT from scratch on the sample with 2 ranks (a minute on 2 idle
# cores), evaluates it on held-out questions, answers some of them, and writes a page about the run.
#   bash scripts/demo.sh                          writes to runs/demo
#   bash scripts/demo.sh --config sample_v2       further flags of the trainer, but not --output_dir
#   bash scripts/demo.sh --no-apt                 as root on Debian: install no system packages
# Without an NVIDIA driver, a new .venv gets torch's CPU build where the package index has one. For GPUs later:
# bash env/setup.sh --torch 2.13.0
set -euo pipefail
case ${1:-} in -h | --help) exec sed -n '2,/^set/s/^# //p' "$0" ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

apt=() flags=()
for word in "$@"; do
  if [ "$word" = --no-apt ]; then apt=(--no-apt); else flags+=("$word"); fi
done

# shellcheck source=env/apt.sh
. env/apt.sh
options=(${apt[@]+"${apt[@]}"})
# An existing environment keeps its torch.
[ -e .venv/hvd_bert.settings ] || has_nvidia_driver || options+=(--torch cpu)
bash env/setup.sh ${options[@]+"${options[@]}"} </dev/null
# Train on the CPU: two ranks would need two GPUs.
export PATH="$PWD/.venv/bin:$PATH" CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
if [ "$(id -u)" -eq 0 ]; then # Open MPI refuses to run as root otherwise
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

case " $* " in *" --config "* | *" --config="*) preset=() ;; *) preset=(--config sample) ;; esac
launcher=(horovodrun -np 2 -H localhost:2)
[ -x .venv/bin/horovodrun ] || launcher=(torchrun --nproc-per-node 2 --no-python) flags=(--strategy ddp ${flags[@]+"${flags[@]}"})
command=("${launcher[@]}" python -m hvd_bert.train
  ${preset[@]+"${preset[@]}"} --output_dir runs/demo --overwrite_output_dir ${flags[@]+"${flags[@]}"})
printf '\n$ %s\n' "${command[*]}"
# Remove times, and the rank tags of horovodrun, because only rank 0 prints.
"${command[@]}" </dev/null 2>&1 | sed -Eu 's/\[[0-9,]*\]<std[a-z]*>://g; s/^[-0-9]{10} [:0-9]{8} INFO //'

command=(hvd-bert predict runs/demo --input hvd_bert/sample/dev-v1.1.json.gz)
printf '\n$ %s\n' "${command[*]}"
"${command[@]}" </dev/null

command=(hvd-bert report runs/demo)
printf '\n$ %s\n' "${command[*]}"
"${command[@]}" </dev/null

cat <<END

Next, after 'source .venv/bin/activate':
  open the page        $PWD/runs/demo/report/report.html
  ask the model        hvd-bert predict runs/demo --context "The Golden Bell was sold in Morbeck." --question "Where was the Golden Bell sold?"
  see all metrics      tensorboard --logdir runs
  list the commands    hvd-bert --help
  use your own data    docs/guides/own-data.md
  use several hosts    docs/guides/cluster.md
END
