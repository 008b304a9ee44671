"""How long a tenant's lookup takes says nothing about what other tenants have in the store."""

import random
import time

import numpy as np
from scipy.stats import mannwhitneyu

from vllm_specplugins.structures.suffix.drafts import Asked
from vllm_specplugins.structures.suffix.requests import SuffixRequests
from vllm_specplugins.structures.suffix.store import SuffixStore

NUM_TRIALS = 1000
NUM_STEPS = 15  # of a trial, whose median counts
NUM_TOKENS = 64  # of what is asked


def trial(store, table, mine, others, text):
    """ns of a step of a request of "me" that ends with text, while "other" has texts of its own."""
    store.clear()  # with another secret, so that no trial depends on where the one before put things
    for tenant, texts in ((b"me", mine), (b"other", others)):
        for one in texts:
            store.enter(tenant, one)
    store.work()
    row = table.add()
    table.search_store(row, store.number(b"me"))
    asked = Asked(text, np.array([row, len(text), 0, len(text), 5]), 0, 0.0)
    times = []
    for _ in range(NUM_STEPS):
        start = time.perf_counter_ns()
        table.step(asked, store.texts)
        times.append(time.perf_counter_ns() - start)
    table.drop(row)
    return sorted(times)[NUM_STEPS // 2]


def pvalue(rng, cases, text):
    """Of the two cases' times having the same distribution: Mann-Whitney, trials in random order."""
    store, table = SuffixStore(1 << 17), SuffixRequests(1 << 16, 1, 5)
    order = [0, 1] * (NUM_TRIALS // 2)
    rng.shuffle(order)
    times = [[], []]
    for case in order:
        times[case].append(trial(store, table, *cases[case], text))
    return mannwhitneyu(*times).pvalue


def test_time_says_nothing():
    """A thousand trials cannot tell whether another tenant's texts are what is asked for; they can where it is our own.

    Fails if owners are neither hashed nor compared: then the other's places are looked at, and the match is long.
    """
    rng, random_ids = random.Random(0), np.random.default_rng(0)

    def texts():
        return [random_ids.integers(0, 1000, 2 * NUM_TOKENS).astype(np.int32) for _ in range(6)]

    mine, strange = texts(), texts()
    text = random_ids.integers(0, 1000, NUM_TOKENS).astype(np.int32)
    known = [np.concatenate([text, one[:NUM_TOKENS]]) for one in strange]
    assert pvalue(rng, [(known, mine), (mine, strange)], text) < 1e-9, "the trials can tell"
    assert pvalue(rng, [(mine, known), (mine, strange)], text) > 1e-4
