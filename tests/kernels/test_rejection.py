"""Modified rejection sampling in PyTorch: its exact law by enumeration in fp64, and what a result may depend on."""

import itertools
import math

import pytest
import torch
from batches import conditional, of_states, p_value
from vllm_specplugins.kernels.rejection import Layout, Sampling, reference, rejection_sample, sample_step
from vllm_specplugins.kernels.rejection.drafts import coupled_sample
from vllm_specplugins.kernels.rejection.inputs import Batch, as_step, make_batch

NUM_DRAWS = 200_000


def simplex(vocab_size: int, parts: int) -> torch.Tensor:
    """All distributions of `parts` equal parts over the vocabulary, and a generic one: zeros, ties, one-hots."""
    grid = [c for c in itertools.product(range(parts + 1), repeat=vocab_size) if sum(c) == parts]
    generic = torch.rand(vocab_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.cat([torch.tensor(grid, dtype=torch.float64) / parts, (generic / generic.sum())[None]])


def acceptance(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return reference.draft_ratio(p, q).clamp(max=1)


def normal(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize(("vocab_size", "parts"), [(3, 6), (4, 4), (5, 3)])
def test_law_of_a_token(vocab_size: int, parts: int) -> None:
    """Every pair of p and q, integrated exactly. Kills: a residual of the wrong sign; p/q where q is 0."""
    p = simplex(vocab_size, parts)[:, None]
    q = simplex(vocab_size, parts)[None]
    accepted = q * acceptance(p.expand(-1, q.shape[1], -1), q)
    recovered = normal(reference.residual(p, q))
    law = accepted + (1 - accepted.sum(-1, keepdim=True)) * recovered
    assert (law - p).abs().max() < 1e-12


def outcomes_one_hot(target, drafts: tuple[int, ...], monkeypatch) -> list[tuple[list[int], float]]:
    """(emitted tokens, probability), with every possible draw of the rows put in for the draws of the code."""
    vocab_size, width = len(target(())), len(drafts) + 1
    draws = torch.tensor(list(itertools.product(range(vocab_size), repeat=width)))
    monkeypatch.setattr(reference, "draw_rows", lambda *_: draws.flatten())
    sampled, num_sampled = verify(len(draws), drafts, vocab_size)
    rows = torch.stack([target(drafts[:i]) for i in range(width)])
    probability = rows.gather(1, draws.T).prod(0)
    return [(row[:n].tolist(), float(w)) for row, n, w in zip(sampled, num_sampled, probability, strict=True)]


def outcomes_dense(target, proposer, drafts: tuple[int, ...], monkeypatch) -> list[tuple[list[int], float]]:
    """(emitted tokens, probability), with every pattern of acceptance and every last token put in."""
    vocab_size, width = len(target(())), len(drafts) + 1
    cases = list(itertools.product(*[[False, True]] * len(drafts), range(vocab_size)))
    monkeypatch.setattr(reference, "uniform", lambda *_: 2 - 2.0 * torch.tensor([c[:-1] for c in cases]))
    monkeypatch.setattr(reference, "draw", lambda *_: torch.tensor([c[-1] for c in cases]))
    q_logits = torch.zeros(len(cases), len(drafts), vocab_size)
    sampled, num_sampled = verify(len(cases), drafts, vocab_size, q_logits)
    result = []
    for case, row, n in zip(cases, sampled, num_sampled, strict=True):
        probability = 1.0
        for i, (d, accepted) in enumerate(zip(drafts, case, strict=False)):
            a = acceptance(target(drafts[:i])[d], proposer(drafts[:i])[d])
            probability *= float(a if accepted else 1 - a)
        p = target(drafts[: n - 1])
        q = proposer(drafts[: n - 1]) if n < width else torch.zeros_like(p)
        probability *= float(normal(reference.residual(p, q))[case[-1]])
        result.append((row[:n].tolist(), probability))
    return result


def verify(num_reqs: int, drafts: tuple[int, ...], vocab_size: int, draft_logits: torch.Tensor | None = None):
    width = len(drafts) + 1
    return reference.rejection_sample(
        torch.zeros(num_reqs * width, vocab_size),
        Layout(
            torch.arange(num_reqs + 1) * width,
            torch.tensor([-1, *drafts]).repeat(num_reqs),
            torch.arange(num_reqs * width),
            torch.arange(num_reqs),
        ),
        Sampling(torch.ones(num_reqs), torch.zeros(num_reqs, dtype=torch.int64)),
        len(drafts),
        draft_logits,
    )


def law_error(outcomes, target, vocab_size: int, length: int) -> float:
    """Largest error of the law of the first `length` tokens, those not emitted yet drawn from the target."""
    law: dict[tuple[int, ...], float] = {}
    for emitted, probability in outcomes:
        law[tuple(emitted)] = law.get(tuple(emitted), 0.0) + probability
    worst = 0.0
    for text in itertools.product(range(vocab_size), repeat=length):
        chances = [float(target(text[:i])[text[i]]) for i in range(length)]
        ours = sum(law.get(text[:n], 0.0) * math.prod(chances[n:]) for n in range(1, length + 1))
        worst = max(worst, abs(ours - math.prod(chances)))
    return worst


@pytest.mark.parametrize("num_draft", [1, 2])
def test_law_of_a_step_one_hot(num_draft: int, monkeypatch) -> None:
    """For every draft, what the loop emits follows the target. Kills: a draft accepted after a rejected one."""
    target = conditional(1, 3, 3.0)
    for drafts in itertools.product(range(3), repeat=num_draft):
        outcomes = outcomes_one_hot(target, drafts, monkeypatch)
        assert law_error(outcomes, target, 3, num_draft + 1) < 1e-12


@pytest.mark.parametrize(("vocab_size", "num_draft"), [(3, 1), (3, 2), (4, 2)])
def test_law_of_a_step_dense(vocab_size: int, num_draft: int, monkeypatch) -> None:
    """Averaged over the drafts. Kills: the residual of another row; a bonus token after a rejection."""
    target, proposer = conditional(2, vocab_size, 2.0), conditional(3, vocab_size, 0.5)
    outcomes = []
    for drafts in itertools.product(range(vocab_size), repeat=num_draft):
        chance = math.prod(float(proposer(drafts[:i])[drafts[i]]) for i in range(num_draft))
        outcomes += [(e, w * chance) for e, w in outcomes_dense(target, proposer, drafts, monkeypatch)]
    assert law_error(outcomes, target, vocab_size, num_draft + 1) < 1e-12


@pytest.mark.parametrize("group_size", [1, 2, 3, 8])
def test_law_of_the_heats(group_size: int) -> None:
    """A group in proportion to its sum, then a token in proportion to its weight. Kills: a group cut off or shifted."""
    weights = simplex(5, 3)
    groups = normal(reference.group_sums(weights, group_size))
    padded = torch.nn.functional.pad(weights, (0, -5 % group_size)).view(len(weights), -1, group_size)
    within = torch.nan_to_num(padded / padded.sum(-1, keepdim=True))
    assert ((groups[..., None] * within).flatten(1)[:, :5] - weights).abs().max() < 1e-12


def brute_force_probs(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """One row by the definitions, token by token."""
    p = torch.softmax(logits / temperature, 0)
    stays = (p >= min_p * p.max()) & (logits >= logits.sort(descending=True).values[top_k - 1])
    p = normal(p * stays)
    return normal(p * torch.tensor([float(p[logits > logit].sum()) < top_p for logit in logits]))


@pytest.mark.parametrize("vocab_size", [1, 5, 700])
def test_truncation(vocab_size: int) -> None:
    """Every combination, with ties. Kills: top-p before top-k; ties cut; another order than vLLM's."""
    rng = torch.Generator().manual_seed(1)
    for temperature, top_k, top_p, min_p in itertools.product(
        [0.3, 1.0, 4.0], [1, 2, 40, vocab_size], [0.1, 0.7, 0.999, 1.0], [0.0, 0.05, 0.9]
    ):
        top_k = min(top_k, vocab_size)
        logits = (torch.randn(vocab_size, generator=rng, dtype=torch.float64) * 8).round() / 4
        parameters = (temperature, 0, top_k, top_p, min_p)
        sampling = Sampling(*(torch.tensor([value], dtype=torch.float64) for value in parameters))
        ours = reference.probs(logits[None], sampling)[0]
        assert (ours - brute_force_probs(logits, temperature, top_k, top_p, min_p)).abs().max() < 1e-12


def test_truncation_none_of_it() -> None:
    """Values that keep everything. Kills: top_k 0 or -1 taken at its word."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    plain = reference.probs(logits, Sampling(torch.ones(4), None))
    keeps = Sampling(torch.ones(4), None, torch.tensor([0, -1, 50, 99]), torch.ones(4), torch.zeros(4))
    assert torch.equal(reference.probs(logits, keeps), plain)


def emitted(batch: Batch) -> list[list[int]]:
    sampled, num_sampled = rejection_sample(*batch)
    assert (sampled[torch.arange(sampled.shape[1]) >= num_sampled[:, None]] == -1).all()
    return [row[:n].tolist() for row, n in zip(sampled, num_sampled, strict=True)]


def repeated(
    logits: torch.Tensor, drafts: torch.Tensor, draft_logits: torch.Tensor | None, temperature: float
) -> Batch:
    """One draft token in each of many requests, each with its seed."""
    num_reqs = len(drafts)
    return Batch(
        logits.repeat(num_reqs, 1),
        torch.arange(num_reqs + 1) * 2,
        torch.stack([drafts, drafts], 1).flatten(),
        torch.arange(2).repeat(num_reqs) + 17,
        torch.arange(num_reqs),
        Sampling(torch.full((num_reqs,), temperature), torch.arange(num_reqs)),
        1,
        None if draft_logits is None else draft_logits.expand(num_reqs, 1, -1),
    )


def p_values(batch: Batch, law: torch.Tensor) -> tuple[float, float]:
    """Chi-squared p-values of the first token against a law, and of the bonus token's."""
    sampled, num_sampled = rejection_sample(*batch)
    return p_value(sampled[:, 0], law), p_value(sampled[num_sampled == 2, 1], law)


ADVERSARIAL = torch.linspace(2, -2, 16)
TARGET = torch.linspace(-2, 2, 16)[torch.randperm(16, generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("dense", [False, True], ids=["one-hot", "dense"])
def test_chi_squared(dense: bool, temperature: float) -> None:
    """16 tokens, 200 k draws, a proposer that likes what the target does not. Kills: noise shared by two uses of it."""
    q = torch.softmax(ADVERSARIAL / temperature, 0)
    drafts = torch.multinomial(q, NUM_DRAWS, replacement=True, generator=torch.Generator().manual_seed(1))
    batch = repeated(TARGET.expand(2, -1), drafts, ADVERSARIAL if dense else None, temperature)
    law = torch.softmax(TARGET.double() / temperature, 0)
    assert min(p_values(batch, law)) > 1e-4


@pytest.mark.parametrize(
    "planted", ["accepts more", "wrong temperature", "recovered from p", "recovered with the draft's noise", None]
)
def test_planted_errors_are_caught(planted: str | None, monkeypatch) -> None:
    """The chi-squared test sees each of the classic mistakes, of drafts drawn with the noise of verification."""
    ratio, probs = reference.draft_ratio, reference.draft_probs
    if planted == "accepts more":
        monkeypatch.setattr(reference, "draft_ratio", lambda p, q: ratio(p, q) + 0.02)
    elif planted == "wrong temperature":
        monkeypatch.setattr(reference, "draft_probs", lambda logits, *args: probs(logits / 0.9, *args))
    elif planted == "recovered from p":
        monkeypatch.setattr(reference, "residual", lambda p, *_: p)
    elif planted == "recovered with the draft's noise":
        monkeypatch.setattr(reference, "RECOVERED_TOKEN", reference.TOKEN)
    seeds, ones = torch.arange(NUM_DRAWS), torch.ones(NUM_DRAWS)
    drafts = coupled_sample(ADVERSARIAL.expand(NUM_DRAWS, -1), 17 * seeds**0, Sampling(ones, seeds))
    batch = repeated(TARGET.expand(2, -1), drafts, ADVERSARIAL, 1.0)
    p_value = p_values(batch, torch.softmax(TARGET.double(), 0))[0]
    assert (p_value > 1e-4) == (planted is None)


def test_strange_logits() -> None:
    """NaN is -inf, +inf shares the row, a row of nothing gives token 0. Kills: an id outside of the vocabulary."""
    nan, inf = torch.nan, torch.inf
    rows = torch.tensor(
        [[nan, 1.0, nan], [nan, nan, nan], [-inf, -inf, -inf], [1.0, inf, inf], [-inf, inf, nan], [0.0, -inf, inf]]
    )
    for temperature, dtype in itertools.product([0.0, 0.3, 1.0], [torch.float32, torch.bfloat16, torch.float16]):
        for top_p in (None, torch.full((12,), 0.9)):
            batch = make_batch([0] * 6, 3, temperature=torch.full((12,), temperature), top_p=top_p)
            (tokens,) = zip(*emitted(batch._replace(target_logits=rows.to(dtype))), strict=True)
            assert tokens[:3] == (1, 0, 0) and tokens[3] in (1, 2) and tokens[4:] == (1, 2)
            assert temperature or tokens[3] == 1
    nothing = make_batch([1], 600, dtype=torch.float32, top_p=torch.full((2,), 0.9))
    assert emitted(nothing._replace(target_logits=nothing.target_logits * nan)) == [[0]]


def part(batch: Batch, requests: list[int]) -> Batch:
    """A batch of some requests of another, in this order."""
    bounds = batch.cu_num_logits.tolist()
    spans = [torch.arange(bounds[r], bounds[r + 1]) for r in requests]
    rows = torch.cat(spans)
    return batch._replace(
        target_logits=batch.target_logits[rows],
        cu_num_logits=torch.tensor([0, *itertools.accumulate(len(span) for span in spans)]),
        draft_token_ids=batch.draft_token_ids[rows],
        positions=batch.positions[rows],
        idx_mapping=batch.idx_mapping[torch.tensor(requests)],
    )


@pytest.mark.parametrize("truncation", ["whole", "all"])
@pytest.mark.parametrize("dense", [False, True], ids=["one-hot", "dense"])
def test_independent_of_the_batch(dense: bool, truncation: str) -> None:
    """Order, batch size, padding. Kills: noise by row index; a chunk that forgets its offset; states mixed up."""
    batch = make_batch([3, 0, 4, 1, 2, 4, 0, 3], 600, dense=dense, **of_states(truncation, 16))
    together = emitted(batch)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0)).tolist()
    assert emitted(part(batch, order)) == [together[r] for r in order]
    assert [emitted(part(batch, [r]))[0] for r in range(8)] == together
    empty = batch._replace(
        cu_num_logits=torch.cat([batch.cu_num_logits, batch.cu_num_logits[-1:]]),
        idx_mapping=torch.cat([batch.idx_mapping, batch.idx_mapping[:1]]),
    )
    assert emitted(empty) == [*together, []]
    assert emitted(batch._replace(max_num_draft=4)) == together


def test_one_hot_output_does_not_depend_on_drafts() -> None:
    """Other drafts, fewer drafts, none: the tokens are the same. Kills: noise that counts from the step's start."""
    batch = make_batch([4] * 8, 600, agreement=0.8, **of_states("all", 16))
    long = emitted(batch)
    assert max(map(len, long)) == 5 and min(map(len, long)) < 5
    rejected = batch._replace(draft_token_ids=torch.full_like(batch.draft_token_ids, -1))
    assert emitted(rejected) == [row[:1] for row in long]
    bounds = batch.cu_num_logits[:-1].tolist()
    fewer = torch.cat([torch.arange(begin, begin + 3) for begin in bounds])
    short = batch._replace(
        target_logits=batch.target_logits[fewer],
        cu_num_logits=torch.arange(9) * 3,
        draft_token_ids=batch.draft_token_ids[fewer],
        positions=batch.positions[fewer],
        max_num_draft=2,
    )
    assert emitted(short) == [row[:3] for row in long]


@pytest.mark.parametrize("dense", [False, True], ids=["one-hot", "dense"])
def test_temperature_0_is_the_argmax(dense: bool) -> None:
    """Kills: a greedy request that draws; ties that go to a later token."""
    batch = make_batch([3, 2, 0, 3], 50, dense=dense, temperature=torch.zeros(8), agreement=0.6, seed=3)
    logits = batch.target_logits.round()
    expected, bounds = [], batch.cu_num_logits.tolist()
    for begin, end in itertools.pairwise(bounds):
        text = []
        for row in range(begin, end):
            text.append(int((logits[row] == logits[row].max()).nonzero()[0]))
            if row + 1 == end or text[-1] != int(batch.draft_token_ids[row + 1]):
                break
        expected.append(text)
    assert emitted(batch._replace(target_logits=logits)) == expected


def test_proposer_that_is_the_target_is_always_accepted() -> None:
    """p = q. Kills: q without the temperature; a draft compared with the row after it."""
    batch = make_batch([4] * 20, 100, dense=True, temperature=torch.full((40,), 0.6))
    states = batch.idx_mapping.long()
    draft_logits = torch.full((40, 4, 100), torch.nan)
    draft_logits[states] = batch.target_logits.view(20, 5, 100)[:, :4]
    assert {len(row) for row in emitted(batch._replace(draft_logits=draft_logits))} == {5}


def test_narrow_draft_vocabulary() -> None:
    """A proposer that knows fewer tokens; the target recovers the others, too."""
    batch = make_batch([1] * 200, 40, dense=True)
    narrow = batch._replace(
        draft_logits=batch.draft_logits[:, :, :30], draft_token_ids=batch.draft_token_ids.clamp(max=29)
    )
    tokens = torch.tensor([row[0] for row in emitted(narrow)])
    assert (tokens >= 30).any()


def test_errors() -> None:
    batch = make_batch([1, 2], 10, dense=True)
    with pytest.raises(ValueError, match="draft_logits has shape"):
        rejection_sample(*batch._replace(max_num_draft=3))
    with pytest.raises(ValueError, match="must be one of fused, reference"):
        rejection_sample(*batch, implementation="quick")


@pytest.mark.parametrize("implementation", ["reference", "host"])
def test_a_step_is_its_rows(implementation: str) -> None:
    """And of prompts what is theirs. Kills: noise of the token that is fed; a draft or a rejection within a prompt."""
    batch = make_batch([3, 0, 4, 2], 50, agreement=1.0)
    sampled, num_sampled = rejection_sample(*batch, implementation=implementation)
    logits, layout, *rest = as_step(batch)
    padded = layout._replace(seq_lens=torch.cat((layout.seq_lens, layout.seq_lens[:1])))  # as of a graph
    ours = sample_step(logits, padded, *rest, implementation=implementation)
    assert torch.equal(ours[0], sampled) and torch.equal(ours[1], num_sampled)
    assert torch.equal(ours[2], batch.cu_num_logits.diff() - num_sampled)
    some, counts, rejected = sample_step(*as_step(batch, prompts=2), implementation=implementation)
    assert torch.equal(some[:2], sampled[:2]) and counts.tolist() == [*num_sampled[:2].tolist(), 0, 1]
    assert rejected[2:].tolist() == [0, 2] and some[3].tolist() == [int(sampled[3, 0]), -1, -1, -1, -1]
