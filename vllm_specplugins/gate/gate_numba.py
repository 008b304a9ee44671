"""Compiled loop of `Gate.split_draft`: how many tokens of each draft pay, given what a token costs."""

from typing import Any

import numpy as np
from numba import types

from vllm_specplugins.gate.ledger_numba import accept_prob, drafts_type, ints, reals, records_type
from vllm_specplugins.structures.compiled import compiled, inlined

GOOD_ACCEPTANCE = 0.75  # what text that suits a stage may be expected to have, whatever the record of other text
_prices_type = types.Tuple((types.float64[::1], types.float64))


@inlined
def _candidates(
    row: int,
    found: Any,
    index: int,
    stage: int,
    confidence: Any,
    most: int,
    room: int,
    prices: Any,
    records: Any,
    alone: Any,
    after: Any,
) -> int:
    """How many tokens of a request's draft [K] pay; into `alone` and `after` [K + 1], what so many tokens of another
    stage gain by themselves, and after that draft, with what it gains."""
    num_found, stages, found_confidence = found
    survival, gain, kept = 1.0, 0.0, 0
    while kept < num_found[index]:
        next_survival = survival * accept_prob(records, row, stages[index, kept], found_confidence[index, kept])
        if next_survival < prices[kept]:
            break
        gain += next_survival - prices[kept]
        survival, kept = next_survival, kept + 1
    own = 1.0
    alone[0], after[0] = 0.0, gain
    for place in range(len(alone) - 1):
        alone[place + 1], after[place + 1] = alone[place], after[place]
        if place < most:
            own *= accept_prob(records, row, stage, confidence[place])
            alone[place + 1] += max(0.0, own - prices[place])
            if place < room - kept:
                after[place + 1] += max(0.0, survival * own - prices[kept + place])
    return kept


@compiled(
    types.void(
        *(ints, ints, ints, drafts_type, types.int64, reals, ints, ints),
        *(_prices_type, types.int64, records_type),
    )
)
def share(
    kept: Any,
    own: Any,
    rows: Any,
    found: Any,
    stage: int,
    confidence: Any,
    most: Any,
    room: Any,
    prices: Any,
    longest: int,
    records: Any,
) -> None:
    """See Gate.split_draft: into `kept` and `own`.

    Args:
        found: drafts that there are.
        confidence: [R, K], of the stage.
        room: [R], tokens up to which the stage may continue drafts; 0 where it only begins some.
        prices: of verifying each token of a draft [K], and of drafting one more of the stage for all, in tokens.
        longest: of the drafts.
        records: of the ledger.
    """
    token_prices, draft_price = prices
    price = token_prices[0]
    whole = records[2]
    max_num_draft = found[1].shape[1]
    shape = len(rows), max_num_draft + 1
    all_alone, all_after, gains = np.empty(shape), np.empty(shape), np.zeros(max_num_draft + 1)
    lengths = np.empty_like(rows)
    for index in range(len(rows)):
        alone, after = all_alone[index], all_after[index]
        own_confidence, its_most, its_room = confidence[index], most[index], room[index]
        lengths[index] = _candidates(
            rows[index], found, index, stage, own_confidence, its_most, its_room, token_prices, records, alone, after
        )
        for depth in range(max_num_draft + 1):
            gains[depth] += max(alone[depth], after[depth])
    deepest = 0
    for depth in range(1, min(longest, max_num_draft) + 1):
        if gains[depth] - depth * draft_price > gains[deepest] - deepest * draft_price:
            deepest = depth
    num_following = 0
    for index in range(len(rows)):
        row, alone, after = rows[index], all_alone[index], all_after[index]
        is_alone = alone[deepest] > after[deepest]
        gained = alone if is_alone else after
        more = 0
        while more < deepest and gained[more + 1] > gained[more]:
            more += 1
        kept[index], own[index] = 0 if is_alone else min(lengths[index], longest), more
        # A draft that was accepted whole is followed by one twice as long, whatever the record says: text changes.
        if kept[index] + more == 0:
            if price < GOOD_ACCEPTANCE:
                kept[index] = min(2 * int(whole[row, found[1][index, 0]]), found[0][index])
            num_following += kept[index] == 0 and whole[row, stage] > 0 and most[index] > 0
    if num_following * (GOOD_ACCEPTANCE - price) > draft_price:
        for index in range(len(rows)):
            if kept[index] + own[index] == 0:
                own[index] = min(2 * int(whole[rows[index], stage]), most[index])
