"""Trees that grow along one draft: the likeliest nodes, parents first; a chain where there may be no tree."""

import pytest
import torch
from vllm_specplugins.kernels.rejection import Sampling
from vllm_specplugins.kernels.rejection.drafts import coupled_sample, race_logprobs

from vllm_specplugins.config import chain_length
from vllm_specplugins.proposers.tree import grow

R, V = 6, 40


def grown(num_nodes: int, temperature: float, branches: bool) -> tuple[torch.Tensor, ...]:
    rng, depth = torch.Generator().manual_seed(num_nodes), chain_length(num_nodes)
    logits = 3 * torch.randn(R, depth, V, generator=rng)
    positions = 10 + torch.arange(depth).expand(R, -1)
    sampling = Sampling(torch.full((R,), temperature), torch.arange(R))
    rows = torch.arange(R).repeat_interleave(depth)
    chain = coupled_sample(logits.flatten(0, 1), positions.flatten(), sampling.at(rows)).view(R, depth)
    probs = race_logprobs(logits.flatten(0, 1), positions.flatten(), sampling.at(rows)).view_as(logits)
    return chain, probs, *grow(chain, logits, positions, sampling, num_nodes, torch.full((R,), branches))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_nodes", [1, 2, 7, 15, 31])
def test_likeliest_nodes(num_nodes: int, temperature: float) -> None:
    """Beside a search over all candidates. Kills: a parent that is another one, or stands after its child; a token
    twice below a parent; a candidate that is likelier than a node and left out; nodes that are not best first."""
    chain, probs, token_ids, parents = grown(num_nodes, temperature, True)
    for row in range(R):
        total = torch.cat((torch.zeros(1), probs[row].gather(1, chain[row, :, None])[:, 0].cumsum(0)))
        lines, found = {0: ()}, []
        for node in range(num_nodes):
            parent = int(parents[row, node])
            assert 0 <= parent <= node
            line = (*lines[parent], int(token_ids[row, node]))
            assert line not in lines.values() and list(line[:-1]) == chain[row, : len(line) - 1].tolist()
            lines[node + 1] = line
            found.append(float(total[len(line) - 1] + probs[row, len(line) - 1, line[-1]]))
        candidates = [(total[:-1, None] + probs[row])[depth].topk(8).values for depth in range(probs.shape[1])]
        best = torch.cat(candidates).topk(num_nodes).values
        torch.testing.assert_close(torch.tensor(found), best)


def test_chains() -> None:
    """Kills: a node that is not the one before's child, a token that is not the chain's."""
    chain, _, token_ids, parents = grown(15, 0.8, False)
    assert torch.equal(parents, torch.arange(15).expand(R, -1))
    assert torch.equal(token_ids[:, : chain.shape[1]].long(), chain)


def test_race_logprobs() -> None:
    """The likeliest wins the race, under all parameters; probabilities that sum to one, and are about right for logits
    nearby. Kills: noise of another group, token, stream or position."""
    rng, num_rows, vocab_size = torch.Generator().manual_seed(0), 300, 700
    logits = 3 * torch.randn(num_rows, vocab_size, generator=rng)
    sampling = Sampling(
        torch.where(torch.arange(num_rows) % 4 == 0, 0.0, 0.9),
        torch.randint(1 << 40, (num_rows,), generator=rng),
        torch.full((num_rows,), 50, dtype=torch.int32),
        torch.full((num_rows,), 0.9),
    )
    positions = torch.randint(1000, (num_rows,), generator=rng)
    probs = race_logprobs(logits, positions, sampling)
    assert torch.equal(probs.argmax(-1), coupled_sample(logits, positions, sampling))
    torch.testing.assert_close(probs.exp().sum(-1), torch.ones(num_rows))
    nearby = coupled_sample(logits + 0.5 * torch.randn(logits.shape, generator=rng), positions, sampling)
    hits = [(probs.topk(count).indices == nearby[:, None]).any(1).float().mean() for count in (1, 4)]
    assert hits[0] > 0.5 and hits[1] > hits[0] + 0.15
