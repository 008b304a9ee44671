"""What `Gate.lengths` does, once it knows the prices."""

from typing import Any

import numpy as np
from numba import types

from vllm_specplugins.proposers.host.records import chance, records_type
from vllm_specplugins.structures.compiled import compiled, inlined

_ints, _table, _real = types.int64[::1], types.float64[:, ::1], types.float64


@inlined
def _worth(row: int, stage: int, sure: float, most: int, price: float, records: Any, worth: Any) -> tuple[float, int]:
    """See gate.worths, of one draft: into `worth` [K]; their sum, and how many tokens pay."""
    survival, total, length = 1.0, 0.0, 0
    for place in range(len(worth)):
        survival *= chance(records, row, stage, sure + place)
        pays = place < most and survival >= price
        worth[place] = survival - price if pays else 0.0
        total += worth[place]
        length += pays
    return total, length


@compiled(
    types.int64(
        *(_ints, _ints, types.int64, types.float64[::1], _ints, types.int64, types.boolean[::1], _real),
        *(_real, _real, _real, types.int64, types.int64, types.boolean, records_type, _table),
    )
)
def choose(
    lengths: Any,
    rows: Any,
    stage: int,
    confidence: Any,
    most: Any,
    rival: int,
    has_rival: Any,
    rival_confidence: float,
    price: float,
    rival_price: float,
    draft_price: float,
    longest: int,
    width: int,
    follows: bool,
    records: Any,
    whole: Any,
) -> int:
    """See Gate.lengths: into `lengths`; how many requests that may have a draft get none.

    Args:
        rival: -1 without one.
        has_rival: [R], or empty: all.
        price, rival_price: of a token of the stage and of the rival's, in tokens.
        draft_price: of drafting one token more for all.
        longest: of the drafts.
        width: K.
        follows: whether a draft that was accepted whole is followed by one twice as long.
        records: of Records.
        whole: of Records.
    """
    worth, other, gains = np.empty(width), np.empty(width), np.zeros(width)
    deepest = 0
    for index in range(len(rows)):
        row = rows[index]
        total, length = _worth(row, stage, confidence[index], most[index], price, records, worth)
        if rival >= 0 and (len(has_rival) == 0 or has_rival[index]):
            rivals, _ = _worth(row, rival, rival_confidence, most[index], rival_price, records, other)
            if rivals > total:
                length = 0
                worth[:] = 0.0
        lengths[index] = length
        deepest = max(deepest, length)
        gains += worth
    depth = 0
    while depth < deepest and gains[depth] >= draft_price:
        depth += 1
    depth, without = min(depth, longest), 0
    for index in range(len(rows)):
        length = min(lengths[index], depth)
        if length == 0 and follows:
            length = min(2 * int(whole[rows[index], stage]), most[index])
        lengths[index] = length
        without += length == 0 and most[index] > 0
    return without
