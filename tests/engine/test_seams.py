"""The lists of seams against what our sources use, and against sources that use more."""

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest
import seam_uses
from conftest import RUNNER

from vllm_specplugins.engine.versions import compat

pytestmark = pytest.mark.skipif(RUNNER == "v2", reason="the same on both runners")


def unlisted(uses: Iterable[seam_uses.Use]) -> list[str]:
    listed = {seam.name for seam in compat.SEAMS}
    listed |= {name.partition(".")[0] for name in listed}
    return [f"{use.where}: {use.text} {use.names}" for use in uses if not listed.intersection(use.names)]


def test_every_use_is_listed() -> None:
    """Kills: any seam that is taken out of the lists, if it is one that the collector can see."""
    found = list(seam_uses.uses())
    assert unlisted(found) == []
    assert len({name for use in found for name in use.names}) > 150


NEW_CLASS = """
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
class New(DraftModelSpeculator):
    def {}(self):
        self.{}
"""


@pytest.mark.parametrize(
    "source",
    [
        "from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id",
        "from vllm import PoolingParams",
        "import_module('vllm.v1.worker.xpu_worker.XPUWorker')",
        "runner.kv_caches",
        "runner.kv_caches = []",
        "self._runner.input_batch.num_tokens_after_padding",
        "anything.of_nobody_known()",
        NEW_CLASS.format("sample_draft", "device"),
        NEW_CLASS.format("ours", "eplb_state"),
    ],
)
def test_more_is_seen(source: str) -> None:
    """Kills: a collector that overlooks an import, a name in a string, an attribute, an override."""
    uses = seam_uses.uses_in(seam_uses.ENGINE / "new.py", ast.parse(source), seam_uses.known_attributes())
    assert len(unlisted(uses)) == 1


def test_functions_are_listed_with_parameters() -> None:
    """Kills: a seam whose function may change its parameters without a word."""
    import vllm

    package = Path(vllm.__path__[0])
    modules = {seam.file: ast.parse((package / seam.file).read_text()) for seam in compat.SEAMS}
    for seam in compat.SEAMS:
        found = compat._find(modules[seam.file], seam.name)
        assert found is not None
        if compat._parameters(found) is not None:
            assert seam.parameters is not None or seam.name in VARIED, seam.name


VARIED = {  # between the versions that we support
    "dispatch_cg_and_sync_dp",
    "DraftModelSpeculator.max_model_len",
}
