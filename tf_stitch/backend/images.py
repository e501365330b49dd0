"""Machine code for a GPU as several images: each was compiled by itself, and is loaded by itself.

One image is its own bytes.  Several are MAGIC, then for each, little-endian: 4 bytes, how long its kernels' names are;
8 bytes, how long its code is; the names, with spaces between; the code.  custom_ops/cuda_code.cc reads the same.
"""
from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import CompileError

MAGIC = b"tf_stitch images\n"
_SIZES = struct.Struct("<IQ")


class Image(NamedTuple):
    """The names of kernels, all of them where there is one image only, and their code."""

    names: tuple[str, ...]
    code: bytes


def pack(images: Sequence[Image]) -> bytes:
    """The bytes of images."""
    if len(images) == 1:
        return images[0].code
    out = [MAGIC]
    for image in images:
        names = " ".join(image.names).encode()
        out += (_SIZES.pack(len(names), len(image.code)), names, image.code)
    return b"".join(out)


def unpack(data: bytes) -> list[Image]:
    """The images in bytes; the names are left out where there is one.  Raises CompileError when some are missing."""
    if not data.startswith(MAGIC):
        return [Image((), data)]
    out: list[Image] = []
    at = len(MAGIC)
    while at < len(data):
        if len(data) - at < _SIZES.size:
            raise CompileError("A GPU's machine code ends in the middle of an image.")
        named, coded = _SIZES.unpack_from(data, at)
        begin = at + _SIZES.size
        at = begin + named + coded
        if at > len(data):
            raise CompileError("A GPU's machine code ends in the middle of an image.")
        out.append(Image(tuple(data[begin:begin + named].decode().split()), data[begin + named:at]))
    return out
