"""Opening files that somebody else wrote: regular ones only, and no more of them than was asked for.

For whoever reads checkpoints. A pipe would make its reader wait, a device never ends; both are errors here. Knows no
format.
"""

import errno
import os
import stat
from pathlib import Path
from typing import IO


def open_regular(path: Path) -> IO[bytes]:
    """The file, for reading. Raises ``OSError`` for what is no regular file, or cannot be a path at all."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # such as a name with a null character
        raise OSError(errno.EINVAL, "no name that a file can have") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def read_regular(path: Path, limit: int) -> bytes:
    """All bytes of the file. Raises ``OSError``, also where it has more than ``limit``."""
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes")
    return data
