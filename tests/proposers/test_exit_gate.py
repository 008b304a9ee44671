"""Whether an exit is worth its time."""

from vllm_specplugins.proposers.exit_gate import ExitGate

K, VERIFY_MS = 4, 10.0


def share_drafted(brings: float, draft_ms: float, found: float = 0.0, num_steps: int = 2000) -> float:
    """Of steps, where each emits one token of its own, and so many more by drafts of the exit, or by others without."""
    gate, has_drafted, drafted = ExitGate(K), False, 0
    for _ in range(num_steps):
        gate.add(8, round(8 * (1 + (brings if has_drafted else found))), has_drafted)
        has_drafted = gate.pays(draft_ms, VERIFY_MS)
        drafted += has_drafted
    return drafted / num_steps


def test_it_drafts_where_that_pays() -> None:
    """Fails if what the exit brings is not held against its time, or if there are more trials without it than pay."""
    assert share_drafted(brings=2, draft_ms=5) > 0.97
    assert share_drafted(brings=3, draft_ms=25) > 0.9, "2.5 tokens' time for 3 tokens"
    assert share_drafted(brings=3, draft_ms=2, found=1) > 0.97


def test_it_is_left_out_where_it_does_not() -> None:
    """But for a trial now and then, which costs a hundredth of the time. Fails if there is none, or more of them, or
    if what others find is not held against it."""
    for brings, draft_ms, found in ((0, 5.0, 0), (1, 20.0, 0), (2, 5.0, 1.9), (2, 5.0, 2)):
        share = share_drafted(brings, draft_ms, found)
        assert 0 < share * draft_ms / VERIFY_MS < 0.05, (brings, share)


def test_it_comes_back() -> None:
    """When texts change. Fails if what was known long ago is never forgotten."""
    gate, has_drafted, drafted = ExitGate(K), False, 0
    for step in range(1500):
        gate.add(1, 1 + (4 if step > 300 else 0) * has_drafted, has_drafted)
        has_drafted = gate.pays(5.0, VERIFY_MS)
        drafted += has_drafted and step >= 1000
    assert drafted > 450
