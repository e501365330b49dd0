"""Puts the op into a TensorFlow Serving checkout, so that its model server has it linked in.

    python custom_ops/serving_sources.py CHECKOUT          (or: make serving-sources DEST=CHECKOUT)

Copies BUILD and the sources to tensorflow_serving/custom_ops/tf_stitch and adds the target to SUPPORTED_TENSORFLOW_OPS
in tensorflow_serving/model_servers/BUILD (tensorflow_serving/g3doc/custom_op.md).  May be run again: then it brings
the copy up to date.
"""
from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from check_includes import HERE, served

FOLDER = Path("tensorflow_serving") / "custom_ops" / "tf_stitch"
SERVER = Path("tensorflow_serving") / "model_servers" / "BUILD"
LIST = "SUPPORTED_TENSORFLOW_OPS"
TARGET = "//tensorflow_serving/custom_ops/tf_stitch:tf_stitch_ops"


class ServingError(Exception):
    """The checkout cannot be used; one sentence says why."""


def put(checkout: Path) -> bool:
    """Copies and registers; returns whether the server's BUILD file had to be changed.  Raises ServingError."""
    server = checkout / SERVER
    if not server.is_file():
        raise ServingError(f"'{checkout}' is no TensorFlow Serving checkout: it has no {SERVER}.")
    text = server.read_text(encoding="utf-8")
    changed = with_target(text, str(server))
    try:
        folder = checkout / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        files = {p.name: p.read_bytes() for p in [HERE / "BUILD", *served()]}
        for old in folder.iterdir():
            if old.suffix in (".cc", ".h") and old.name not in files:
                old.unlink()
        for name, data in files.items():
            path = folder / name
            if not path.exists() or path.read_bytes() != data:  # what is equal keeps its time
                path.write_bytes(data)
        if changed != text:
            server.write_text(changed, encoding="utf-8")
    except OSError as error:
        raise ServingError(f"'{error.filename}' cannot be written: {error.strerror}.") from None
    return changed != text


def with_target(text: str, path: str = SERVER.name) -> str:
    """A BUILD file's text with the target at the end of SUPPORTED_TENSORFLOW_OPS."""
    start = text.find(f"\n{LIST} =") + 1
    if not start:
        raise ServingError(f"'{path}' does not set {LIST}; add \"{TARGET}\" to the ops of its server by hand.")
    end = _statement_end(text, start)
    if f'"{TARGET}"' in text[start:end]:
        return text
    if end <= start or text[end - 1] != "]":
        raise ServingError(f"{LIST} in '{path}' does not end with a list; add \"{TARGET}\" to it by hand.")
    before = text[start:end - 1].rstrip()
    comma = "" if before.endswith((",", "[")) else ","
    return f'{text[:start]}{before}{comma}\n    "{TARGET}",\n{text[end - 1:]}'


def _statement_end(text: str, start: int) -> int:
    """Where the statement ends that begins at ``start``: the first line end outside brackets, strings and comments."""
    depth, quote, at = 0, "", start
    while at < len(text):
        c = text[at]
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c == "#":
            at = text.find("\n", at) - 1 if "\n" in text[at:] else len(text)
        elif c in "[(":
            depth += 1
        elif c in "])":
            depth -= 1
        elif c == "\n" and depth == 0:
            break
        at += 1
    return len(text[:at].rstrip())


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1 or not argv[0]:
        print("Give the folder of a TensorFlow Serving checkout: make serving-sources DEST=FOLDER", file=sys.stderr)
        return 2
    try:
        changed = put(Path(argv[0]))
    except ServingError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Sources: {Path(argv[0]) / FOLDER}\n{LIST}: {'target added' if changed else 'target was there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
