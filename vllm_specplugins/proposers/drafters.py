"""Drafters: what a cascade is made of. Each continues drafts that others began; policies are drafters that hold two.

`Verified` is staged speculative decoding (Spector and Re 2023; Chen et al. 2023, "Cascade speculative drafting"): a
cheap drafter's tokens are checked by a model stage in one forward pass, corrected and extended. Its tokens are those
that the model stage alone would draft. Proof: given the tokens before it, the stage's choice at a position is a
function of its logits and of noise that depends on (seed, position) alone: the argmax of logits / temperature + Gumbel
noise, a draw from its q. A cheap token is kept only if it is that choice, and replaced by it otherwise; by induction
over the positions every token is the stage's own, and so is its q. Two model stages that share their noise agree about
as often as any acceptance rule could make them (Daliri et al. 2025, "Coupling without communication").
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from vllm_specplugins.draft import DraftBatch, Proposer, StageCounters
from vllm_specplugins.proposers.checks import checked_draft
from vllm_specplugins.proposers.early_exit import EarlyExit
from vllm_specplugins.proposers.gate import FIRST_CONFIDENCE
from vllm_specplugins.proposers.prompt_lookup import PromptLookup
from vllm_specplugins.proposers.read_only import rows_of


class DraftToken(NamedTuple):
    """A drafted token, the index of the stage that answers for it, how sure that is, and its q.

    `logits` [vocab_size] is None where q is one-hot.
    """

    token_id: int
    stage: int
    confidence: float
    logits: Any = None


Rows = list[list[DraftToken]]  # one draft for each request of a batch


class Drafter(Protocol):
    """Continues drafts."""

    def draft(self, batch: DraftBatch, begun: Rows, wanted: Sequence[int]) -> Rows:
        """At most `wanted` tokens for each request, to follow its history and the draft that was begun."""


@dataclass(slots=True)
class Lookup:
    """Prompt lookup, the stage with this index. Its confidence is the length of the match."""

    stage: PromptLookup
    index: int

    def draft(self, batch: DraftBatch, begun: Rows, wanted: Sequence[int]) -> Rows:
        rows: Rows = []
        for row, (tokens, limit) in enumerate(zip(begun, wanted, strict=True)):
            if limit == 0:
                rows.append([])
                continue
            found, match_length = self.stage.continue_draft(batch, row, [token.token_id for token in tokens], limit)
            rows.append([DraftToken(token_id, self.index, match_length) for token_id in found.tolist()])
        return rows


@dataclass(slots=True)
class Whole:
    """Any other proposer that runs on the host. It cannot continue a draft, and so only begins one.

    It is asked for those requests alone that want one of it, and what it answers is checked.
    """

    stage: Proposer
    index: int
    width: int  # K
    vocab_size: int

    def draft(self, batch: DraftBatch, begun: Rows, wanted: Sequence[int]) -> Rows:
        drafts: Rows = [[] for _ in wanted]
        rows = [row for row, limit in enumerate(wanted) if limit and not begun[row]]
        if not rows:
            return drafts
        limits = np.array([wanted[row] for row in rows], np.int32)
        answer = self.stage.propose(rows_of(batch, rows, limits))
        draft = checked_draft(answer, limits, self.width, self.vocab_size)
        confidence = [1.0] * len(rows) if draft.confidence is None else draft.confidence.tolist()
        for row, tokens, count, sure in zip(rows, draft.token_ids.tolist(), draft.num_draft, confidence, strict=True):
            drafts[row] = [DraftToken(token_id, self.index, sure) for token_id in tokens[:count]]
        return drafts


class Nothing:
    """Drafts nothing: `Verified` with it is the model stage alone, token by token."""

    def draft(self, batch: DraftBatch, begun: Rows, wanted: Sequence[int]) -> Rows:
        return [[] for _ in wanted]


def allows(options: Mapping[str, Any], name: str) -> bool:
    """Whether a request's options let the stage of this name draft."""
    return not options or name in options.get("stages", (name,))


@dataclass(slots=True)
class Allowed:
    """A stage's drafter where a request's options allow that stage, and `otherwise` where they do not."""

    drafter: Drafter
    otherwise: Drafter
    name: str

    def draft(self, batch: DraftBatch, begun: Rows, wanted: Sequence[int]) -> Rows:
        allowed = [allows(options, self.name) for options in batch.options]
        if all(allowed):
            return self.drafter.draft(batch, begun, wanted)
        wanted_here = [limit if ok else 0 for ok, limit in zip(allowed, wanted, strict=True)]
        wanted_there = [0 if ok else limit for ok, limit in zip(allowed, wanted, strict=True)]
        drafts = self.drafter.draft(batch, begun, wanted_here)
        others = self.otherwise.draft(batch, begun, wanted_there)
        return [draft if ok else other for ok, draft, other in zip(allowed, drafts, others, strict=True)]


