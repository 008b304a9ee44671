"""Implements `build-store`, which fills a store for suffix_lookup from a corpus, so a server need not begin with an
empty store."""

import argparse
import sys
from functools import partial

import numpy as np
from rich.console import Console

from vllm_specplugins.structures.suffix.store_file import StoredText, StoreFile, fingerprint, record, tenant_of
from vllm_specplugins.tools.base_model import load_config, load_tokenizer
from vllm_specplugins.tools.data import answered
from vllm_specplugins.tools.progress import progress
from vllm_specplugins.tools.report import writing

TOKENS_AT_ONCE = 4096  # longest piece of a text


def run(args: argparse.Namespace) -> int:
    tokenizer, vocab_size = load_tokenizer(args.tokenizer), int(load_config(args.tokenizer).vocab_size)
    tenant = b"" if args.cache_salt is None else tenant_of(args.cache_salt)
    records, num_tokens = list[bytes](), 0
    with progress() as bars:
        task = bars.add_task("reading", total=None)
        for sample in answered(args.dataset_path, lambda: tokenizer, vocab_size):
            bars.update(task, advance=1, description=f"reading ({num_tokens:,} tokens so far)")
            ids = np.array(sample.output, np.int32)
            num_tokens += len(ids)
            pieces = np.split(ids, range(TOKENS_AT_ONCE, len(ids), TOKENS_AT_ONCE))
            records += [record(StoredText(True, tenant, piece)) for piece in pieces]
    known = fingerprint(partial(tokenizer.encode, add_special_tokens=False), vocab_size)
    file = StoreFile(args.out, known, vocab_size, sys.maxsize)
    with writing("--out", "file", file.path):  # it replaces an existing store, but no other file
        file.open(replaces=True)  # or the store of another model
        file.clear()
        for data in records:
            file.append(data)
        file.sync()
        file.close()
    Console().print(f"{len(records)} texts of {num_tokens} tokens in {args.out}")
    return 0
