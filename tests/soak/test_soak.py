"""Tests that the soak detects errors, without a server. `python tests/soak` runs the soak."""

import doctest
import random
from collections import Counter
from pathlib import Path

import chaos
import memory
import numpy as np
import peers
import probed
import pytest
import server
import soak
from asking import Choice
from catalogue import Case, catalogue
from memory import MIB, Memory
from report import Phase
from traffic import Book

from vllm_specplugins.draft import DraftBatch, ProposerContext


def test_docstrings() -> None:
    assert not any(doctest.testmod(module).failed for module in (memory, server, probed))


def test_every_kind_of_request() -> None:
    """A seed gives the same requests, each with a unique name. Fails if a kind is never drawn."""
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
        memory = Memory([float(second) for second in range(480)])
        memory.rss = [
            int(MIB * (min(second, 60) * 5 + leak * second / 60 + rng.uniform(0, 5))) for second in range(480)
        ]
        slope, minutes = memory.slope(), memory.judged_minutes()
        assert slope is not None and 3.9 < minutes < 4
        ours = Phase("ours", slope=slope, judged_minutes=minutes)
        plain = Phase("", slope=1, judged_minutes=4, totals=Counter(num_preemptions=200))
        assert bool(soak.problems_of([plain, ours], Book())) == seen
    assert soak.memory_problems(Phase("ours", slope=99, judged_minutes=1, mib=600), Phase("", mib=100)) == []
    assert soak.memory_problems(Phase("ours", slope=0, judged_minutes=1, mib=700), Phase("", mib=100)) != []
    assert Memory([0.0, 1.0], [1, 2]).slope() is None is Memory().slope()


def test_what_must_not_be() -> None:
    """Kills: a phase's problem, few preemptions, unstable references or a run without a method that are passed over."""
    plain, ours = Phase("", totals=Counter(num_preemptions=30)), Phase("ours", totals=Counter(num_preemptions=20))
    assert soak.problems_of([plain, ours], Book()) == []
    assert len(soak.problems_of([plain, Phase("ours", totals=Counter(num_preemptions=19))], Book())) == 1
    assert soak.problems_of([plain, Phase("ours", totals=ours.totals, problems=["lost"])], Book()) == ["ours: lost"]
    assert len(soak.problems_of([Phase("", totals=Counter(num_preemptions=200))], Book())) == 1
    book = Book()
    book.unstable = set("abcd")
    assert len(soak.problems_of([plain, ours], book)) == 1


def test_every_misdeed_has_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two lives of two proposers. Kills: a deck that begins anew, cards that both hold, misdeeds in the calm."""
    monkeypatch.setattr(chaos, "HOSTILE", {f"misdeed {i}": (lambda batch, good: None, None) for i in range(20)})
    batch = DraftBatch(["a"], [np.array([5, 6, 5], np.int32)], np.array([2], np.int32), [{}])
    context = ProposerContext(10, 100, 8, 4, tokenize=lambda text: [])
    for _ in range(2):
        for index in range(2):
            options = {"seed": 0, "rate": 1.0, "folder": str(tmp_path), "index": index, "count": 2}
            proposer = chaos.Chaos(options, context)
            for _ in range(5):
                proposer.propose(batch)
            (tmp_path / "calm").touch()
            assert proposer.propose(batch).token_ids.tolist() == [[6, 5]]
            (tmp_path / "calm").unlink()
    journals = [(tmp_path / f"journal.{index}").read_text().splitlines() for index in range(2)]
    assert len(set(journals[0])) == len(set(journals[1])) == 10 and not set(journals[0]) & set(journals[1])


def test_hostile_bodies_of_a_probed_server() -> None:
    """By seed, at temperature 1, schemas of free white space among them. Kills: greedy requests, a class left out."""
    bodies = probed.hostile_bodies(2)
    assert repr(bodies) == repr(probed.hostile_bodies(2)) != repr(probed.hostile_bodies(3))  # NaN is not NaN
    assert len(bodies) > 200 and all(body["temperature"] == 1 for body in bodies)
    kinds = {
        kind for body in bodies if isinstance(body["structured_outputs"], dict) for kind in body["structured_outputs"]
    }
    assert kinds >= {"json", "regex", "grammar", "choice", "structural_tag"}
    assert sum(body["structured_outputs"] == {"json": probed.FREE} for body in bodies) == 20


@pytest.mark.parametrize("name", peers.PEERS)
def test_probes_of_peers(name: str) -> None:
    """`probes.py` runs thousands. Fails if what others wrote ends a reader, or is taken for a text that was saved."""
    assert not any(peers.PEERS[name](random.Random(5), 40))


def test_probes_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a damaged text that a reader takes is no problem."""
    monkeypatch.setattr("vllm_specplugins.structures.suffix.store_file._digest", lambda *_: b"x" * 8)
    assert any(peers.stores(random.Random(5), 40))
