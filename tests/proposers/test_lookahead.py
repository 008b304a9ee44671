"""Compares windows and pools of lookahead decoding with Python lists, and simulates a target of a few lines."""

import random
from typing import Any

import pytest
import torch
from vllm_specplugins.kernels.trees import walk
from vllm_specplugins.kernels.trees.reference import ancestors

from vllm_specplugins.config import ConfigError, LookaheadConfig
from vllm_specplugins.draft import ProposerContext
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.proposers import lookahead
from vllm_specplugins.proposers.lookahead import Lookahead

CONFIG = LookaheadConfig(window=3, ngram=3, guesses=2)


def new(config: LookaheadConfig = CONFIG, num_slots: int = 4) -> Lookahead:
    return Lookahead(config, ProposerContext(99, 99, num_slots, config.num_nodes, lambda text: []))


class Listed:
    """One request's window and pool as lists: levels of columns, and n-grams, the newest last."""

    def __init__(self, config: LookaheadConfig, text: list[int]):
        self.config, self.pool = config, list[list[int]]()
        size = (config.ngram - 1) * config.window
        cells = (text[-size:] * size)[:size]
        self.levels = [cells[at : at + config.window] for at in range(0, size, config.window)]
        for at in range(len(text) - config.ngram + 1):
            self.put(text[at : at + config.ngram], keeps=True)

    def put(self, ngram: list[int], keeps: bool = False) -> None:
        self.pool = [other for other in self.pool if keeps or other != ngram] + [ngram]

    def tree(self, newest: int, chain: list[int]) -> dict[tuple[int, ...], set[int]]:
        """The tokens after each path, of the chain, the window and the guesses."""
        config, paths = self.config, [chain]
        self.levels[0][0] = newest
        room = config.num_nodes - len(chain)
        if room >= config.num_window:
            room -= config.num_window
            first = self.levels[0][1:]
            paths += [first[:column] + [level[column] for level in self.levels[1:]] for column in range(config.window)]
            paths.append(first)
        guesses = [ngram[1:] for ngram in reversed(self.pool) if ngram[0] == newest][: config.guesses]
        for guess in guesses:
            paths.append(guess[: max(0, room)])
            room -= len(guess)
        nodes: dict[tuple[int, ...], set[int]] = {}
        for path in paths:
            for at, token in enumerate(path):
                nodes.setdefault(tuple(path[:at]), set()).add(token)
        return nodes

    def read(self, drawn: list[int]) -> None:
        levels = [*self.levels, drawn]
        for column in range(self.config.window):
            self.put([level[column] for level in levels])
        self.levels = levels[1:]


def paths_of(tokens: list[int], parents: list[int], hides_zero: bool = True) -> dict[tuple[int, ...], set[int]]:
    path: list[tuple[int, ...]] = [()]
    nodes: dict[tuple[int, ...], set[int]] = {}
    for token, parent in zip(tokens, parents, strict=True):
        path.append((*path[parent], token))
        if token or not hides_zero:  # 0 stands where there is no guess
            nodes.setdefault(path[parent], set()).add(token)
    return nodes


