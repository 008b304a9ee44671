"""`build-store`: the store that it writes is what a server begins with."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer

from vllm_specplugins.__main__ import main
from vllm_specplugins.config import SuffixLookupConfig
from vllm_specplugins.draft import DraftBatch, ProposerContext
from vllm_specplugins.proposers.suffix_lookup import SuffixLookup

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo" / "model"
K = 5
TEXTS = [f"The {name} of the valley is {7 * place} miles from the sea. " * 3 for place, name in enumerate("abcdefgh")]


def lines(path: Path, *entries: object) -> Path:
    path.write_text("\n".join(map(json.dumps, entries)) + "\n")
    return path


def build(*files: Path, out: Path, extra: tuple[str, ...] = ()) -> int:
    return main(
        ["build-store", "--tokenizer", str(DEMO_MODEL), "--dataset-path", *map(str, files), "--out", str(out), *extra]
    )


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def proposer(tokenizer, path: Path) -> SuffixLookup:
    context = ProposerContext(
        AutoConfig.from_pretrained(DEMO_MODEL).vocab_size, 1024, 1, K,
        tokenize=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )  # fmt: skip
    return SuffixLookup(SuffixLookupConfig(store_bytes=1 << 22, store_path=str(path)), context)


def test_built_and_loaded(tmp_path, tokenizer, capsys):
    """Plain text, JSON lines and chats are drafted from; what a user says in a chat is not. Fails if a form of text is
    lost, the fingerprint is not that of an engine, or users' words go in.
    """
    (tmp_path / "plain.txt").write_text(TEXTS[0])
    texts = lines(tmp_path / "texts.jsonl", {"text": TEXTS[1]})
    chat = [{"role": "user", "content": TEXTS[2]}, {"role": "assistant", "content": TEXTS[3]}]
    chats = lines(tmp_path / "chats.jsonl", {"messages": chat})
    out = tmp_path / "store.bin"
    assert build(tmp_path / "plain.txt", texts, chats, out=out) == 0
    assert "3 texts of" in capsys.readouterr().out
    own = proposer(tokenizer, out)
    assert own.store_stats()["texts"] == 3
    drafts = {}
    for index in range(4):
        ids = np.array(tokenizer.encode(TEXTS[index], add_special_tokens=False), np.int32)
        batch = DraftBatch([str(index)], [ids[:8]], np.array([K], np.int32), [{}])
        draft = own.propose(batch)
        drafts[index] = draft.token_ids[0, : draft.num_draft[0]].tolist() == ids[8 : 8 + K].tolist()
    assert drafts == {0: True, 1: True, 2: False, 3: True}


def test_of_a_tenant(tmp_path, tokenizer):
    """Fails if --cache-salt is not looked at."""
    out = tmp_path / "store.bin"
    assert build(lines(tmp_path / "t.jsonl", {"text": TEXTS[1]}), out=out, extra=("--cache-salt", "team")) == 0
    [text] = proposer(tokenizer, out).store.texts()
    assert len(text.tenant) == 16
