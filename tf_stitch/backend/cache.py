"""Machine code kept on disk between runs, by a hash of everything that goes into it.

``TF_STITCH_CACHE`` sets the folder, ``TF_STITCH_CACHE_BYTES`` how much of each kind is kept.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import platformdirs

log = logging.getLogger("tf_stitch")

FOLDER = "TF_STITCH_CACHE"  # names the folder
LIMIT = "TF_STITCH_CACHE_BYTES"  # says how much is kept
MOST_BYTES = 4 << 30  # of one kind of files, where nothing says it; those that were not used for longest go
LOOK_EVERY = 64  # files written by a process between looks at how much there is
INCLUDE = Path(__file__).resolve().parent.parent / "codegen" / "include"


def cache_folder() -> Path:
    """Where compiled code is kept between runs."""
    return Path(os.environ.get(FOLDER) or platformdirs.user_cache_dir("tf_stitch", appauthor=False))


def most_bytes() -> int:
    """Bytes of one kind of files that are kept."""
    text = os.environ.get(LIMIT, "")
    if text and not text.isdecimal():
        _complain(LIMIT, f"{LIMIT} is '{text}', which is no number of bytes; {MOST_BYTES} are kept.")
    return int(text) if text.isdecimal() else MOST_BYTES


@functools.cache
def _complain(about: str, warning: str) -> None:
    """Logs a warning once."""
    log.warning("%s", warning)


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
                remove_oldest(p for p in (cache_folder() / self.kind).rglob("*") if p.is_file())
            self._written += 1
        except OSError as error:
            if cache_folder() not in _complained:
                _complained.add(cache_folder())
                log.warning("The cache folder %s cannot be written (%s); kernels are compiled anew each time. "
                            "Set TF_STITCH_CACHE to a folder that can be written.", cache_folder(), error.strerror)


def remove_oldest(paths: Iterable[Path], spared_s: float = 0.0) -> None:
    """Leaves :func:`most_bytes` of files and folders: what was not used for longest goes, by its time of change.

    What was used in the last ``spared_s`` seconds stays.  Other processes may use them meanwhile: what they miss they
    make anew.
    """
    found: list[tuple[float, int, Path]] = []
    for path in paths:
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, _bytes_of(path), path))
    total, most = sum(size for _, size, _ in found), most_bytes()
    for used, size, path in sorted(found):
        if total <= most or used > time.time() - spared_s:
            return
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
        total -= size


def _bytes_of(path: Path) -> int:
    if not path.is_dir():
        return path.stat().st_size
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


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
