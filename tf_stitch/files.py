"""Files that appear whole or not at all."""
from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file under another name and renames it; what is no plain file (a pipe, /dev/stdout) is written to.

    Raises OSError; what was there before is there still then.
    """
    goal = Path(os.path.realpath(path))  # of a link, what it leads to is replaced
    if goal.exists() and not goal.is_file():
        goal.write_bytes(data)
        return
    new = goal.with_name(f".{goal.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        new.write_bytes(data)
        os.replace(new, goal)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
