"""Creates folders for tools and saves files to them; also takes evenly spaced samples of a range."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from vllm_specplugins.config import ConfigError
from vllm_specplugins.structures.whole_file import SavedFolder
from vllm_specplugins.tools.report import writing

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-specplugins"
CHAT_MODEL = CACHE / "SmolLM2-135M-Instruct-from-Q4_1"  # examples/chat_model.py makes it


def every_nth(count: int, wanted: int) -> list[int]:
    """Returns `wanted` evenly spaced indices of range(count), or all if there are fewer.

    >>> every_nth(10, 3)
    [1, 5, 8]
    """
    wanted = min(count, wanted)
    return [(2 * i + 1) * count // (2 * wanted) for i in range(wanted)]


def make_folder(path: Path) -> Path:
    """Creates the folder of --out if it is missing."""
    with writing("--out", "folder", path):
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def scratch(stays: Callable[[], bool] = lambda: False) -> Iterator[Path]:
    """Creates a temporary folder. It stays if a ConfigError or a report names a log in it."""
    folder = Path(tempfile.mkdtemp(prefix="specplugins-"))
    goes = True
    try:
        yield folder
        goes = not stays()
    except ConfigError:
        goes = False
        raise
    finally:
        if goes:
            shutil.rmtree(folder, ignore_errors=True)


def save_whole(folder: Path, save: Callable[[Path], object]) -> None:
    """Calls `save`, which writes all files to the folder or none (SavedFolder). Raises ConfigError if they cannot be
    written."""
    make_folder(folder)
    try:
        with closing(SavedFolder(folder)) as saved:
            saved.replace(save)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if it cannot write
        cause = getattr(error, "strerror", None) or (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"--out must be a folder on a disk with free space, not {folder} ({cause}).") from error
