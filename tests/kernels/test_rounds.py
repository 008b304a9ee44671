"""Rejection in rounds: several tokens that are drawn from q without replacement stand below one node (Miao et al. 2024,
"SpecInfer"). Its law, in fractions, by all draws there are. Trees are verified by coupled noise; docs/figures.md says
what rounds would bring."""

import random
from fractions import Fraction

import pytest

Law = list[Fraction]
FAULTS = ("p as it was", "accepted by the first q")  # with replacement q stays, and the law does, too


def normed(weights: Law) -> Law:
    total = sum(weights)
    return [weight / total for weight in weights] if total else weights


def after(p: Law, q: Law, token: int, fault: str | None) -> tuple[Law, Law]:
    """What is drawn from where a token was rejected: the target's rest, and a draft that cannot be that token."""
    rest = normed([max(ours - theirs, Fraction(0)) for ours, theirs in zip(p, q, strict=True)])
    others = normed([weight if at != token else Fraction(0) for at, weight in enumerate(q)])
    return p if fault == "p as it was" else rest, others


def emitted(p: Law, q: Law, num_rounds: int, fault: str | None = None, first: Law | None = None) -> Law:
    """How likely each token is to be emitted below a node with so many children."""
    if num_rounds == 0 or not sum(q):
        return p
    found, first = [Fraction(0)] * len(p), first or q
    for token, mass in enumerate(q):
        if mass:
            judged = first[token] if fault == "accepted by the first q" else mass
            accepts = min(Fraction(1), p[token] / judged)
            found[token] += mass * accepts
            if accepts < 1:
                below = emitted(*after(p, q, token, fault), num_rounds - 1, fault, first)
                found = [own + mass * (1 - accepts) * more for own, more in zip(found, below, strict=True)]
    return found


def laws(seed: int, size: int = 4) -> tuple[Law, Law]:
    """Some tokens are impossible for either."""
    rng = random.Random(seed)
    p, q = (normed([Fraction(rng.choice((0, 1, 2, 5, 9))) for _ in range(size)]) for _ in range(2))
    return (p, q) if sum(p) and sum(q) else laws(seed + 1000, size)


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 4])
def test_law(num_rounds: int) -> None:
    assert all(emitted(p, q, num_rounds) == p for p, q in map(laws, range(40)))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str) -> None:
    """Kills: a check that any rule passes."""
    assert any(emitted(p, q, 3, fault) != p for p, q in map(laws, range(40)))
