"""Writes docs/supported_ops.md from the table of lowerings.

    python docs/supported_ops.py          write it
    python docs/supported_ops.py --check  exit with 1 when it is out of date
"""
from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from tf_stitch.graph import lower
from tf_stitch.graph.lower.registry import ALL, BOOL, CONTRACTIONS, FLOAT, INT, METADATA, NUM, Lowering

PAGE = Path(__file__).resolve().with_suffix(".md")
KINDS = {ALL: "all", NUM: "numbers", FLOAT: "floats", INT: "integers", BOOL: "bool"}
HEAD = """\
# Supported TensorFlow ops

Written by `python docs/supported_ops.py`; do not edit.

Element types: float32, float64, float16, bfloat16, int8 to int64, uint8 to uint64 and bool, within the kinds given
below. Everything else (strings, resources, variants, complex and quantised types), tensors of unknown rank, and ops
that are not listed stay TensorFlow's; the report says why for each. "Constant operands" must be known while rewriting;
"shape operands" may depend on unknown dims. Ops marked "on a GPU" stay TensorFlow's in programs for a CPU.
"""


def _group(entry: Lowering) -> str:
    return entry.fn.__module__.rsplit(".", 1)[-1] if entry.fn else "shape"


def _operands(indices: tuple[int, ...]) -> str:
    return ", ".join("last" if i == -1 else str(i) for i in indices) or ""


def _kinds(entry: Lowering) -> str:
    return KINDS.get(entry.kinds) or ", ".join(sorted(entry.kinds))


def _row(entry: Lowering) -> str:
    name = f"{entry.op} (on a GPU)" if entry.on_gpu else entry.op
    cells = (name, _kinds(entry), _operands(entry.statics), _operands(entry.values))
    return "| " + " | ".join(cells) + " |"


def _names(ops: Iterable[str]) -> str:
    return ", ".join(sorted(ops)) or "none"


def page() -> str:
    """The page's text."""
    groups: dict[str, list[Lowering]] = {}
    for op in sorted(lower.REGISTRY):
        entry = lower.REGISTRY[op]
        if op not in CONTRACTIONS and entry.fn is not None:
            groups.setdefault(_group(entry), []).append(entry)
    parts = [HEAD, f"{sum(map(len, groups.values()))} ops can become part of a stitched kernel.\n"]
    for group in sorted(groups):
        parts.append(f"## {group.capitalize()}\n\n| op | element kinds | constant operands | shape operands |\n"
                     "| --- | --- | --- | --- |\n" + "\n".join(map(_row, groups[group])) + "\n")
    known = sorted(op for op in CONTRACTIONS if op in lower.REGISTRY)
    parts += [
        f"## Shapes and names\n\nThese give a tensor another name or shape and cost nothing: {_names(METADATA)}.\n",
        "On small integer tensors that come from shapes, these are computed as symbolic sizes while rewriting: "
        f"{_names(set(lower.SYMBOLIC) - METADATA)}.\n",
        "## Matrix products, convolutions and pools\n\nThey are not counted in the coverage. On a GPU these become "
        f"part of a program, by a call of cuBLASLt or cuDNN or in a kernel: {_names(known)}.\n",
        f"Always TensorFlow's: {_names(CONTRACTIONS - set(known))}.\n",
    ]
    return "\n".join(part if "|" in part else _wrapped(part) for part in parts)


def _wrapped(part: str) -> str:
    return "\n".join(textwrap.fill(line, 120, break_on_hyphens=False) for line in part.split("\n"))


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(not PAGE.exists() or PAGE.read_text() != page())
    PAGE.write_text(page())
