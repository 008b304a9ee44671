"""Lookahead decoding (Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding"): the
target's pass generates the n-grams that later steps verify, so no drafter is needed.

A draft is a tree that consists of a window and of guesses: n-grams from a pool that begin with the newest token. Level
0 of the window is a chain after the newest token, which is its column 0. Level i, column j is the child of level i - 1,
column j. The tokens that the target draws after the last level complete W n-grams for the pool, and become the last
level of the next window. The pool also contains n-grams of the request's text. All tables are tensors by slot, so no
step waits for the device. R: rows, W: columns of the window, N: tokens of an n-gram, G: guesses, K: nodes of a tree
without its root.
"""

import torch

from vllm_specplugins.config import LookaheadConfig
from vllm_specplugins.draft import Draft, DraftBatch, Proposer, ProposerContext
from vllm_specplugins.proposers.tree import Tree

NO_TOKEN = -1
POOL = 1024  # n-grams of a request; 32 KB for N = 4


def num_copied(num_draft: torch.Tensor, match_length: torch.Tensor) -> torch.Tensor:
    """Returns the number of tokens of a lookup's draft before the window, [R]; it rises with the match length."""
    return num_draft.minimum((4 * match_length).to(num_draft.dtype))


class Lookahead(Proposer):
    """The windows and pools of all slots, and one for rows of padding."""

    def __init__(self, config: LookaheadConfig, context: ProposerContext):
        self.width, self.ngram, self._num_guesses = config.window, config.ngram, config.guesses
        self.num_nodes, self.num_window = config.num_nodes, config.num_window
        num_slots, device = context.max_num_reqs + 1, context.device
        self._window = torch.zeros(num_slots, self.ngram - 1, self.width, dtype=torch.int64, device=device)
        # The last entry is no n-gram: rows write data there that does not belong into the pool.
        self._pool = torch.full((num_slots, POOL + 1, self.ngram), NO_TOKEN, device=device)
        self._oldest = torch.zeros(num_slots, dtype=torch.int64, device=device)  # place in the pool
        places = torch.arange(self.num_window + 1, device=device).view(-1, self.width)  # of the root, then of nodes
        self._above = torch.cat((places[0, :-1], places[:-1].flatten()))
        self._levels, self._ages = torch.arange(self.ngram - 1, device=device), torch.arange(POOL + 1, device=device)
        self._nodes = torch.arange(self.num_nodes, device=device)

    def propose(self, batch: DraftBatch) -> Draft:
        """Drafts no token, since only a tree in the target's pass has a window."""
        return Draft.empty(batch.num_reqs)

    def start(self, slot: int, token_ids: torch.Tensor) -> None:
        """Starts a request with the n-grams of its text, token ids [T] int64 with T > 0."""
        text, window = token_ids[-POOL - self.ngram + 1 :], self._window[slot]
        self._pool[slot].fill_(NO_TOKEN)
        self._oldest[slot].fill_(0)  # an assignment would wait for the device
        if len(text) >= self.ngram:
            ngrams = text.unfold(0, self.ngram, 1)
            self._pool[slot, POOL - len(ngrams) : POOL] = ngrams
        window.copy_(text[-window.numel() :].repeat(window.numel())[: window.numel()].view_as(window))

    def tree(
        self,
        slots: torch.Tensor,  # [R] int64
        newest: torch.Tensor,  # [R] int64, the newest tokens
        # A chain [R, L] int, and the number of its tokens [R] int; the tree fills the remaining nodes.
        chain: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[Tree, torch.Tensor]:
        """Returns a tree for each request, and the number of its nodes before the window, [R] int64. Without a window
        all nodes count."""
        self._window[slots, 0, 0] = newest
        window, (guesses, above, _) = self._window[slots].flatten(1)[:, 1:], self._guesses(slots, newest)
        first, num_first = (window, slots * 0) if chain is None else (chain[0].long(), chain[1].long())
        has_window = num_first + self.num_window <= self.num_nodes
        starts = torch.stack((slots * 0, num_first, num_first + self.num_window * has_window), dim=1)
        part = (self._nodes[:, None] >= starts[:, None, 1:]).sum(dim=2)  # 0: the chain, 1: the window, 2: guesses
        start = starts.gather(1, part)
        places = self._nodes - start
        parts = (first, self._nodes.expand_as(part)), (window, self._above.expand_as(window)), (guesses, above)
        token_ids, parents = torch.zeros_like(part), torch.zeros_like(part)
        for index, (tokens, parents_there) in enumerate(parts):
            at = places.clamp(min=0, max=tokens.shape[1] - 1)
            token_ids = torch.where(part == index, tokens.gather(1, at), token_ids)
            parents = torch.where(part == index, parents_there.gather(1, at), parents)
        parents = torch.where(parents > 0, parents + start, 0)
        begin = torch.where(has_window, num_first, self.num_nodes)
        return Tree(token_ids, parents, self._nodes < num_first[:, None]), begin

    def newest_guess(self, slots: torch.Tensor, newest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the newest guess [R, N - 1] int64, which rows without a tree draft, and whether there is one, [R]
        bool."""
        guesses, _, has_guess = self._guesses(slots, newest)
        return guesses[:, : self.ngram - 1], has_guess

    def _guesses(self, slots: torch.Tensor, newest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the tokens and parents [R, G * (N - 1)] of the newest n-grams that begin with the newest token, and
        whether there is one. Guesses with the same beginning share the nodes of the first of them."""
        pool, rows = self._pool[slots], torch.arange(len(slots), device=slots.device)[:, None]
        age = (self._ages - self._oldest[slots, None]) % POOL + 1
        newness, places = torch.where(pool[..., 0] == newest[:, None], age, 0).topk(self._num_guesses, dim=1)
        tokens = pool[rows, places, 1:].masked_fill((newness == 0)[..., None], 0)
        alike = (tokens[:, :, None] == tokens[:, None]).int().cumprod(dim=3)  # [R, G, G, N - 1]
        first = alike.argmax(dim=2)  # [R, G, N - 1], the first guess with this beginning
        above = torch.where(self._levels > 0, first.roll(1, dims=2) * len(self._levels) + self._levels, 0)
        return tokens.flatten(1), above.flatten(1), newness[:, 0] > 0

    def read(self, slots: torch.Tensor, drawn: torch.Tensor, is_read: torch.Tensor) -> None:
        """Reads the tokens [R, W] int64 that the target drew after the window's last level, in rows with `is_read`."""
        window = torch.cat((self._window[slots], drawn[:, None]), dim=1)
        self._put(slots, window.transpose(1, 2), is_read[:, None].expand_as(drawn))
        self._window[slots] = torch.where(is_read[:, None, None], window[:, 1:], window[:, :-1])

    def extend(self, slots: torch.Tensor, newest: torch.Tensor, lengths: torch.Tensor, num_new: torch.Tensor) -> None:
        """Adds the n-grams that end in new tokens to the pools, at most N of them. `newest` [R, 2 * N - 1] int64 holds
        the last tokens of texts with these lengths [R]; the last num_new [R] of them are new."""
        after = self.ngram - 1 - torch.arange(self.ngram, device=slots.device)  # tokens after each n-gram
        is_new = (after < num_new[:, None]) & (after + self.ngram <= lengths[:, None])
        self._put(slots, newest.unfold(1, self.ngram, 1), is_new)

    def _put(self, slots: torch.Tensor, ngrams: torch.Tensor, is_new: torch.Tensor) -> None:
        """Adds n-grams [R, M, N] with `is_new` [R, M] to the pools, and removes older equal ones."""
        pool, rows = self._pool[slots], torch.arange(len(slots), device=slots.device)[:, None]
        is_known = ((pool[:, None] == ngrams[:, :, None]).all(dim=3) & is_new[..., None]).any(dim=1)
        pool[..., 0] = pool[..., 0].masked_fill(is_known, NO_TOKEN)
        places = (self._oldest[slots, None] + is_new.int().cumsum(dim=1) - 1) % POOL
        ngrams = torch.where(is_new[..., None], ngrams, NO_TOKEN)
        pool[rows, torch.where(is_new, places, POOL)] = ngrams
        self._pool[slots] = pool
        self._oldest[slots] = (self._oldest[slots] + is_new.sum(dim=1)) % POOL
