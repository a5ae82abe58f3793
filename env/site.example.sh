# shellcheck shell=bash
# What a job needs from this site. Copy to env/site.sh (git ignores it) and adapt; scripts/hvd.slurm and scaling.slurm
# read it on the first node before anything else, and the ranks inherit its environment.

# The modules that env/setup.sh was run with. The names differ from place to place: `module avail`.
module purge
module load gcc/12 openmpi/4.1 cuda/12.8

# The network that ranks on different hosts talk through, when there are several (`ip -br addr`). Checked on each node.
# export HVD_BERT_INTERFACE=ib0

# Local disk of the nodes for the tokenised questions; by default ~/.cache, shared by all nodes.
# export HVD_BERT_CACHE=/local/$USER/hvd_bert

# No hub on the compute nodes: what the login node fetched before.
# export HF_HOME=/scratch/$USER/huggingface HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
