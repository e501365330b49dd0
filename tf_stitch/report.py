"""What a rewrite did: numbers, reasons, and the graph of stitched groups, as text, JSON or HTML."""
from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import IO, Any


@dataclass(frozen=True)
class LeftNode:
    """A node that stays TensorFlow's.  ``contraction``: a MatMul, Conv or pool (not counted in the coverage)."""

    node: str
    op: str
    reason: str
    contraction: bool = False


@dataclass(frozen=True)
class ClusterReport:
    """One StitchedProgram node.

    Attributes:
      name: of the StitchedProgram node.
      nodes: (name, op) of the TensorFlow nodes that it replaces.
      compute_ops: how many of them do work (shapes, reshapes and identities do not).
      kernels: for each kernel, the TensorFlow node that its last result comes from; for a grid kernel also its phases.
      inputs, outputs: tensors that it reads and hands on.
      guards: conditions checked at run time (else the original nodes run).
    """

    name: str
    nodes: list[tuple[str, str]]
    compute_ops: int
    kernels: list[str]
    inputs: list[str]
    outputs: list[str]
    guards: int = 0


@dataclass(frozen=True)
class GraphReport:
    """One graph or function.

    Attributes:
      name: of the function; "" for the main graph.
      untouched: why the whole graph was left as it was, or None; its compute ops then count as left.
      nodes_before, nodes_after: number of nodes.
      free_ops: compute ops outside MatMul, Conv and pools: what the coverage is measured against.
      clusters, left: what was stitched, what was not.
      edges: data edges between clusters and left nodes, by name.
    """

    name: str
    untouched: str | None
    nodes_before: int
    nodes_after: int
    free_ops: int
    clusters: list[ClusterReport]
    left: list[LeftNode]
    edges: list[tuple[str, str]]


