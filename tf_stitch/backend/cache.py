"""Machine code kept on disk between runs, by a hash of everything that goes into it.

``TF_STITCH_CACHE`` sets the folder.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import platformdirs

log = logging.getLogger("tf_stitch")

FOLDER = "TF_STITCH_CACHE"  # names the folder
MOST_BYTES = 4 << 30  # of one kind of files; those that were not used for longest go
LOOK_EVERY = 64  # files written by a process between looks at how much there is
INCLUDE = Path(__file__).resolve().parent.parent / "codegen" / "include"


def cache_folder() -> Path:
    """Where compiled code is kept between runs."""
    return Path(os.environ.get(FOLDER) or platformdirs.user_cache_dir("tf_stitch", appauthor=False))


_complained: set[Path] = set()  # folders that it was said of that they cannot be written


class Cache:
    """Machine code by key: a file each, with a checksum after its contents.  Works without a writable folder."""

    def __init__(self, kind: str, suffix: str) -> None:
        self.kind, self.suffix = kind, suffix
        self._written = 0

    def _path(self, key: str) -> Path:
        return cache_folder() / self.kind / key[:2] / f"{key}{self.suffix}"

    def get(self, key: str) -> bytes | None:
        """The code under a key, or None; a damaged file counts as none."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):  # of a folder that is read only
            os.utime(path)
        code, digest = data[:-32], data[-32:]
        return code if hashlib.sha256(code).digest() == digest else None

    def put(self, key: str, code: bytes) -> None:
        """Keeps code under a key; says so once, whatever the kind, when the folder cannot be written."""
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd, name = tempfile.mkstemp(dir=path.parent, prefix=".new")
            try:
                with os.fdopen(fd, "wb") as f:
                    f.write(code + hashlib.sha256(code).digest())
                os.replace(name, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
            if self._written % LOOK_EVERY == 0:
                _remove_oldest(cache_folder() / self.kind)
            self._written += 1
        except OSError as error:
            if cache_folder() not in _complained:
                _complained.add(cache_folder())
                log.warning("The cache folder %s cannot be written (%s); kernels are compiled anew each time. "
                            "Set TF_STITCH_CACHE to a folder that can be written.", cache_folder(), error.strerror)


def _remove_oldest(folder: Path) -> None:
    """Leaves MOST_BYTES in a folder.  Other processes may use it meanwhile: what they miss they make anew."""
    files: list[tuple[float, int, Path]] = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                found = path.stat()
                files.append((found.st_mtime, found.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= MOST_BYTES:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size


@functools.lru_cache(maxsize=1)
def _headers(stamp: tuple) -> bytes:
    return b"".join(path.name.encode() + path.read_bytes() for path in sorted(INCLUDE.glob("*.h")))


def key_of(parts: Iterable[str]) -> str:
    """The key of code that comes from ``parts`` (compiler, flags, text) and the headers."""
    h = hashlib.sha256()
    for part in parts:
        h.update(part.encode() + b"\0")
    h.update(_headers(tuple((p.name, p.stat().st_mtime_ns) for p in sorted(INCLUDE.glob("*.h")))))
    return h.hexdigest()


def stamp(paths: Iterable[str]) -> str:
    """What tells files from earlier ones of their names without reading them; those that are not there are left out."""
    out = []
    for path in paths:
        with contextlib.suppress(OSError):
            found = os.stat(path)
            out.append(f"{path} {found.st_size} {found.st_mtime_ns}")
    return "\n".join(out)


def first_error(text: str) -> str:
    """The first line of a compiler's output that tells of an error, or what comes nearest."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it gave no message"])[0]
