"""Whether the kernels do on this device what their references do: small inputs of the shapes to come.

For a device on which nothing was ever run: a driver, a compiler or a card may be at odds with what was compiled. The
references run on the CPU. One request of all may differ: a near tie, closer than float32 can tell, may go either way.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from .acceptance import learn, predict
from .acceptance.state import new_state
from .acceptance.testing import make_steps
from .acceptance.worth import num_worth
from .budget.testing import make_shares, shared
from .history_match import history_match
from .history_match.testing import make_lookup
from .rejection import Sampling, rejection_sample
from .rejection.adjust import adjust
from .rejection.adjust.testing import make_edits
from .rejection.block import block_rejection_sample
from .rejection.drafts import sample_with_q
from .rejection.step import sample_step
from .rejection.testing import Batch, as_step, make_spiky

_SEED = 1
# Sums are rounded otherwise where a multiplication and an addition are one instruction.
_TOLERANCE = 1e-5


class Shapes(NamedTuple):
    """What will be served."""

    vocab_size: int
    # of the model's logits
    dtype: torch.dtype
    max_num_draft: int
    # Whether drafts are drawn, so that verification has a dense q
    samples: bool
    # Whether whole drafts are verified at once
    block: bool
    # Whether drafts are looked up in texts on the device, and rated there
    looks_up: bool = False
    # Whether drafts are trimmed on the device to a budget
    trims: bool = False


class Requests(NamedTuple):
    """Of a check: a reference takes some 0.4 ms a row of 128 k tokens on a core, and all checks less than a second."""

    # of requests with as many drafts as can be
    num_long_rows: int
    # numbers of drafts of the others: what follows one that is rejected does not matter
    short: list[int]


_ONE_HOT, _SAMPLED, _BLOCKS = Requests(12, [1, 0, 0, 0] * 9), Requests(12, [2, 1, 1, 1] * 6), Requests(72, [1, 0])
_EDITED, _DRAWN = Requests(18, [1, 0] * 3), Requests(0, [0] * 16)


class Finding(NamedTuple):
    name: str
    # one sentence; empty: as the reference
    problem: str


def check_device(device: torch.device, shapes: Shapes, only: str | None = None) -> Iterator[Finding]:
    """Runs each operation that serving may need, and compares. A check that raises has a problem, too.

    Args:
        only: the name of one check; None: all.
    """
    for name, ours in _checks(shapes):
        if only in (None, name):
            yield Finding(name, _problem(ours, device))


def _checks(shapes: Shapes) -> Iterator[tuple[str, Callable[[torch.device], int]]]:
    """Names, and of how many requests an operation does something else on the device."""
    operation = block_rejection_sample if shapes.block else rejection_sample
    for dense in [False, True] if shapes.samples else [False]:
        for truncated in (False, True):
            name = "verification" + ", sampled drafts" * dense + ", truncated" * truncated
            yield name, partial(_verifies, shapes, operation if dense else rejection_sample, dense, truncated)
            if not dense:
                yield f"{name}, in place", partial(_verifies_in_place, shapes, truncated)
    yield "edits", partial(_edits, shapes)
    if shapes.samples:
        yield "noise", partial(_draws, shapes)
    if shapes.looks_up:
        yield "lookup", partial(_looks_up, shapes)
        yield "acceptance", partial(_rates, shapes)
    if shapes.trims:
        yield "budget", partial(_shares, shapes)


def _verifies(shapes: Shapes, operation: Callable[..., Any], dense: bool, truncated: bool, device: torch.device) -> int:
    blocks = operation is block_rejection_sample
    batch = _batch(shapes, _BLOCKS if blocks else _SAMPLED if dense else _ONE_HOT, dense, truncated)
    expected = operation(*batch, implementation="reference")
    ours = operation(*_moved(batch, device), implementation="fused")
    return int(((ours[0].cpu() != expected[0]).any(1) | (ours[1].cpu() != expected[1])).sum())


def _verifies_in_place(shapes: Shapes, truncated: bool, device: torch.device) -> int:
    step = as_step(_batch(shapes, _ONE_HOT, truncated=truncated), prompts=4)
    operation: Callable[..., Any] = sample_step
    expected, ours = (
        operation(*step, implementation="reference"),
        operation(*_moved(step, device), implementation="fused"),
    )
    differs = [(own.cpu() != other).view(len(other), -1).any(1) for own, other in zip(ours, expected, strict=True)]
    return int(torch.stack(differs).any(0).sum())


def _edits(shapes: Shapes, device: torch.device) -> int:
    batch = _batch(shapes, _EDITED)
    # Grammars are vLLM's own to apply on V2.
    edits = make_edits(batch)._replace(grammar=None)
    assert edits.bad_words is not None
    said = edits.bad_words.history.flatten()
    drafts = said[torch.arange(len(batch.draft_token_ids)) % len(said)]
    arguments = (*batch._replace(draft_token_ids=drafts)[:5], edits, batch.max_num_draft)
    operation: Callable[..., Any] = adjust
    expected = operation(*arguments, implementation="reference")
    ours = operation(*_moved(arguments, device), implementation="fused").cpu()
    return int((~torch.isclose(ours, expected, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)).sum())


def _draws(shapes: Shapes, device: torch.device) -> int:
    batch = _batch(shapes, _DRAWN, truncated=True)
    rows = batch.idx_mapping.repeat_interleave(batch.cu_num_logits.diff())
    drawn_for = batch.target_logits, batch.positions, batch.sampling.at(rows)
    operation: Callable[..., Any] = sample_with_q
    ours, own_q = operation(*_moved(drawn_for, device), implementation="fused")
    expected, q = operation(*drawn_for, implementation="reference")
    is_drawn = drawn_for[2].temperature > 0  # or else there is no q
    return int(((ours.cpu() != expected) | ((own_q.cpu() != q).any(1) & is_drawn)).sum())


def _batch(shapes: Shapes, requests: Requests, dense: bool = False, truncated: bool = False) -> Batch:
    most = shapes.max_num_draft
    num_long = max(1, requests.num_long_rows // (most + 1))
    return make_spiky([most] * num_long + requests.short, shapes.vocab_size, shapes.dtype, dense, _SEED, truncated)


def _moved(value: Any, device: torch.device) -> Any:
    """Tensors of a tuple, or of `Sampling`, on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Sampling):
        return Sampling(*(_moved(field, device) for field in vars(value).values()))
    if isinstance(value, tuple):
        moved = [_moved(item, device) for item in value]
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    return value


