"""Compares spans with a brute-force memory, in random operations."""

import random

from vllm_specplugins.engine.v2.speculators.token_histories import SpanAllocator


def test_random_operations() -> None:
    """Fails if a place is given to two, if free neighbours are not joined, or the first fit is not taken."""
    rng = random.Random(1)
    for size in (1, 7, 40):
        spans, memory, taken = SpanAllocator(size), [False] * size, []
        for _ in range(3000):
            if taken and rng.random() < 0.5:
                start, length = taken.pop(rng.randrange(len(taken)))
                spans.give_back(start, length)
                memory[start : start + length] = [False] * length
            else:
                length = rng.randint(1, 9)
                fits = [i for i in range(size - length + 1) if not any(memory[i : i + length])]
                start = spans.take(length)
                assert start == (fits[0] if fits else None)
                if fits:
                    taken.append((start, length))
                    memory[start : start + length] = [True] * length
            assert spans.num_free == memory.count(False)
