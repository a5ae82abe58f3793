"""Train a task on all ranks of the world; by default, fine-tune BERT on SQuAD.

    python -m hvd_bert.train --config sample                                 one process
    horovodrun -np 4 -H a100-01:2,a100-02:2 python -m hvd_bert.train         four ranks on two hosts
    srun --mpi=pmix python -m hvd_bert.train                                 every task of a Slurm job

Exit status: `hvd_bert.errors.STATUSES`. Imports torch late, so that --help and a mistyped flag do not wait for it.
Never import this module: that would replace the function `hvd_bert.train`.
"""

if __name__ == "__main__":  # before the other imports, which take seconds
    from hvd_bert.startup import start_command

    start_command()

from hvd_bert.config import command_line
from hvd_bert.startup import start_rank
from hvd_bert.training import api

if __name__ == "__main__":
    start_rank(api.main, command_line.parse)
