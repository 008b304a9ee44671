"""Fuzzing with Hypothesis: always the same examples, 200 of each test, or as many as SPECPLUGINS_FUZZ says (10000).

Nothing is remembered between runs.
"""

import os
from pathlib import Path

from hypothesis import HealthCheck, configuration, settings

configuration.set_hypothesis_home_dir(Path(__file__).parents[2] / ".cache" / "hypothesis")
settings.register_profile(
    "fuzz",
    max_examples=int(os.environ.get("SPECPLUGINS_FUZZ", "200")),
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
settings.load_profile("fuzz")
