"""Model Runner V2: a lookup continues a drafter's tokens on the device, beside the same search in longer texts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import RUNNER

if RUNNER != "v2":
    pytest.skip("V1 continues drafts on the host", allow_module_level=True)

from vllm_specplugins.kernels.history_match import NO_MATCH, Texts, history_match

from vllm_specplugins.cascade.on_device import MODEL, DeviceBatch
from vllm_specplugins.config import PromptLookupConfig
from vllm_specplugins.engine.v2.speculators.built_in import BuiltInDrafts
from vllm_specplugins.engine.v2.speculators.lookups import Lookups
from vllm_specplugins.engine.v2.speculators.token_histories import TokenHistories

S, L, K, OWN = 6, 60, 8, 3  # slots, tokens of a text, of a draft, of the drafter's


def make(rng: torch.Generator) -> tuple[Any, Any]:
    """Lookups in texts of few different tokens, and a drafter's buffers."""
    token_ids, lengths = torch.randint(3, (S, L), generator=rng).int(), torch.randint(5, L - OWN, (S,), generator=rng)
    states = SimpleNamespace(
        max_num_reqs=S, max_model_len=L,
        all_token_ids=SimpleNamespace(gpu=token_ids), total_len=SimpleNamespace(gpu=lengths.int()),
    )  # fmt: skip
    lookups = Lookups.__new__(Lookups)
    lookups.texts = TokenHistories(states, K, PromptLookupConfig(), torch.device("cpu"))
    theirs = SimpleNamespace(
        draft_tokens=torch.randint(3, (S, OWN), generator=rng), num_speculative_steps=OWN, device="cpu",
        draft_token_confidence_probs=torch.full((S, OWN), torch.nan),
    )  # fmt: skip
    return lookups, BuiltInDrafts(theirs, K, None, lookups)


@pytest.mark.parametrize("seed", range(20))
def test_as_in_a_longer_text(seed: int) -> None:
    """Of requests whose rows are not their slots, and of a row of padding. Fails if a prefix is written to the text of
    another row, at another place or over the text's own tokens, if it counts as found, if the lookup's tokens do not
    follow the drafter's, or if a draft is longer than allowed."""
    rng = torch.Generator().manual_seed(seed)
    (lookups, offers), config = make(rng), PromptLookupConfig()
    offers.begin(num_tokens := seed % (OWN + 1))
    texts = lookups.texts.histories
    slots = torch.cat((torch.randperm(S, generator=rng)[: S - 2], torch.tensor([S - 1])))  # the last one is padding
    max_own, max_lookup = (torch.randint(high, slots.shape, generator=rng).int() for high in (OWN + 1, K + 1))
    max_own[-1] = max_lookup[-1] = 0
    max_own = torch.minimum(max_own, max_lookup)
    before = [texts.token_ids[slot, : texts.lengths[slot]].clone() for slot in range(S)]
    batch = DeviceBatch(slots, num_tokens, max_lookup=max_lookup)
    drafts = offers.drafts(max_own)
    joined, lengths, distances = lookups.continued(batch, drafts), texts.lengths.clone(), texts.distances.clone()
    for row, slot in enumerate(slots.tolist()):
        num_own = min(num_tokens, int(max_own[row]))
        own = drafts.token_ids[row, :num_own]
        longer = torch.cat((before[slot], own, own.new_zeros(L)))[None]
        there = Texts(longer, torch.tensor([len(before[slot]) + num_own]).int(), torch.full((1, 2), NO_MATCH).int())
        room = max_lookup[row : row + 1] - num_own
        alone, num_alone, _ = history_match(there, torch.tensor([0]), room, K, config.min_ngram, config.max_ngram)
        expected = torch.cat((own, alone[0, : num_alone[0]]))
        assert joined.num_draft[row] == len(expected) <= max(max_lookup[row], num_own)
        assert torch.equal(joined.token_ids[row, : len(expected)], expected)
        assert (joined.stage[row, : len(expected)] == MODEL).tolist() == [at < num_own for at in range(len(expected))]
    for slot in range(S):
        assert torch.equal(texts.token_ids[slot, : lengths[slot]], before[slot])
    assert torch.equal(texts.lengths, lengths) and torch.equal(texts.distances, distances)
    assert (distances == NO_MATCH).all()