@dataclass(slots=True)
class Verified:
    """The policy `verify`: `cheap` drafts, the model stage with this index checks it in one pass and extends it."""

    cheap: Drafter
    stage: EarlyExit
    index: int
    counters: StageCounters
    cheap_counters: StageCounters | None = None

    def draft(self, batch: DraftBatch, begun: Rows, wanted: Sequence[int]) -> Rows:
        drafts = [list(tokens) for tokens in begun]
        ends = [len(tokens) + limit for tokens, limit in zip(begun, wanted, strict=True)]
        self.counters.asked += sum(1 for limit in wanted if limit)
        num_fed = [0] * len(drafts)  # of a row's tokens, of which the first is the newest of its history
        while any(missing := [end - len(draft) for end, draft in zip(ends, drafts, strict=True)]):
            # The stage's own choice comes behind the guess: one token less is wanted of it.
            guesses = self.cheap.draft(batch, drafts, [max(0, number - 1) for number in missing])
            start = time.perf_counter()
            self._check(batch, drafts, guesses, missing, num_fed)
            self.counters.ms += (time.perf_counter() - start) * 1000
            num_fed = [len(draft) for draft in drafts]
        return [draft[len(tokens) :] for draft, tokens in zip(drafts, begun, strict=True)]

    def _check(
        self, batch: DraftBatch, drafts: Rows, guesses: Rows, missing: Sequence[int], num_fed: Sequence[int]
    ) -> None:
        """Extends each draft that misses tokens by the guess as far as the stage agrees, and by its next choice."""
        assert batch.target is not None
        rows = [
            [int(history[-1]), *(token.token_id for token in (*draft, *guess))]
            for history, draft, guess in zip(batch.token_ids, drafts, guesses, strict=True)
        ]
        length = max(len(row) - fed for row, fed, left in zip(rows, num_fed, missing, strict=True) if left)
        # Rows that need fewer tokens are fed some again, to the same effect, or else zeros behind their end.
        firsts = [max(0, len(row) - length) if left else 0 for row, left in zip(rows, missing, strict=True)]
        token_ids = np.zeros((len(rows), length), np.int64)
        for index, (row, first) in enumerate(zip(rows, firsts, strict=True)):
            token_ids[index, : len(row) - first] = row[first : first + length]
        chosen, logits = self.stage.choose(batch.target, token_ids, np.array(firsts))
        choices = chosen.tolist()
        for index, (draft, guess, left) in enumerate(zip(drafts, guesses, missing, strict=True)):
            column = len(draft) - firsts[index]  # of the choice behind what is drafted so far
            for offered in (*guess, None)[:left]:
                choice = choices[index][column]
                draft.append(
                    DraftToken(choice, self.index, FIRST_CONFIDENCE, None if logits is None else logits[index, column])
                )
                self.counters.drafted += 1
                column += 1
                if offered is None or offered.token_id != choice:
                    break
                if self.cheap_counters is not None:
                    self.cheap_counters.kept += 1


@dataclass(slots=True)
class First:
    """The policy `first`: the second drafter drafts for those for whom the first one has nothing."""

    first: Drafter
    second: Drafter

    def draft(self, batch: DraftBatch, begun: Rows, wanted: Sequence[int]) -> Rows:
        drafts = self.first.draft(batch, begun, wanted)
        rest = [0 if draft else limit for draft, limit in zip(drafts, wanted, strict=True)]
        others = self.second.draft(batch, begun, rest)
        return [draft or other for draft, other in zip(drafts, others, strict=True)]


@dataclass(slots=True)
class Extend:
    """The policy `extend`: the second drafter continues where the first one ends."""

    first: Drafter
    second: Drafter

    def draft(self, batch: DraftBatch, begun: Rows, wanted: Sequence[int]) -> Rows:
        drafts = self.first.draft(batch, begun, wanted)
        joined = [[*tokens, *draft] for tokens, draft in zip(begun, drafts, strict=True)]
        rest = [limit - len(draft) for draft, limit in zip(drafts, wanted, strict=True)]
        more = self.second.draft(batch, joined, rest)
        return [[*draft, *tokens] for draft, tokens in zip(drafts, more, strict=True)]
