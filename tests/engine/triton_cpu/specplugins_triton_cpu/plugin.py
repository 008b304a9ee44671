"""vLLM's plugin: the interpreter of tests/simulated_device in engine processes and workers, too."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "simulated_device" / "__init__.py"


def register() -> None:
    """In every process in which vLLM loads plugins; the tests' own has done it."""
    if "simulated_device" in sys.modules:
        return
    import_simulated_device()
    from simulated_device.interpreter import patch_interpreter
    from simulated_device.patches import Patches
    from simulated_device.vllm_cpu import patch_asynchronous

    patches = Patches()  # for good
    patch_interpreter(patches)
    patch_asynchronous(patches)


def import_simulated_device() -> None:
    """By its path: with tests/ on sys.path transformers would take tests/kernels for a package that it knows."""
    spec = spec_from_file_location("simulated_device", PACKAGE)
    assert spec is not None and spec.loader is not None
    sys.modules["simulated_device"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["simulated_device"])
