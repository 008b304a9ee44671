"""Files of ours: read without waiting for whoever may write, and written whole or not at all, for their owner alone."""

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

BEGUN, PARTIAL = ".files.", ".partial"  # how names of what is being saved begin and end
LONGEST_PREFIX = 60  # characters of a file's name that the name of its successor begins with


def open_regular(path: Path, flags: int) -> int:
    """A descriptor of a regular file, a new one with mode 0600; OSError where there is none, or something else."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file")
    return descriptor


def read_regular(path: Path, max_bytes: int) -> bytes:
    """What a file holds, up to so many bytes; OSError as of open_regular."""
    descriptor = open_regular(path, os.O_RDONLY)
    try:
        return read_all(descriptor, max_bytes)
    finally:
        os.close(descriptor)


def read_all(descriptor: int, max_bytes: int) -> bytes:
    """The same of an open file, from its beginning."""
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return file.read(min(max_bytes, os.fstat(descriptor).st_size))


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of it, however many calls that takes; OSError, after a part of it perhaps, where that fails."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_whole(path: Path, data: bytes) -> int:
    """A descriptor of a new file with this in it, which is on the disk and has taken the place of `path`, or of what
    that links to.

    It is written under a name of its own and follows no link: whoever else writes to the folder spoils nothing.
    OSError where that fails; the old file is then there.
    """
    path = Path(os.path.realpath(path))
    descriptor, partial = tempfile.mkstemp(PARTIAL, prefix_of(path), path.parent)
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
    """A folder that files are saved to: by one process at a time, from its first save until it closes this, or ends."""

    def __init__(self, path: Path):
        self.path, self._descriptor = path, -1

    def replace(self, save: Callable[[Path], object]) -> None:
        """Has `save` write files into the folder, all or none: they are written beside, under a name of this call's
        alone, and moved there when they are whole. What a process that was killed has left there goes.

        OSError, or what `save` raises, where that fails, or another process saves to the folder.
        """
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
        """Lets other processes save there."""
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
    """Has this process alone hold an open file or folder until it is closed, if the file system knows such a thing.

    BlockingIOError where another process holds it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(errno.EAGAIN, "another process writes to it") from None
    except OSError:
        pass


def prefix_of(path: Path) -> str:
    """How the name of what write_whole writes to begins; that of a process that was killed is left there."""
    return f".{path.name[:LONGEST_PREFIX]}."
