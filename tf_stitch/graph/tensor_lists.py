"""What the elements of tensor lists are: loops hand their intermediate results to their gradients in such lists.

A list is a value: pushing makes a new one.  So what a reader may get is found by walking backward from the list
it reads, through the ops that pass lists on, and noting what was put in on the way.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .view import GraphView, Ref

PASS_ON = frozenset({
    "Identity", "Switch", "Merge", "Enter", "Exit", "NextIteration", "TensorListPushBack", "TensorListPopBack",
    "TensorListSetItem", "TensorListResize", "StopGradient",
})
SOURCES = frozenset({"EmptyTensorList", "TensorListReserve"})
PUSHED = {"TensorListPushBack": 1, "TensorListSetItem": 2}  # index of the operand that becomes an element
READERS = {"TensorListPopBack": 1, "TensorListGetItem": 0}  # port that gives an element


def elements(view: GraphView) -> dict[Ref, tuple[Ref, ...]]:
    """For each value read from a list, the values that were put into lists it may come from.

    A reader whose list may come from elsewhere (an argument, a call) is left out.
    """
    out = {}
    for n in view:
        if n.op in READERS and n.inputs:
            found = _pushed(view, n.inputs[0])
            if found:
                out[n.name, READERS[n.op]] = found
    return out


def _pushed(view: GraphView, start: Ref) -> tuple[Ref, ...]:
    """Everything put into the lists that can be ``start``; () when one of them is not known."""
    found: dict[Ref, None] = {}
    seen, stack = {start}, [start]
    while stack:
        n = view.nodes.get(stack.pop()[0])
        if n is None or n.op not in PASS_ON | SOURCES:
            return ()
        if n.op in PUSHED:
            found[n.inputs[PUSHED[n.op]]] = None
        sources = n.inputs if n.op == "Merge" else n.inputs[:1] if n.op in PASS_ON else ()
        new = [ref for ref in sources if ref not in seen]
        seen.update(new)
        stack.extend(new)
    return tuple(found)