@dataclass
class Report:
    """What a rewrite did.

    ``errors`` holds the worst error per output after a verification; ``notes`` are sentences on what a user may not
    expect; ``seconds`` is how long it took, the compilers' time included; ``failures`` says of each program
    that did not compile why.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    @property
    def clusters(self) -> list[ClusterReport]:
        return [c for g in self.graphs for c in g.clusters]

    @property
    def left(self) -> list[LeftNode]:
        return [n for g in self.graphs for n in g.left]

    @property
    def kernels(self) -> int:
        """Generated kernels that the stitched ops launch in all."""
        return sum(len(c.kernels) for c in self.clusters)

    @property
    def stitched_ops(self) -> int:
        """Compute ops that became part of a stitched op."""
        return sum(c.compute_ops for c in self.clusters)

    @property
    def ops_before(self) -> int:
        """Compute ops (a kernel launch each in TensorFlow) before."""
        return self.stitched_ops + len(self.left)

    @property
    def ops_after(self) -> int:
        """Compute ops after: those left, and one op per cluster."""
        return len(self.left) + len(self.clusters)

    @property
    def kernels_after(self) -> int:
        """Kernel launches after: the ops left and the kernels of the stitched ops."""
        return len(self.left) + self.kernels

    @property
    def coverage(self) -> float:
        """Share of the compute ops outside MatMul, Conv and pools that are stitched (1.0 when there are none).

        Counted are the nodes of the main graph and of every function of its library, those of functions left whole
        included, but for: matrix products, convolutions, pools and their gradients; ops that do no work (Const,
        Placeholder, Identity, NoOp, Shape, Reshape, ExpandDims, reading and assigning variables, control flow,
        calls); functions that save or restore checkpoints; and what no result needs, which TensorFlow never runs.
        """
        free = sum(g.free_ops for g in self.graphs)
        return self.stitched_ops / free if free else 1.0

    def reasons(self) -> list[tuple[str, int, list[str]]]:
        """(reason, number of nodes, op types) of what was left, most frequent first."""
        count: Counter[str] = Counter(n.reason for n in self.left)
        ops: dict[str, Counter[str]] = {}
        for n in self.left:
            ops.setdefault(n.reason, Counter())[n.op] += 1
        return [(r, k, [op for op, _ in ops[r].most_common()]) for r, k in count.most_common()]

    def untouched(self) -> list[tuple[str, str]]:
        """(function, reason) of graphs that were left whole."""
        return [(g.name or "main graph", g.untouched) for g in self.graphs if g.untouched]

    def extend(self, other: Report) -> None:
        """Adds another report's graphs and errors."""
        self.graphs.extend(other.graphs)
        self.errors.update(other.errors)
        self.notes.extend(other.notes)
        self.seconds += other.seconds
        self.failures += other.failures

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the derived numbers."""
        numbers = {k: getattr(self, k) for k in
                   ("ops_before", "ops_after", "kernels", "kernels_after", "stitched_ops", "coverage")}
        return {**numbers, "seconds": round(self.seconds, 3), "errors": self.errors,
                "notes": self.notes, "graphs": [asdict(g) for g in self.graphs]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        """The report that :meth:`to_dict` gave these data of."""
        graphs = [GraphReport(**{**g, "clusters": [_cluster(c) for c in g["clusters"]],
                                 "left": [LeftNode(**n) for n in g["left"]],
                                 "edges": [tuple(e) for e in g["edges"]]}) for g in data["graphs"]]
        return cls(graphs, data["errors"], data["notes"], data["seconds"])

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def summary(self) -> str:
        """One line."""
        if not self.ops_before:
            return "There is nothing to stitch."
        verb = "replaces" if len(self.clusters) == 1 else "replace"
        return (f"{_count(len(self.clusters), 'stitched op')} with {_count(self.kernels, 'kernel')} {verb} "
                f"{_count(self.stitched_ops, 'TensorFlow op')} "
                f"({self.coverage:.0%} of those outside MatMul, Conv and pools); "
                f"ops {self.ops_before} -> {self.ops_after}, kernels {self.ops_before} -> {self.kernels_after}")

    def to_text(self, limit: int = 40) -> str:
        """Tables: what is stitched, what is not and why, the verification.  ``limit``: rows per table."""
        text = io.StringIO()
        self.print(text, limit)
        return text.getvalue()

    def print(self, file: IO[str] | None = None, limit: int = 40) -> None:
        """Prints :meth:`to_text`, to standard output where no file is given; in colour to a terminal."""
        from rich.console import Console

        console = Console(file=file, highlight=False, soft_wrap=False)
        if not console.is_terminal:
            console.width = 160  # a file has no width
        console.print(self.summary())
        for note in self.notes:
            console.print(note)
        for table in self._tables(limit):
            if table.row_count:
                console.print(table)

    def _tables(self, limit: int) -> Iterable[Any]:
        from rich.table import Table

        def table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
            more = f" (first {limit} of {len(rows)})" if len(rows) > limit else ""
            made = Table(title=title + more, title_justify="left")
            for c in columns:
                made.add_column(c, overflow="fold")
            for r in rows[:limit]:
                made.add_row(*r)
            return made

        yield table("Stitched", ["op", "in", "TF ops", "kernels", "of which"], [
            [c.name, g.name or "main graph", str(c.compute_ops), str(len(c.kernels)), _op_list(op for _, op in c.nodes)]
            for g in self.graphs for c in g.clusters])
        yield table("Left to TensorFlow", ["reason", "nodes", "ops"], [
            [reason, str(count), ", ".join(ops[:8]) + (" ..." if len(ops) > 8 else "")]
            for reason, count, ops in self.reasons()])
        yield table("Graphs left whole", ["graph", "reason"], [list(u) for u in self.untouched()])
        yield table("Verification", ["output", "largest error relative to the output's largest value"],
                    [[k, f"{v:.2e}"] for k, v in self.errors.items()])

    def to_html(self, title: str = "tf_stitch report") -> str:
        """A self-contained page (no external assets) with the groups drawn as a graph."""
        from .report_html import page

        return page(self, title)


def _cluster(data: dict[str, Any]) -> ClusterReport:
    return ClusterReport(**{**data, "nodes": [tuple(n) for n in data["nodes"]]})


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _op_list(ops: Iterable[str]) -> str:
    return ", ".join(op if k == 1 else f"{op} x{k}" for op, k in Counter(ops).most_common(8))
