"""The default workload: windows of random tokens, as long as SQuAD's, and a BERT with new weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import BertConfig

from hvd_bert.config.settings import Config, ModelArguments
from hvd_bert.data.sources import squad
from hvd_bert.data.window_table import WindowTable
from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError
from hvd_bert.model.bert import new_model
from hvd_bert.model.families import check_flags, family_of, max_tokens, pad_if_needed
from hvd_bert.model.flops import forward_flops
from hvd_bert.model.loading import load_config, reported
from hvd_bert.tasks.inputs import Inputs, TrainingSet, make_plan, weight_copies
from hvd_bert.tasks.question_answering import QuestionAnswering

# Tokens per window: minimum, deciles and maximum over the 3,889 windows of the first 11 articles of SQuAD v1.1's
# training set, with bert-base-uncased's vocabulary, at most 384 tokens and stride 128.
SQUAD_DECILES = (41, 95, 114, 133, 150, 167, 185, 207, 239, 279, 384)
FIRST_TOKEN = 1000  # tokens below are special or unused in bert-base-uncased's vocabulary


def lengths_like_squad(count: int, longest: int, seed: int) -> NDArray[np.int32]:
    """Lengths of `count` windows, drawn between SQuAD's deciles and clipped to `longest` tokens."""
    places = np.random.Generator(np.random.PCG64(seed)).random(count) * (len(SQUAD_DECILES) - 1)
    drawn = np.interp(places, np.arange(len(SQUAD_DECILES)), SQUAD_DECILES)
    return np.minimum(drawn.astype(np.int32), longest)


def random_windows(lengths: NDArray[np.int32], vocabulary: int, seed: int) -> WindowTable:
    """A window table (`hvd_bert.data.window_table`) without text, with the columns that training reads."""
    rng = np.random.Generator(np.random.PCG64(seed))
    first = min(FIRST_TOKEN, vocabulary - 1)
    starts = rng.integers(1, lengths - 1)
    return WindowTable.from_columns(
        {
            "input_ids": [rng.integers(first, vocabulary, length, dtype=np.int32) for length in lengths],
            "context_start": np.minimum(12, lengths // 2),
            "start_position": starts,
            "end_position": np.minimum(starts + 2, lengths - 1),
        }
    )


def random_inputs(model: str | None, num_windows: int, config: Config, world: World) -> Inputs:
    """Inputs for `train` with new weights. `model`: an encoder's folder or configuration file; None: BERT-base.

    Raises UserError if it is refused.
    """
    args, data = config.train, config.data
    shape = _config_of(model, weight_copies(config, world))
    check_flags(config, shape)
    pad_if_needed(data, shape, family_of(shape).packed)
    lengths = lengths_like_squad(num_windows, min(data.max_seq_length, max_tokens(shape)), args.seed)
    table = random_windows(lengths, shape.vocab_size, args.seed)
    source = squad.from_questions("random windows", [])
    with reported(model or "BERT-base"):
        network = new_model(shape, config.model.dropout, args.seed, padded=data.pad_to is not None)
    plan = make_plan(lengths, args, forward_flops(network).crossover, world)
    return Inputs(None, network, TrainingSet(source, table, plan), None)


def random_task(model: str | None, num_windows: int, config: Config, world: World) -> QuestionAnswering:
    """Question answering with `random_inputs`."""
    return QuestionAnswering(config, world, random_inputs(model, num_windows, config, world))


def _config_of(model: str | None, copies: int) -> Any:
    if model is None:
        return BertConfig()  # its defaults are BERT-base
    if not Path(model).exists():
        raise UserError(f"--model {model}: no such folder or file. Name an encoder's folder or its config.json.")
    return load_config(model, ModelArguments(model_name_or_path=model), copies)
