"""Translation units: kernels with the headers that give their text its meaning, as one self-contained text."""
from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path

from .kernel import Kernel

INCLUDE = Path(__file__).parent / "include"
SEPARATOR = "\n//\n"  # between the kernels of a text
TARGET_HEADER = {"host": "ts_host.h", "cuda": "ts_cuda.h"}
_INCLUDE_LINE = re.compile(r'^#include "(\w+\.h)"\s*$', re.M)

# How host text is compiled.  No contraction into FMAs: each op rounds, as TensorFlow's does, else sqrt(max(x*a) - x*a)
# is the root of a negative number where x*a is largest (polynomials ask for FMA, see ts_poly.h).  Not -ffast-math:
# NaN and Inf keep their meaning.  Integers wrap; buffers are reused with other element types, hence no strict aliasing.
# Jump threading would break up selects (clamps, say) before the loop is vectorised.
HOST_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fwrapv",
              "-fno-strict-aliasing", "-fno-thread-jumps", "-fopenmp-simd", "-fvisibility=hidden", "-fno-exceptions",
              "-fno-rtti", "-fno-asynchronous-unwind-tables", "-shared", "-fPIC", "-w")


def level_flags(level: str) -> tuple[str, ...]:
    """Flags besides -march for a code target such as "x86-64-v3".

    g++ 12 moves integers through MMX registers at x86-64-v2 and leaves them in use, which makes the next x87
    instruction (fmod, long double) give NaN: hence no MMX on x86.
    """
    if not level.startswith("x86-64"):
        return ()
    return ("-mno-mmx", "-mprefer-vector-width=512") if level == "x86-64-v4" else ("-mno-mmx",)


@functools.cache
def prelude(target: str) -> str:
    """The headers of a target ("host" or "cuda") as one text without includes of its own."""
    done: set[str] = set()

    def expand(name: str) -> str:
        if name in done:
            return ""
        done.add(name)
        text = (INCLUDE / name).read_text()
        return _INCLUDE_LINE.sub(lambda m: expand(m.group(1)), text)

    return expand(TARGET_HEADER[target])


def kernel_texts(text: str) -> dict[str, str]:
    """The text of each kernel of a joined text."""
    return {m[1]: part for part in text.split(SEPARATOR) if (m := re.match(r"TS_KERNEL\w*\((\w+)", part))}


def blocks_wanted(text: str) -> int:
    """How many blocks a kernel wants on a multiprocessor at once; 0 where it does not say."""
    m = re.match(r"TS_KERNEL_WIDE\(\w+, \d+, \d+, (\d+)\)", text)
    return int(m[1]) if m else 0


def translation_unit(kernels: Iterable[Kernel] | str, target: str = "host") -> str:
    """Text that a compiler takes as it is: headers, then every kernel once.

    ``kernels`` may also be kernel text already joined (Program.text).
    """
    if isinstance(kernels, str):
        return f"{prelude(target)}\n{kernels}"
    unique = {k.name: k.text for k in kernels}
    return "\n".join([prelude(target), *unique.values()])
