"""Opens and locks files, and saves folders as a whole or not at all."""

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

BEGUN, PARTIAL = ".files.", ".partial"  # prefix and suffix of a folder that is being saved


def open_regular(path: Path, flags: int) -> int:
    """Opens a regular file, or creates one with mode 0600, and returns its descriptor. Raises OSError for other kinds
    of files."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file")
    return descriptor


class SavedFolder:
    """A folder to which only one process saves files, from its first save until it closes this object or ends."""

    def __init__(self, path: Path):
        self.path, self._descriptor = path, -1

    def replace(self, save: Callable[[Path], object]) -> None:
        """Calls `save` with a temporary folder, and moves all files into place once they are written. Removes temporary
        folders that killed processes left. Raises OSError or the exception of `save` if that fails, and OSError if
        another process saves to the folder."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._hold()
        for left in self.path.glob(f"{BEGUN}*{PARTIAL}"):
            shutil.rmtree(left, ignore_errors=True)  # which follows no link
        partial = Path(tempfile.mkdtemp(PARTIAL, BEGUN, self.path))
        try:
            save(partial)
            for file in sorted(partial.iterdir()):
                os.replace(file, self.path / file.name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _hold(self) -> None:
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._descriptor), os.stat(self.path)):
                return
        self.close()
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            hold(self._descriptor)
        except OSError:
            self.close()
            raise


def hold(descriptor: int) -> None:
    """Locks an open file or folder for this process until it is closed, if the file system supports locks. Raises
    BlockingIOError if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(errno.EAGAIN, "another process writes to it") from None
    except OSError:
        pass
