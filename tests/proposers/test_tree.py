"""Trees that grow along one draft: the likeliest nodes, parents first; a chain where there may be no tree."""

from collections.abc import Callable

import pytest
import torch
from vllm_specplugins.kernels.rejection import Sampling
from vllm_specplugins.kernels.rejection.drafts import coupled_sample, race_logprobs

from vllm_specplugins.config.trees import chain_length
from vllm_specplugins.proposers.tree import Tree, grow

R, V = 6, 40
Other = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def grown(
    num_nodes: int, temperature: float, branches: bool, other: Other | None = None
) -> tuple[torch.Tensor, torch.Tensor, Tree]:
    rng, depth = torch.Generator().manual_seed(num_nodes), chain_length(num_nodes)
    logits = 3 * torch.randn(R, depth, V, generator=rng)
    positions = 10 + torch.arange(depth).expand(R, -1)
    sampling = Sampling(torch.full((R,), temperature), torch.arange(R))
    rows = torch.arange(R).repeat_interleave(depth)
    chain = coupled_sample(logits.flatten(0, 1), positions.flatten(), sampling.at(rows)).view(R, depth)
    probs = race_logprobs(logits.flatten(0, 1), positions.flatten(), sampling.at(rows)).view_as(logits)
    beside = other(chain, probs) if other else None
    return chain, probs, grow(chain, logits, positions, sampling, num_nodes, torch.full((R,), branches), beside)


def copied(length: int) -> Other:
    """Chains that leave the drafter's after none, one ... of its tokens, half of them by what it had in its second
    place, and end early."""

    def other(chain: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rng, depth = torch.Generator().manual_seed(length), chain.shape[1]
        token_ids = torch.randint(V, (R, length), generator=rng)
        survival = torch.rand(R, length, generator=rng).log().div(2).cumsum(1)
        for row in range(R):
            same = min(row, depth)
            token_ids[row, :same] = chain[row, :same]
            if same < depth:
                ranked = probs[row, same].topk(12).indices
                token_ids[row, same] = ranked[ranked != chain[row, same]][0 if row % 2 else 9]
            survival[row, length - row :] = -torch.inf
        return token_ids, survival

    return other


def lines_of(token_ids: torch.Tensor, parents: torch.Tensor) -> list[tuple[int, ...]]:
    """Of each node, the tokens from the root to it; parents come first."""
    lines: list[tuple[int, ...]] = [()]
    for node, (token, parent) in enumerate(zip(token_ids.tolist(), parents.tolist(), strict=True)):
        assert 0 <= parent <= node
        lines.append((*lines[parent], token))
    return lines[1:]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_nodes", [1, 2, 7, 15, 31])
def test_merged(num_nodes: int, temperature: float) -> None:
    """Beside a union of both by line. Kills: a sibling twice, or in another place; what follows the other chain's token
    where it was dropped for an equal one; a survival that is the lesser one."""
    other = copied(num_nodes)
    chain, probs, tree = grown(num_nodes, temperature, True, other)
    theirs, survival = other(chain, probs)
    for row in range(R):
        own = tuple(chain[row].tolist())
        union = {tuple(theirs[row, : at + 1].tolist()): float(survival[row, at]) for at in range(num_nodes)}
        total = 0.0
        for at, token in enumerate(own):
            for candidate in probs[row, at].topk(8).indices.tolist():
                line = (*own[:at], candidate)
                union[line] = max(union.get(line, -torch.inf), total + float(probs[row, at, candidate]))
            total += float(probs[row, at, token])
        lines = lines_of(tree.token_ids[row], tree.parents[row])
        assert len(set(lines)) == num_nodes
        best = sorted(union.values(), reverse=True)[:num_nodes]
        torch.testing.assert_close(torch.tensor([union[line] for line in lines]), torch.tensor(best))
        alone = [
            line not in {(*own[:at], x) for at in range(len(own)) for x in probs[row, at].topk(8).indices.tolist()}
            for line in lines
        ]
        assert tree.is_other[row].tolist() == alone


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_nodes", [1, 2, 7, 15, 31])
def test_likeliest_nodes(num_nodes: int, temperature: float) -> None:
    """Compares with a search over all candidates. Fails if a parent is wrong or comes after its child, if a token
    appears twice below a parent, if a candidate is likelier than a node but missing, or if nodes are not sorted."""
    chain, probs, (token_ids, parents, *_) = grown(num_nodes, temperature, True)
    for row in range(R):
        total = torch.cat((torch.zeros(1), probs[row].gather(1, chain[row, :, None])[:, 0].cumsum(0)))
        lines = lines_of(token_ids[row], parents[row])
        assert len(set(lines)) == num_nodes
        assert all(list(line[:-1]) == chain[row, : len(line) - 1].tolist() for line in lines)
        found = [float(total[len(line) - 1] + probs[row, len(line) - 1, line[-1]]) for line in lines]
        candidates = [(total[:-1, None] + probs[row])[depth].topk(8).values for depth in range(probs.shape[1])]
        best = torch.cat(candidates).topk(num_nodes).values
        torch.testing.assert_close(torch.tensor(found), best)


def test_chains() -> None:
    """Kills: a node that is not the one before's child, a token that is not the chain's."""
    chain, _, (token_ids, parents, *_) = grown(15, 0.8, False)
    assert torch.equal(parents, torch.arange(15).expand(R, -1))
    assert torch.equal(token_ids[:, : chain.shape[1]].long(), chain)


def test_the_likelier_chain() -> None:
    """Kills: the less likely one, a node that is not the one before's child."""
    other = copied(15)
    chain, probs, (token_ids, parents, *_) = grown(15, 0.8, False, other)
    theirs, survival = other(chain, probs)
    ours = probs.gather(2, chain[..., None])[..., 0].cumsum(1).exp().sum(1)
    is_theirs = survival.exp().sum(1) > ours
    assert 0 < is_theirs.sum() < R
    assert torch.equal(parents, torch.arange(15).expand(R, -1))
    depth = chain.shape[1]
    expected = torch.where(is_theirs[:, None], theirs[:, :depth], chain)
    assert torch.equal(token_ids[:, :depth].long(), expected)
    assert torch.equal(token_ids[is_theirs].long(), theirs[is_theirs])


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
