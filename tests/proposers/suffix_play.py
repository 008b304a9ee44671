"""Requests that are played to a suffix lookup without an engine."""

import time

import numpy as np

from vllm_specplugins.config import SuffixLookupConfig
from vllm_specplugins.draft import DraftBatch, ProposerContext
from vllm_specplugins.proposers.suffix_lookup import SuffixLookup
from vllm_specplugins.structures.suffix.store_file import StoreFile, fingerprint

K = 5
TEXT = np.arange(100, 400, dtype=np.int32)


def proposer(tokenize=lambda text: list(text.encode()), context=None, **config):
    context = ProposerContext(1000, 1 << 20, 2, K, tokenize=tokenize, **(context or {}))
    return SuffixLookup(SuffixLookupConfig(**{"store_bytes": 1 << 22, **config}), context)


def texts_of(path, prefix=()):
    """What a file holds that a server may be writing to."""
    return StoreFile(path, fingerprint(lambda text: [*prefix, *text.encode()], 1000), 1000, 1 << 30).read()


def wait_for(what):
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def step(own, histories, options=None, limit=K):
    """Drafts of requests by name, as lists."""
    names = list(histories)
    limits = np.full(len(names), limit, np.int32)
    batch = DraftBatch(names, list(histories.values()), limits, [options or {}] * len(names))
    draft = own.propose(batch)
    return [row[:count].tolist() for row, count in zip(draft.token_ids, draft.num_draft, strict=True)]


def serve(own, name, history, num_prompt, options=None):
    """Runs a request with the output history[num_prompt:], and returns the number of its correctly drafted tokens."""
    right, place = 0, num_prompt + 1
    while place < len(history):
        [draft] = step(own, {name: history[:place]}, options)
        said = history[place : place + len(draft)].tolist()
        right += (accepted := next((i for i, (a, b) in enumerate(zip(draft, said)) if a != b), len(said)))  # noqa: B905
        place += accepted + 1
    step(own, {name: history}, options, limit=0)
    own.forget([name])
    return right
