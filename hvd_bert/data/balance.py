"""Balance: things of different cost are dealt out so that every part holds as many and costs as much.

Costs are whole numbers, so that hosts whose floating-point sums differ in their last bits deal alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]

_CANDIDATES = 32  # of a part's things are tried for a swap: with more in each, the dealing alone is nearly even


def crossover(model: Any) -> int:
    """The length in tokens at which a window's attention costs as many FLOP as all else, by a BERT's config.

    Of n tokens, hidden size h and intermediate size i a layer takes, forward, n * (8 h^2 + 4 h i) FLOP in its
    projections and feed-forward (2 per weight) and 4 h n^2 in the attention (scores and weighted sum): equal at
    n = 2 h + i, 2304 tokens for MiniLM and 4608 for BERT-base. The backward pass takes twice of both.
    """
    return 2 * int(model.hidden_size) + int(model.intermediate_size)


def window_costs(lengths: ArrayLike, crossover: int) -> Ints:
    """The cost of windows of so many tokens: n * (crossover + n), that is the layer's FLOP over 4 h."""
    tokens = np.asarray(lengths, dtype=np.int64)
    return tokens * (crossover + tokens)


def balanced_partition(costs: Ints, parts: int) -> list[Ints]:
    """Indices of `costs` dealt into `parts` lists, each sorted, of equal length and nearly equal cost.

    The lists' lengths differ by at most one, the first being the longer ones. Dealt in snake order from the dearest on;
    then the dearest part swaps with the cheapest the two things that bring them closest, the next dearest with the next
    cheapest and so on, until no such swap helps. A pure function; of equals the first comes first.
    """
    order = np.argsort(-costs, kind="stable")
    held = _snake(order, parts)  # [parts, the most that one holds], -1: nothing
    nothing = held < 0
    each = np.where(nothing, 0, costs[held])
    half, stride = parts // 2, -(-held.shape[1] // _CANDIDATES)
    while half and held.size:
        totals = each.sum(axis=1)
        ranking = np.argsort(-totals, kind="stable")
        most_loaded, least_loaded = ranking[:half], ranking[::-1][:half]
        gap = totals[most_loaded] - totals[least_loaded]
        moved = each[most_loaded, ::stride, None] - each[least_loaded, None, ::stride]
        left = np.abs(gap[:, None, None] - 2 * moved)
        # A thing for nothing would change how many a part holds.
        left[nothing[most_loaded, ::stride, None] | nothing[least_loaded, None, ::stride]] = np.iinfo(np.int64).max
        left = left.reshape(half, -1)
        best = left.argmin(axis=1)
        helps = np.flatnonzero(left[np.arange(half), best] < gap)
        if not len(helps):  # which comes: each swap makes the sum of the totals' squares less
            break
        give, take = (stride * candidate for candidate in np.divmod(best[helps], -(-held.shape[1] // stride)))
        ours, theirs = (most_loaded[helps], give), (least_loaded[helps], take)
        held[ours], held[theirs] = held[theirs], held[ours]
        each[ours], each[theirs] = each[theirs], each[ours]
    held.sort(axis=1)
    return [row[row >= 0] for row in held]


def _snake(order: Ints, parts: int) -> Ints:
    """`order` from part 0 to the last, back to 0, and so on; what is left over goes to the first parts."""
    rows = -(-len(order) // parts)
    table = np.full((rows, parts), -1, dtype=np.int64)
    table.flat[: len(order)] = order
    full = table[: len(order) // parts]
    full[1::2] = full[1::2, ::-1].copy()
    return np.ascontiguousarray(table.T)
