"""The soak's own judgement, without a server: that it sees what is wrong. `python tests/soak` is the soak itself."""

import doctest
import random
from collections import Counter

import memory
import server
import soak
from asking import Choice
from catalogue import Case, catalogue
from memory import MIB, Memory
from report import Phase
from traffic import Book


def test_docstrings() -> None:
    assert doctest.testmod(memory).failed == doctest.testmod(server).failed == 0


def test_every_kind_of_request() -> None:
    """The same by seed, each with a name of its own. Kills: a kind that is never drawn."""
    cases = catalogue(3)
    assert cases == catalogue(3) != catalogue(4)
    assert len({case.name for case in cases}) == len(cases)
    kinds = Counter(case.name.partition(" ")[2] for case in cases)
    assert min(kinds[kind] for kind in ("greedy", "greedy, edited", "seeded", "grammar", "chat")) >= 5
    assert all((case.body["temperature"] == 0) != case.sampled for case in cases)
    assert max(case.body.get("n", 1) for case in cases) > 1


def test_a_wrong_token_is_seen() -> None:
    """Kills: a comparison of texts alone, of the first output alone, or without the reason why it ended."""
    book, case = Book(), Case("x", {"n": 2})
    right = [Choice("a", [5, 6], "stop"), Choice("b", [7], "length")]
    book.enter(case, right)
    assert book.difference(case, [Choice("a", [5, 6], "stop"), Choice("b", [7], "length")]) is None
    for wrong in (Choice("b", [8], "length"), Choice("c", [7], "length"), Choice("b", [7], "stop")):
        assert "output 1" in (book.difference(case, [right[0], wrong]) or "")
    book.enter(case, right[:1] * 2)
    assert book.unstable == {"x"} and book.difference(case, right[:1] * 2) is None


def test_a_leak_is_seen() -> None:
    """Growth by 20 MiB a minute in noise of 5 MiB, behind a faster start. Kills: the first half counted in."""
    rng = random.Random(0)
    for leak, seen in ((0, False), (20, True)):
        memory = Memory([float(second) for second in range(180)])
        memory.rss = [
            int(MIB * (1000 + min(second, 60) * 5 + leak * second / 60 + rng.uniform(0, 5))) for second in range(180)
        ]
        slope = memory.slope()
        assert slope is not None
        phases = [Phase("plain", slope=1.0, totals=Counter(num_preemptions=200)), Phase("ours", slope=slope)]
        assert bool(soak.problems_of(phases, Book())) == seen
    assert Memory([0.0, 1.0], [1, 2]).slope() is None


def test_what_must_not_be() -> None:
    """Kills: a phase's problem, few preemptions or an unstable reference that is passed over."""
    good = Phase("ours", totals=Counter(num_preemptions=200))
    assert soak.problems_of([good], Book()) == []
    assert len(soak.problems_of([Phase("ours", totals=Counter(num_preemptions=199))], Book())) == 1
    assert soak.problems_of([Phase("ours", totals=good.totals, problems=["lost"])], Book()) == ["ours: lost"]
    book = Book()
    book.unstable = set("abcd")
    assert len(soak.problems_of([good], book)) == 1
