"""What budgets of verification go by: drafts that are expected, and drafting that is done."""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_specplugins.engine.v2.exit_costs import ExitCosts
from vllm_specplugins.engine.v2.forecast import Forecast

NOTHING, FOUND = [0.0, 0.0, 0.0], [0.9, 0.8, 0.0]


def expected(forecast: Forecast, slots: list[int], steps: list[list[list[float]]]) -> np.ndarray:
    """Of the last of these steps, by request."""
    confidences = np.zeros((4, 3))
    for step in steps:
        confidences[slots] = step
        forecast.apply(confidences, np.array(slots))
    return confidences[slots]


def test_a_request_is_expected_to_find_what_it_found() -> None:
    """Fails if one that never finds anything gets a budget, if what one finds is another's or a former request's, or if
    a step in which something was found tells of one in which nothing was."""
    forecast, turns = Forecast(4, 3), [[NOTHING, NOTHING, FOUND], [FOUND, NOTHING, FOUND]] * 20
    often, never, always = expected(forecast, [2, 0, 3], [*turns, [NOTHING, NOTHING, NOTHING]])
    assert often.cumprod() == pytest.approx([0.9, 0.72, 0.0], abs=0.02)
    assert never.tolist() == always.tolist() == NOTHING
    forecast.clear(2)
    assert expected(forecast, [2], [[NOTHING]])[0].tolist() == NOTHING


def test_confidences_stay_chances() -> None:
    """What is there is never lowered. Fails if a product of confidences grows along a draft."""
    rng, forecast = np.random.default_rng(0), Forecast(4, 3)
    for _ in range(200):
        own = rng.random((4, 3)) * (rng.random((4, 1)) < 0.5)
        raised = own.copy()
        forecast.apply(raised, np.arange(4))
        assert (raised.cumprod(axis=1) >= own.cumprod(axis=1) - 1e-12).all()
        assert (raised <= 1 + 1e-12).all() and (raised >= 0).all()


def test_costs_of_what_is_drafted() -> None:
    """Fails if a share is taken of a share, or if tables that are timed anew are not seen."""
    costs, manager = ExitCosts(), SimpleNamespace(cost_tables=None)
    assert costs.of(None, 1) is None and costs.of(manager, 1) is None
    for whole_ms in (8.0, 2.0):
        manager.cost_tables = np.array([0.0, whole_ms]), np.array([0.0, 5.0, 6.0])
        for share in (0.5, 0.25, 1.0):
            draft_ms, verify_ms = costs.of(manager, 1) or (0.0, None)
            assert draft_ms == whole_ms and verify_ms.tolist() == [0.0, 5.0, 6.0]
            costs.expect(manager, share)
            assert manager.cost_tables[0].tolist() == [0.0, share * whole_ms]