def _problem(differing: Callable[[torch.device], int], device: torch.device) -> str:
    try:
        if differing(device) > 1:
            return "differs from its reference"
    except Exception as error:
        return problem_of(error)
    return ""


def problem_of(error: Exception) -> str:
    """Of a check that could not run, in one line."""
    return f"cannot run ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


def _looks_up(shapes: Shapes, device: torch.device, seed: int = 1) -> int:
    operation: Callable[..., Any] = history_match
    own, moved = (
        make_lookup(shapes.max_num_draft, seed=seed),
        _moved(make_lookup(shapes.max_num_draft, seed=seed), device),
    )
    expected = *operation(*own, implementation="reference"), own.texts.distances
    ours = *operation(*moved, implementation="fused"), moved.texts.distances
    # No sums, no ties: one that differs is one too many.
    return 2 * sum(bool((mine.cpu() != theirs).any()) for mine, theirs in zip(ours, expected, strict=True))


def _shares(shapes: Shapes, device: torch.device) -> int:
    host, differing = torch.device("cpu"), 0
    for share in make_shares(12, shapes.max_num_draft):
        pairs = zip(shared(share, "fused", device), shared(share, "reference", host), strict=True)
        differing += sum(not torch.equal(mine, theirs) for mine, theirs in pairs)
    return 2 * differing


def _rates(shapes: Shapes, device: torch.device, num_stages: int = 2) -> int:
    steps = make_steps(4, 20, num_stages, shapes.max_num_draft)
    found: dict[str, list[Any]] = {"reference": [], "fused": []}
    for name, results in found.items():
        there = device if name == "fused" else torch.device("cpu")
        state = new_state(num_stages, 41, shapes.max_num_draft, there)
        for slots, drafts, sampled, rejected in _moved(tuple(steps), there):
            accept_probs = torch.zeros_like(drafts.confidence)
            worth = num_worth(state, slots, drafts, 1, shapes.max_num_draft, implementation=name)
            predict(state, slots, drafts, accept_probs, name)
            learn(state, slots, sampled, rejected, name)
            results += [worth.cpu(), accept_probs.cpu()]
        results += [array.cpu() for array in state[:4]]
    pairs = zip(found["fused"], found["reference"], strict=True)
    # The chances of the last steps and what is known go by all of what was learned.
    return 2 * sum(not torch.allclose(mine, theirs, rtol=_TOLERANCE, atol=_TOLERANCE) for mine, theirs in pairs)
