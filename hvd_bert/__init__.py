"""Fine-tunes BERT for question answering (SQuAD) over many ranks with Horovod."""

import sys

__version__ = "0.1.0"

# `python -m hvd_bert.NAME` imports this file first, before it sets sys.argv[0].
if sys.argv[:1] == ["-m"] and any(word.startswith(f"{__name__}.") for word in sys.orig_argv):
    from hvd_bert import interrupt

    interrupt.end_quietly()
