"""Collation of windows, compared token by token with a reference; prefetching in the batch plan's order."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.data.collate import AHEAD, Collator, Prefetcher
from hvd_bert.data.window_table import WindowTable

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    random = np.random.default_rng(0)
    made = []
    for number in range(12):
        context_start = int(random.integers(3, 7))
        length = context_start + int(random.integers(2, 12))
        answered = number % 3 > 0
        start = context_start if answered else 0
        made.append(
            {
                "input_ids": random.integers(0, 90, length).tolist(),
                "context_start": context_start,
                "start_position": start,
                "end_position": length - 2 if answered else 0,
            }
        )
    return made


@pytest.fixture(scope="module")
def windows(rows) -> WindowTable:
    return WindowTable.from_columns({name: [row[name] for row in rows] for name in rows[0]})


@pytest.mark.parametrize("ids", [[0], [3, 1], list(range(11, -1, -2)), np.arange(12)])
def test_batch(rows, windows, ids):
    chosen = [rows[i] for i in ids]
    lengths = [len(row["input_ids"]) for row in chosen]
    tokens = [(row, position) for row in chosen for position in range(len(row["input_ids"]))]
    batch = Collator(windows, CPU)(ids)
    assert batch.input_ids.tolist() == [[row["input_ids"][position] for row, position in tokens]]
    assert batch.token_type_ids.tolist() == [[int(position >= row["context_start"]) for row, position in tokens]]
    assert batch.position_ids.tolist() == [[position for _, position in tokens]]
    assert batch.starts.tolist() == [rows[i]["start_position"] for i in ids]
    assert batch.ends.tolist() == [rows[i]["end_position"] for i in ids]
    assert batch.lengths == lengths
    assert batch.num_windows == len(ids)
    assert batch.attention_mask is None
    assert batch.cu_seqlens.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert batch.cu_seqlens.dtype == torch.int32  # required by attention kernels
    others = [value for name, value in vars(batch).items() if torch.is_tensor(value) and name != "cu_seqlens"]
    assert {value.dtype for value in others} == {torch.int64}


@pytest.mark.parametrize("ids", [[0], [3, 1], list(range(12))])
@pytest.mark.parametrize("pad_to", [0, 25])
def test_padded_batch(rows, windows, ids, pad_to):
    chosen = [rows[i] for i in ids]
    longest = max(len(row["input_ids"]) for row in chosen)
    width = max(longest, pad_to)
    padded, packed = Collator(windows, CPU, pad_to)(ids), Collator(windows, CPU)(ids)
    assert padded.cu_seqlens is None
    for i, row in enumerate(chosen):
        length = len(row["input_ids"])
        assert padded.input_ids[i].tolist() == row["input_ids"] + [0] * (width - length)
        assert padded.token_type_ids[i, :length].tolist() == [int(p >= row["context_start"]) for p in range(length)]
        assert padded.position_ids[i].tolist() == list(range(width))
        assert padded.attention_mask[i].tolist() == [True] * length + [False] * (width - length)
    for name in ("lengths", "num_windows"):
        assert getattr(padded, name) == getattr(packed, name)
    assert torch.equal(padded.starts, packed.starts)
    assert torch.equal(padded.ends, packed.ends)
    for batch in (padded, packed):
        assert all(value.data_ptr() % 16 == 0 for value in vars(batch).values() if torch.is_tensor(value))


@pytest.mark.parametrize("pad_to", [None, 0])
def test_rank_without_windows_gets_an_uncounted_window(windows, pad_to):
    batch = Collator(windows, CPU, pad_to)([])
    assert (batch.num_windows, batch.num_positions) == (0, 0)
    assert len(batch.lengths) == 1  # without a forward pass, this rank would miss the allreduce
    assert batch.input_ids.shape == (1, batch.lengths[0])


# --- prefetching ---------------------------------------------------------------------------------


@pytest.fixture
def plan() -> BatchPlan:
    lengths = np.arange(10, 32, dtype=np.int32)
    return BatchPlan(lengths, global_batch=8, accumulation=2, size=2, seed=3, crossover=100)


@pytest.mark.parametrize("first", [0, 7])
def test_batches_follow_the_plan(plan, first):
    batches = Prefetcher(plan, lambda ids: ids.tolist(), rank=1, first=first)  # type: ignore[arg-type, return-value]
    for step in range(first, first + 8):
        expected = [ids.tolist() for ids in plan.rank_windows(step, 1)]
        assert list(batches.micro_batches(step)) == expected
    batches.close()


def test_next_batches_are_made_in_the_background(plan):
    made, enough = [], threading.Event()

    def collate(ids: np.ndarray) -> int:
        made.append(threading.current_thread())
        if len(made) == 1 + AHEAD:
            enough.set()
        return len(made)

    batches = Prefetcher(plan, collate, rank=0, first=0)  # type: ignore[arg-type]
    next(batches.micro_batches(0))
    assert enough.wait(30)
    assert threading.main_thread() not in made
    batches.close()


def test_error_of_a_batch_is_raised_when_it_is_requested(plan):
    def broken(ids: np.ndarray) -> None:
        raise OSError("the cache is gone")

    batches = Prefetcher(plan, broken, rank=0, first=0)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="the cache is gone"):
        next(batches.micro_batches(0))
    batches.close()
