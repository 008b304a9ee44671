"""What `Gate.lengths` does, once it knows the prices."""

from typing import Any

import numpy as np
from numba import types

from vllm_specplugins.proposers.host.records import chance, records_type
from vllm_specplugins.structures.compiled import compiled, inlined

_ints, _table, _real = types.int64[::1], types.float64[:, ::1], types.float64


@inlined
def _worth(row: int, stage: int, sure: Any, most: int, price: float, records: Any, worth: Any) -> tuple[float, int]:
    """See gate.worths, of one draft: into `worth` [K]; their sum, and how many tokens pay."""
    survival, total, length = 1.0, 0.0, 0
    for place in range(len(worth)):
        survival *= chance(records, row, stage, sure[place])
        pays = place < most and survival >= price
        worth[place] = survival - price if pays else 0.0
        total += worth[place]
        length += pays
    return total, length


@compiled(
    types.int64(
        *(_ints, _ints, types.int64, _table, _ints, types.int64, types.boolean[::1], types.float64[::1]),
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
    rival_confidence: Any,
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
        confidence: [R, K].
        rival: -1 without one.
        has_rival: [R], or empty: all.
        rival_confidence: [K].
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


@inlined
def _candidates(
    row: int,
    stages: Any,
    sure: Any,
    num_found: int,
    stage: int,
    stage_sure: Any,
    most: int,
    room: int,
    price: float,
    records: Any,
    alone: Any,
    behind: Any,
) -> int:
    """How many tokens of a request's draft [K] pay; into `alone` and `behind` [K + 1], what so many tokens of another
    stage are worth by themselves, and behind that draft, with what it is worth."""
    survival, found, kept = 1.0, 0.0, 0
    while kept < num_found:
        next_survival = survival * chance(records, row, stages[kept], sure[kept])
        if next_survival < price:
            break
        survival, kept = next_survival, kept + 1
        found += survival - price
    own = 1.0
    alone[0], behind[0] = 0.0, found
    for place in range(len(alone) - 1):
        own *= chance(records, row, stage, stage_sure[place])
        alone[place + 1], behind[place + 1] = alone[place], behind[place]
        if place < most:
            alone[place + 1] += max(0.0, own - price)
            if place < room - kept:
                behind[place + 1] += max(0.0, survival * own - price)
    return kept


@compiled(
    types.int64(
        *(_ints, _ints, _ints, types.int64[:, ::1], _table, _ints, types.int64, _table, _ints, _ints),
        *(types.boolean, _real, _real, types.int64, _real, records_type, _table),
    )
)
def share(
    kept: Any,
    own: Any,
    rows: Any,
    stages: Any,
    sure: Any,
    num_found: Any,
    stage: int,
    stage_sure: Any,
    most: Any,
    wanted: Any,
    continues: bool,
    price: float,
    draft_price: float,
    longest: int,
    good: float,
    records: Any,
    whole: Any,
) -> int:
    """See Gate.shares: into `kept` and `own`; how many requests that may have a draft get none.

    Args:
        stages, sure, num_found: of the drafts that there are.
        stage_sure: [R, K].
        price: of a token to verify, in tokens.
        draft_price: of drafting one token more of the stage for all.
        longest: of the drafts.
        good: what text that suits a stage may be expected to accept: a draft that was accepted whole is followed by one
            twice as long where that would pay.
        records, whole: of Records.
    """
    width = stages.shape[1]
    shape = len(rows), width + 1
    all_alone, all_behind, lengths, gains = np.empty(shape), np.empty(shape), np.empty_like(rows), np.zeros(width + 1)
    for index in range(len(rows)):
        alone, behind = all_alone[index], all_behind[index]
        lengths[index] = _candidates(
            rows[index],
            stages[index],
            sure[index],
            num_found[index],
            stage,
            stage_sure[index],
            most[index],
            wanted[index] if continues else 0,
            price,
            records,
            alone,
            behind,
        )
        for depth in range(width + 1):
            gains[depth] += max(alone[depth], behind[depth])
    deepest = 0
    for depth in range(1, min(longest, width) + 1):
        if gains[depth] - depth * draft_price > gains[deepest] - deepest * draft_price:
            deepest = depth
    num_following = 0
    for index in range(len(rows)):
        row, alone, behind = rows[index], all_alone[index], all_behind[index]
        is_alone = alone[deepest] > behind[deepest]
        gained = alone if is_alone else behind
        more = 0
        while more < deepest and gained[more + 1] > gained[more]:
            more += 1
        kept[index], own[index] = 0 if is_alone else min(lengths[index], longest), more
        if kept[index] + more == 0:
            if price < good:
                kept[index] = min(2 * int(whole[row, stages[index, 0]]), num_found[index])
            num_following += kept[index] == 0 and whole[row, stage] > 0 and most[index] > 0
    follows, without = num_following * (good - price) > draft_price, 0
    for index in range(len(rows)):
        if kept[index] + own[index] == 0 and follows:
            own[index] = min(2 * int(whole[rows[index], stage]), most[index])
        without += kept[index] + own[index] == 0 and max(num_found[index], most[index]) > 0
    return without
