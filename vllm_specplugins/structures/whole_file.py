"""Writes files and folders completely or not at all."""

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
MAX_PREFIX = 60  # characters of a file's name in the name of its successor, which must not be too long


def open_regular(path: Path, flags: int) -> int:
    """Opens a regular file, or creates one with mode 0600, and returns its descriptor. Raises OSError for other kinds
    of files."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file")
    return descriptor


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Reads the beginning of a file, up to max_bytes. Raises OSError as open_regular does."""
    descriptor = open_regular(path, os.O_RDONLY)
    try:
        return read_all(descriptor, max_bytes)
    finally:
        os.close(descriptor)


def read_all(descriptor: int, max_bytes: int) -> bytes:
    """Reads the beginning of an open file, up to max_bytes."""
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return file.read(min(max_bytes, os.fstat(descriptor).st_size))


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of the data, in several calls if necessary. After an OSError, a part may have been written."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_whole(path: Path, data: bytes) -> int:
    """Replaces `path`, or the file that it links to, by a new file with this data, synced to the disk, and returns its
    descriptor. If that fails, raises OSError, and the old file stays."""
    path = Path(os.path.realpath(path))
    partial = path.with_name(f".{path.name[:MAX_PREFIX]}{PARTIAL}")
    partial.unlink(missing_ok=True)  # a killed process may have left it
    descriptor = open_regular(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
        os.replace(partial, path)
    except BaseException:
        os.close(descriptor)
        with suppress(OSError):
            os.unlink(partial)
        raise
    return descriptor


class SavedFolder:
    """A folder to which one process at a time saves files, from its first save until it closes this object or ends."""

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
