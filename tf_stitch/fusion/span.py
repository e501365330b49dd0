"""Work/span analysis of a graph (FusionStitching, arXiv 1811.05213, section 4.1).

The *span* of a node is its longest dependence distance from the roots (the nodes that the outputs name):
nodes of one span form a *layer*, and no node of a layer can depend on another of the same layer.  *Work* is
what the graph costs on one processor, so ``work / critical path`` bounds the useful parallelism.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Spans(Generic[T]):
    """Distances in a DAG, in the unit of the weights (one per node unless weights were given).

    Attributes:
      span: longest distance from a root (a node without users) to the node; 0 for the roots.
      depth: longest distance from a source (a node without operands) to the node; 0 for the sources.
      work: the sum of all weights.
    """

    span: Mapping[T, int]
    depth: Mapping[T, int]
    work: int

    @property
    def critical_path(self) -> int:
        """The longest path of the DAG, end to end."""
        return max((self.length_through(n) for n in self.span), default=0)

    def length_through(self, node: T) -> int:
        """The longest path that passes through ``node``."""
        return self.span[node] + self.depth[node]

    def layers(self) -> list[list[T]]:
        """Nodes grouped by span, roots first; inside a layer those on the longest paths come first."""
        by_span: dict[int, list[T]] = {}
        for n, s in self.span.items():
            by_span.setdefault(s, []).append(n)
        return [sorted(by_span[s], key=lambda n: -self.depth[n]) for s in sorted(by_span)]


def spans(order: Sequence[T], operands: Callable[[T], Iterable[T]],
          weight: Callable[[T], int] = lambda _: 1) -> Spans[T]:
    """Spans of a DAG given in topological ``order`` (operands first); operands outside ``order`` are ignored."""
    known = set(order)
    reads = {n: [i for i in operands(n) if i in known] for n in order}
    span = dict.fromkeys(order, 0)
    depth = dict.fromkeys(order, 0)
    for n in order:
        depth[n] = max((depth[i] + weight(i) for i in reads[n]), default=0)
    for n in reversed(order):
        for i in reads[n]:
            span[i] = max(span[i], span[n] + weight(n))
    return Spans(span, depth, sum(weight(n) for n in order))
