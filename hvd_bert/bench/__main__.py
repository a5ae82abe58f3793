"""How fast it is here: the command's first word chooses what is measured.

    python -m hvd_bert.bench                                                      BERT-base, windows like SQuAD's
    horovodrun -np 4 -H a100-01:2,a100-02:2 python -m hvd_bert.bench --bf16
    srun --mpi=pmix python -m hvd_bert.bench --model FOLDER --json bench.json
    python -m hvd_bert.bench sweep --strategies none,horovod,ddp --ranks 1,2,4    one training after the other

Without a word: the ranks that the launcher starts, in one training (speed.py). `sweep`: no rank itself, it starts them.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["sweep"]:
        from hvd_bert.bench import sweep  # without torch and Horovod, which only the runs need

        sys.exit(sweep.main(sys.argv[2:]))
    from hvd_bert.bench import speed

    speed.start()