@pytest.mark.parametrize("config", [CONFIG, LookaheadConfig(window=2, ngram=4, guesses=3)])
def test_as_lists(config: LookaheadConfig) -> None:
    """Random steps of some slots. Kills: a node under another column, a guess that hides behind one that begins alike,
    an n-gram of another slot, one that comes twice, one older than another; a window where there is no room."""
    rng, ours = random.Random(0), new(config)
    texts = [[rng.randrange(1, 5) for _ in range(rng.randrange(1, 30))] for _ in range(4)]
    listed = [Listed(config, text) for text in texts]
    for slot, text in enumerate(texts):
        ours.start(slot, torch.tensor(text))
    for step in range(40):
        slots = rng.sample(range(4), rng.randrange(1, 5))
        newest = [rng.randrange(1, 5) for _ in slots]
        chains = [[rng.randrange(1, 5) for _ in range(rng.choice((0, 0, 1, 4, config.num_nodes)))] for _ in slots]
        first = None
        if step % 3:
            padded = [chain + [7] * (config.num_nodes - len(chain)) for chain in chains]
            first = torch.tensor(padded), torch.tensor([len(chain) for chain in chains])
        else:
            chains = [[] for _ in slots]
        tree, _ = ours.tree(torch.tensor(slots), torch.tensor(newest), first)
        guesses, has_guess = ours.newest_guess(torch.tensor(slots), torch.tensor(newest))
        for row, (slot, token, chain) in enumerate(zip(slots, newest, chains, strict=True)):
            expected = listed[slot].tree(token, chain)
            assert paths_of(tree.token_ids[row].tolist(), tree.parents[row].tolist()) == expected
            assert (tree.parents[row] <= torch.arange(config.num_nodes)).all()
            assert tree.is_other[row].tolist() == [node < len(chain) for node in range(config.num_nodes)]
            ngrams = [ngram[1:] for ngram in listed[slot].pool if ngram[0] == token]
            assert (guesses[row].tolist() if has_guess[row] else None) == (ngrams[-1] if ngrams else None)
        drawn = torch.randint(1, 5, (len(slots), config.window), generator=torch.Generator().manual_seed(step))
        is_read = torch.tensor([rng.random() < 0.8 for _ in slots])
        ours.read(torch.tensor(slots), drawn, is_read)
        new_tokens = [[rng.randrange(1, 5) for _ in range(rng.randrange(6))] for _ in slots]
        for row, slot in enumerate(slots):
            if is_read[row]:
                listed[slot].read(drawn[row].tolist())
            texts[slot] += new_tokens[row]
            text, size = texts[slot], config.ngram
            for after in reversed(range(min(size, len(new_tokens[row])))):
                if len(text) - after >= size:
                    listed[slot].put(text[len(text) - after - size : len(text) - after])
        recent = torch.tensor([([0] * 9 + texts[slot])[-(2 * config.ngram - 1) :] for slot in slots])
        lengths = torch.tensor([len(texts[slot]) for slot in slots])
        ours.extend(torch.tensor(slots), recent, lengths, torch.tensor([len(own) for own in new_tokens]))


def test_pool_is_bounded(monkeypatch: Any) -> None:
    """The newest n-grams stay. Kills: a place that is written past the pool, an age that does not go round."""
    monkeypatch.setattr(lookahead, "POOL", 8)
    ours = new()
    ours.start(0, torch.arange(1, 30))
    slot = torch.zeros(1, dtype=torch.int64)
    for token in range(30, 60):
        ours.extend(
            slot, torch.tensor([[token - 4, token - 3, token - 2, token - 1, token]]), torch.tensor([60]), slot + 1
        )
    starts = {int(first) for first in ours._pool[0, :, 0]} - {-1}
    assert starts == set(range(50, 58))


def test_play_on_a_cycle() -> None:
    """A target that goes round tokens whatever came before: the window makes the n-grams that later steps verify.
    Kills: columns whose n-grams do not follow each other, a window that is not read."""
    config, period = LookaheadConfig(window=4, ngram=3, guesses=2), 40
    ours, slot, text, steps = new(config), torch.zeros(1, dtype=torch.int64), [1], 0
    ours.start(0, torch.tensor([1]))
    while len(text) < 60:
        tree, begin = ours.tree(slot, torch.tensor([text[-1]]))
        tokens = torch.cat((torch.tensor([[text[-1]]]), tree.token_ids), dim=1)
        parents = torch.cat((slot[None], tree.parents), dim=1)
        drawn, end = tokens % period + 1, int(begin) + config.num_window
        ours.read(slot, drawn[:, end - config.window + 1 : end + 1], torch.ones(1, dtype=torch.bool))
        tokens[:, 1 : end + 1] = -1
        emitted, count, _ = walk(parents, tokens, drawn)
        text, steps = text + emitted[0, : int(count)].tolist(), steps + 1
        assert int(ancestors(parents)[0].max()) == config.window + config.ngram - 3
    assert text == [at % period + 1 for at in range(len(text))]
    assert len(text) / steps > 1.3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"window": 16, "ngram": 8}, "lookahead: (ngram - 1) * (window + guesses) - 1 must be at most 63, not 146."),
        (
            {"num_speculative_tokens": 5},
            "lookahead: num_speculative_tokens must be 29, the nodes of lookahead, or left out",
        ),
    ],
)
def test_refusals(fields: dict[str, Any], words: str) -> None:
    """Kills: a mask without room for the tree, a K that cuts it."""
    with pytest.raises(ConfigError) as error:
        parse_config({"method": "lookahead", **fields})
    assert str(error.value).startswith(words)


def test_stages() -> None:
    """Kills: a stage that hides its tree from the plan; another order."""
    stages = [{"method": "prompt_lookup"}, {"method": "lookahead"}]
    config = parse_config({"method": "cascade", "stages": stages})
    assert (config.length, config.longest_chain) == (29, 3)
    with pytest.raises(ConfigError, match="lookahead supports only stages"):
        parse_config({"method": "cascade", "stages": stages[::-1]})
