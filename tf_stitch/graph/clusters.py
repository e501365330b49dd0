"""Finds the parts of a TensorFlow graph that become one StitchedProgram each.

A cluster is a convex set of nodes: no path leaves it and comes back, else the op would wait for itself.
Control edges count as paths, and so does the way from a turn of a loop to its end.  The method:

1. ``depth(v)`` is the largest number of *breaks* on a path to ``v``; a break is a node that stays
   TensorFlow's, or an edge between nodes that may not share an op (another device, loop, branch or run).
   Depth never falls along an edge.  So a path that leaves a set of nodes of equal depth and returns has
   equal depth all along: it meets no break, hence all of it lies in one connected component of nodes of
   that depth.  Taking whole components therefore never closes a cycle, however many are taken at once.
2. Neighbouring clusters of different depth are merged when an exact reachability test (one bit set per
   node) shows that no path runs between them outside.
   On a GPU, components of one depth are one cluster from the start (none reaches another), and clusters that only
   feed sinks (new values of variables) are merged too: enqueued kernels do not wait, and every op costs a launch.
3. What is left too small for an op of its own joins a cluster beside it, when neither waits for the other:
   one that reads the same tensor or feeds the same node, at the same depth; a few integers (a loop's counter)
   join at any depth.

Shape arithmetic (Shape, StridedSlice of it, Pack ...) and small constants are no members: they are copied
into each cluster that reads them, so that a cluster sees them symbolically; the originals stay while
something outside reads them.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..ir.dtypes import DTYPES
from ..options import Options
from . import devices, lower
from .control import CONTROL_FLOW, ENTER, EXIT, MERGE, NEXT, SWITCH, Context, Flow, contexts, is_back_edge
from .view import GraphView, NodeView, may_have_effects

Tensor = tuple[str, int]

SHAPE_OPS = frozenset({"Shape", "ShapeN", "Size", "Rank"})
# Ops that compute nothing: they hold, name, route or call.
PLUMBING = CONTROL_FLOW | {
    "Const", "Placeholder", "PlaceholderWithDefault", "_Arg", "_Retval", "_DeviceArg", "_DeviceRetval", "NoOp",
    "VarHandleOp", "ReadVariableOp", "AssignVariableOp", "VarIsInitializedOp", "VariableV2", "Variable", "Assert",
    "PartitionedCall", "StatefulPartitionedCall", "If", "While", "StatelessWhile", "Case",
    "StatelessCase", "_Send", "_Recv", "_HostSend", "_HostRecv", "StitchedProgram", "RestoreV2", "SaveV2",
    "MergeV2Checkpoints", "ShardedFilename", "StaticRegexFullMatch", "DisableCopyOnRead", "AssignAddVariableOp",
    "AssignSubVariableOp", "StitchedAssign", "StitchedRead", "StitchedGuard"}
SMALL_ELEMENTS = 64  # of an integer tensor that counts as shape arithmetic


Streams = frozenset[frozenset[str]]  # see _streams


@dataclass(frozen=True)
class NodeInfo:
    """What clustering needs to know of a node; ``why`` is the reason it stays TensorFlow's, or None."""

    name: str
    op: str
    inputs: tuple[Tensor, ...]
    controls: tuple[str, ...]
    device: str
    outputs: int
    why: str | None
    small_const: bool = False
    small_integer: bool = False  # every output is a small integer or boolean tensor
    symbolic: bool = False       # can be copied as shape arithmetic when all it reads is
    computes: bool = True        # does work: neither plumbing nor metadata
    pure: bool = False           # need not run when nothing reads it
    frame_name: str = ""
    needs: frozenset[frozenset[str]] = frozenset()  # what is fed when it is needed (see feeds.needs)


@dataclass(frozen=True)
class Cluster:
    """Nodes that become one op.

    Attributes:
      nodes: all nodes it computes, operands first: members and copies.
      copies: those of ``nodes`` whose originals stay while something else reads them.
      inputs: (node, port) read from outside.
      outputs: (member, port) read from outside.
      controls: nodes that must run before.
      device: placement of every member.
      compute_ops: members that do work.
    """

    nodes: tuple[str, ...]
    copies: frozenset[str]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    controls: tuple[str, ...]
    device: str
    compute_ops: int

    @functools.cached_property
    def members(self) -> tuple[str, ...]:
        return tuple(n for n in self.nodes if n not in self.copies)

    @property
    def root(self) -> str:
        """The member that names the op: the last one."""
        return self.members[-1]


@dataclass(frozen=True)
class LeftOut:
    """A node that stays TensorFlow's."""

    node: str
    op: str
    reason: str


@dataclass(frozen=True)
class Found:
    """Clusters in topological order, the nodes left to TensorFlow, and the nodes that are no longer needed."""

    clusters: list[Cluster]
    left: list[LeftOut]
    removed: frozenset[str]


def describe(view: GraphView, options: Options) -> list[NodeInfo]:
    """What :func:`find` needs to know of each node of a view."""
    infos = [_describe(view, n, options) for n in view]
    return _leave_host_integers(view, infos) if options.on_gpu else infos


def may_join(view: GraphView, name: str, options: Options) -> bool:
    """Whether a node of a view may be part of a cluster."""
    return next(i for i in describe(view, options) if i.name == name).why is None


def _leave_host_integers(view: GraphView, infos: list[NodeInfo]) -> list[NodeInfo]:
    """On a GPU, leaves out what computes the small integers that TensorFlow's ops read on the host."""
    why = {i.name: i.why for i in infos}
    small = {i.name for i in infos if i.small_integer and not i.small_const}
    again = True
    while again:
        again = False
        for i in reversed(infos):
            if i.name in small and why[i.name] is None and not _tells_of_data(view, i) \
                    and _read_on_host(view, i.name, why):
                why[i.name] = "TensorFlow computes on the host what its own ops read there"
                again = True
    return [replace(i, why=why[i.name]) for i in infos]


def _tells_of_data(view: GraphView, i: NodeInfo) -> bool:
    """Whether a small integer or truth value is computed from what lies on the device: it has to be fetched anyway."""
    types = {view.dtype(ref) for ref in i.inputs if i.op not in SHAPE_OPS and not _is_small_integer(view, ref)}
    return any(t == "bool" or (t in DTYPES and DTYPES[t].is_float) for t in types)


def _read_on_host(view: GraphView, name: str, why: Mapping[str, str | None]) -> bool:
    for reader, index, port in view.consumers(name):
        node = view[reader]
        if why.get(reader) is None:
            continue  # it may be stitched itself, and sees the value symbolically
        if devices.host_input(node.op, index, len(node.inputs)):
            return True
        routed = node.op in devices.ROUTING or lower.is_metadata(node.op)
        if view.dtype((name, port)) in devices.HOST_INTEGERS and (
                routed or (_is_small_integer(view, (reader, 0)) if view.num_outputs(reader) else False)):
            return True
    return False


def computes(op: str) -> bool:
    """False for ops that do no work: those that hold, name, route or call, and those that move no data."""
    return not (op in PLUMBING or lower.is_metadata(op))


def _describe(view: GraphView, n: NodeView, options: Options) -> NodeInfo:
    outputs = view.num_outputs(n.name)
    works = computes(n.op) and n.op not in view.library
    return NodeInfo(
        n.name, n.op, n.inputs, n.control_inputs, devices.home(view, n) if options.on_gpu else n.device, outputs,
        why_not(view, n, options),
        small_const=lower.is_literal(view, n),
        small_integer=all(_is_small_integer(view, (n.name, p)) for p in range(outputs)),
        symbolic=n.op in lower.SYMBOLIC or n.op == "BroadcastGradientArgs",
        computes=works, pure=_is_pure(n), frame_name=n.attr("frame_name", "") if n.op in ENTER else "")


def _is_pure(n: NodeView) -> bool:
    return not (n.is_arg or n.op in PLUMBING - {"Const"} or may_have_effects(n.op))


def why_not(view: GraphView, n: NodeView, options: Options) -> str | None:
    """The reason why a node stays TensorFlow's; None when it may be part of a cluster."""
    if n.is_arg or n.proto is None:
        return "an argument of the function"
    if n.op in options.skip_ops:
        return f"op {n.op} is in the option skip_ops"
    if lower.is_contraction(n.op) and not (options.on_gpu and lower.is_product(n.op)):
        return "a contraction stays TensorFlow's library call on this target"
    if lower.needs_gpu(n.op) and not options.on_gpu:
        return f"op {n.op} is taken on a GPU only"
    if devices.is_gpu(n.device) and not options.on_gpu:
        return f"it is placed on {n.device} and the target is the host"
    if options.on_gpu and n.op not in SHAPE_OPS and devices.is_cpu(devices.home(view, n)):  # shapes read no data
        return f"it is placed on {n.device} and the target is the GPU"
    if any(t.endswith("_ref") for t in n.outputs or ()):
        return "it hands out a reference"
    return lower.why_not(view, n)


def _is_small_integer(view: GraphView, ref: Tensor) -> bool:
    dtype, shape = DTYPES.get(view.dtype(ref)), view.shape(ref)
    if dtype is None or dtype.is_float or shape is None:
        return False
    known = [d for d in shape if d is not None]
    return math.prod(known) <= SMALL_ELEMENTS and (len(known) == len(shape) or
                                                   view[ref[0]].op == "BroadcastGradientArgs")


def find(infos: Sequence[NodeInfo], options: Options, keep: Iterable[str] = (), read: Iterable[Tensor] = (),
         pinned: Iterable[str] = (), prune: bool = False) -> Found:
    """Clusters of a graph.

    ``keep`` names nodes whose every output must exist afterwards; ``read`` lists tensors that are read
    from outside the graph (a function's results); ``pinned`` names nodes that must run.  ``prune`` removes what
    nothing of that needs, as TensorFlow does before it runs a function.
    """
    keep, read, pinned = frozenset(keep), frozenset(read), frozenset(pinned)
    dead = _dead(infos, keep | pinned | {n for n, _ in read}) if prune else frozenset()
    infos = [i for i in infos if i.name not in dead]
    net = _Net(infos, keep, read, pinned)
    groups = _merge(net, *_components(net, options), options)
    reasons: dict[str, str] = {}
    kept: list[list[str]] = []
    for group in groups:
        why = _not_worth_it(net, group, options)
        if why is None:
            kept.append(group)
        else:
            reasons.update(dict.fromkeys(group, why))
    clusters, live = _extract(net, kept)
    covered = {n for c in clusters for n in c.nodes}
    left = [LeftOut(i.name, i.op, i.why or reasons.get(i.name, "it computes only a shape that TensorFlow's ops read"))
            for i in net.order if i.name not in covered and i.computes]
    return Found(clusters, left, dead | (frozenset(net.by_name) - live))  # a shape that nothing reads any more goes too


def _dead(infos: Sequence[NodeInfo], needed: Iterable[str]) -> frozenset[str]:
    """Nodes without side effects that none of ``needed`` depends on."""
    by_name = {i.name: i for i in infos}
    live: set[str] = set()
    stack = [*needed, *(i.name for i in infos if not i.pure)]
    while stack:
        name = stack.pop()
        if name in by_name and name not in live:
            live.add(name)
            stack.extend((*(src for src, _ in by_name[name].inputs), *by_name[name].controls))
    return frozenset(by_name) - live


@dataclass
class _Net:
    """The graph with what is derived of it once: order, contexts, kinds and effective edges."""

    infos: Sequence[NodeInfo]
    keep: frozenset[str]
    read: frozenset[Tensor]
    pinned: frozenset[str]
    by_name: dict[str, NodeInfo] = field(init=False)
    order: list[NodeInfo] = field(init=False)
    context: dict[str, Context] = field(init=False)
    chain: set[str] = field(init=False)      # shape arithmetic above Shape ops
    member: set[str] = field(init=False)
    turns: dict[str, tuple[str, ...]] = field(init=False)   # of a loop's exit: what ends a turn of that loop
    leaves: dict[str, tuple[str, ...]] = field(init=False)  # of a chain node: the Shape ops it rests on
    ties: dict[str, tuple[str, ...]] = field(init=False)    # of a chain node: controls that its copy keeps
    before: dict[str, tuple[str, ...]] = field(init=False)  # effective predecessors

    def __post_init__(self) -> None:
        self.by_name = {i.name: i for i in self.infos}
        self.turns = _turns(self.infos)
        self.order = _topological(self.by_name, self.turns)
        self.context = contexts((Flow(i.name, i.op, i.inputs, i.controls, i.frame_name) for i in self.order),
                                {i.name: i.op for i in self.order})
        self.position = {i.name: k for k, i in enumerate(self.order)}
        self.readers: dict[str, list[str]] = {n: [] for n in self.by_name}
        for i in self.order:
            for src in dict.fromkeys((*(s for s, _ in i.inputs), *i.controls)):
                self.readers[src].append(i.name)
        self.chain, self.member, self.leaves, self.ties, self.before = set(), set(), {}, {}, {}
        for i in self.order:
            self._classify(i)

    def is_copy(self, name: str) -> bool:
        """Copied into its readers (Shape ops are decided per cluster)."""
        return name in self.chain or self.by_name[name].small_const

    def always_copied(self, name: str) -> bool:
        """A Shape op that belongs to no cluster: its readers' clusters compute it themselves."""
        i = self.by_name[name]
        return i.op in SHAPE_OPS and i.why is None and name not in self.member

    def key(self, name: str) -> tuple[str, frozenset[frozenset[str]], Context]:
        """Nodes may share an op where this is equal."""
        return self.by_name[name].device, self.by_name[name].needs, self.context[name]

    def _classify(self, i: NodeInfo) -> None:
        name = i.name
        if i.why is None and not i.small_const:
            if self._is_chain(i):
                self.chain.add(name)
                found = dict.fromkeys(leaf for src, _ in i.inputs for leaf in self._leaves_of(src))
                self.leaves[name] = tuple(found)
                tied = [c for src, _ in i.inputs for c in self.ties.get(src, self.copy_controls(src))]
                self.ties[name] = tuple(dict.fromkeys([*tied, *self.copy_controls(name)]))
            elif i.op not in SHAPE_OPS or self._shape_of_member(i):
                self.member.add(name)
        before = dict.fromkeys((*i.controls, *self.turns.get(name, ())))
        for src, _ in i.inputs:
            if not is_back_edge(self.by_name[src].op, i.op):
                before.update(dict.fromkeys(self._effective(src) if name in self.member else [src]))
        self.before[name] = tuple(before)

    def _is_chain(self, i: NodeInfo) -> bool:
        return i.symbolic and i.small_integer and bool(i.inputs) and i.name not in self.keep and all(
            self.by_name[src].op in SHAPE_OPS or src in self.chain or self.by_name[src].small_const
            for src, _ in i.inputs) and any(not self.by_name[src].small_const for src, _ in i.inputs)

    def _shape_of_member(self, i: NodeInfo) -> bool:
        sources = {src for src, _ in i.inputs}
        return all(s in self.member and self.key(s) == self.key(i.name) for s in sources)

    def _leaves_of(self, name: str) -> tuple[str, ...]:
        return (name,) if self.by_name[name].op in SHAPE_OPS else self.leaves.get(name, ())

    def _effective(self, src: str) -> list[str]:
        """What a member waits for through ``src``: copies stand for what they read."""
        if self.by_name[src].small_const:
            return [*self.copy_controls(src)]
        if src in self.chain:
            return [n for leaf in self.leaves[src] for n in self._effective(leaf)] + [*self.ties[src]]
        if self.always_copied(src):
            return [n for s, _ in self.by_name[src].inputs for n in self._effective(s)] + [*self.copy_controls(src)]
        return [src]

    def copy_controls(self, name: str) -> tuple[str, ...]:
        """What a copied node waits for by its control inputs; its copy waits as it did.

        Waiting for shape arithmetic is waiting for what that reads: it need not stay for this alone.
        """
        return tuple(dict.fromkeys(n for c in self.by_name[name].controls for n in self._effective(c)))


def _turns(infos: Sequence[NodeInfo]) -> dict[str, tuple[str, ...]]:
    """For each loop exit, the ends of its loop's turns: what is computed in a turn is waited for after the loop, on a
    way that back edges (which no order of the nodes holds) are part of.
    """
    ops = {i.name: i.op for i in infos}
    loop_of: dict[str, str] = {}  # a switch's loop, by the name of its condition
    ends: dict[str, dict[str, None]] = {}
    merged = {i.name: [s for s, _ in i.inputs if is_back_edge(ops[s], i.op)] for i in infos if i.op in MERGE}
    for i in infos:
        if i.op in SWITCH and ops[i.inputs[-1][0]] == "LoopCond":
            loop_of[i.name] = i.inputs[-1][0]
            ends.setdefault(loop_of[i.name], {}).update(dict.fromkeys(merged.get(i.inputs[0][0], ())))
    return {i.name: tuple(ends[loop_of[i.inputs[0][0]]]) for i in infos
            if i.op in EXIT and i.inputs[0][0] in loop_of}


def _topological(by_name: Mapping[str, NodeInfo], turns: Mapping[str, tuple[str, ...]]) -> list[NodeInfo]:
    """Operands first, back edges left out; ties in the graph's own order (Kahn's algorithm)."""
    waiting: dict[str, int] = {}
    readers: dict[str, list[str]] = {n: [] for n in by_name}
    for i in by_name.values():
        sources = {s for s, _ in i.inputs if not is_back_edge(by_name[s].op, i.op)}
        sources.update((*i.controls, *turns.get(i.name, ())))
        waiting[i.name] = len(sources)
        for s in sorted(sources):
            readers[s].append(i.name)
    ready = [n for n in by_name if not waiting[n]]
    order: list[NodeInfo] = []
    for name in ready:  # grows while it is walked
        order.append(by_name[name])
        for r in readers[name]:
            waiting[r] -= 1
            if not waiting[r]:
                ready.append(r)
    if len(order) != len(by_name):
        stuck = next(n for n in by_name if waiting[n])
        raise ValueError(f"The graph has a cycle through node '{stuck}' that is no while loop; it cannot be run.")
    return order


class _Sets:
    """Disjoint sets of names (union-find with path halving)."""

    def __init__(self, names: Iterable[str]):
        self.parent = {n: n for n in names}

    def find(self, name: str) -> str:
        while self.parent[name] != name:
            self.parent[name] = self.parent[self.parent[name]]
            name = self.parent[name]
        return name

    def join(self, a: str, b: str) -> None:
        self.parent[self.find(b)] = self.find(a)


def _components(net: _Net, options: Options) -> tuple[list[list[str]], dict[str, int], dict[str, Streams]]:
    """Step 1: connected members of equal depth, cut where streams meet; the depths; the streams."""
    depth: dict[str, int] = {}
    sets = _Sets(n for n in net.by_name if n in net.member)
    for i in net.order:
        name, level = i.name, 0
        for b in net.before[name]:
            level = max(level, depth[b] + _is_break(net, b, name))
        depth[name] = level
        for b in net.before[name]:
            if depth[b] == level and not _is_break(net, b, name):
                sets.join(b, name)
    if options.on_gpu:
        _join_side_by_side(net, depth, sets)
    streams = {} if options.on_gpu else _streams(net, depth, sets)
    cut = _Sets(sets.parent)
    for i in net.order:
        for b in net.before[i.name] if streams else ():
            if b in net.member and i.name in net.member and sets.find(b) == sets.find(i.name) \
                    and depth[b] == depth[i.name] and streams[b] == streams[i.name]:
                cut.join(b, i.name)
    groups: dict[str, list[str]] = {}
    for i in net.order:
        if i.name in net.member:
            groups.setdefault((cut if streams else sets).find(i.name), []).append(i.name)
    return list(groups.values()), depth, streams


def _join_side_by_side(net: _Net, depth: Mapping[str, int], sets: _Sets) -> None:
    """Makes one component of all members of a device and context that have one depth."""
    first: dict[tuple[int, Any], str] = {}
    for name in (i.name for i in net.order if i.name in net.member):
        sets.join(first.setdefault((depth[name], net.key(name)), name), name)


def _streams(net: _Net, depth: Mapping[str, int], sets: _Sets) -> dict[str, Streams]:
    """For each member, which of its component's early results it is needed for.

    A component waits for all library calls above it.  When one of its results feeds another library call and rests
    on only some of them (a layer of a stacked RNN, say), that call would start late.  What such a result needs is a
    cluster of its own.  What a node rests on grows along edges, so the streams that it is in shrink: no cycles.
    """
    rests: dict[str, frozenset[str]] = {}
    waits: dict[str, set[str]] = {}
    for i in net.order:
        if i.name not in net.member:
            continue
        found: set[str] = set()
        for b in net.before[i.name]:
            if _is_break(net, b, i.name):
                found |= {b} if lower.is_contraction(net.by_name[b].op) else set()
            elif depth[b] == depth[i.name]:
                found |= rests[b]
        rests[i.name] = frozenset(found)
        waits.setdefault(sets.find(i.name), set()).update(found)
    early: dict[str, dict[frozenset[str], None]] = {}
    for n, on in rests.items():
        component = sets.find(n)
        if on and len(on) < len(waits[component]) and any(lower.is_contraction(net.by_name[r].op) and
                                                          r not in net.member for r in net.readers[n]):
            early.setdefault(component, {})[on] = None
    return {n: frozenset(on for on in early.get(sets.find(n), ()) if rests[n] <= on) for n in rests}


def _is_break(net: _Net, a: str, b: str) -> bool:
    return a not in net.member or b not in net.member or net.key(a) != net.key(b)


def _merge(net: _Net, groups: list[list[str]], depth: Mapping[str, int], streams: Mapping[str, Streams],
           options: Options) -> list[list[str]]:
    """Steps 2 and 3: greedy merging along edges, then of what is too small, with exact reachability."""
    unit_of: dict[str, int] = {}
    for k, group in enumerate(groups):
        unit_of.update(dict.fromkeys(group, k))
    for i in net.order:
        unit_of.setdefault(i.name, len(groups) + len(unit_of))  # a unit of its own; ids need only differ
    graph = _UnitGraph(net, unit_of)
    owner = {k: k for k in range(len(groups))}
    for i in net.order:
        for b in net.before[i.name]:
            meet = depth[b] == depth[i.name] and streams.get(b) != streams.get(i.name)  # cut on purpose
            if b in net.member and i.name in net.member and net.key(b) == net.key(i.name) and not meet:
                x, y = _root(owner, unit_of[b]), _root(owner, unit_of[i.name])
                if x != y and graph.can_merge(x, y):
                    graph.merge(x, y)
                    owner[y] = x
    merged: dict[int, list[str]] = {}
    for k, group in enumerate(groups):
        merged.setdefault(_root(owner, k), []).extend(group)
    if options.on_gpu:
        _join_ends(net, graph, merged)
    _adopt(net, graph, merged, depth, options)
    return [sorted(g, key=net.position.__getitem__) for g in merged.values()]


def _join_ends(net: _Net, graph: _UnitGraph, groups: dict[int, list[str]]) -> None:
    """Merges groups whose results only go into sinks (assignments, the function's end) and which may come last."""
    ends: dict[Any, list[int]] = {}
    for u in sorted(groups, key=lambda u: net.position[groups[u][-1]], reverse=True):
        own = set(groups[u])
        if any(net.by_name[r].outputs for n in own for r in net.readers[n] if r not in own):
            continue
        beside = ends.setdefault(net.key(groups[u][0]), [])
        v = next((v for v in beside if graph.apart(u, v)), None)
        if v is None:
            beside.append(u)
        else:
            graph.merge(v, u)
            groups[v].extend(groups.pop(u))


def _adopt(net: _Net, graph: _UnitGraph, groups: dict[int, list[str]], depth: Mapping[str, int],
           options: Options) -> None:
    """Step 3: puts groups of fewer than ``min_ops`` compute ops into groups beside them that are large enough.

    A result may come later for it; on a GPU, where launches do not wait for results, that costs nothing.
    """
    min_ops = options.min_ops
    work = {u: sum(net.by_name[n].computes for n in group) for u, group in groups.items()}
    touching = {u: _touching(net, group) for u, group in groups.items()}
    beside: dict[Any, list[int]] = {}
    for u, things in touching.items():
        for thing in things if work[u] >= min_ops else ():
            beside.setdefault(thing, []).append(u)
    for u in [u for u in groups if 0 < work[u] < min_ops]:
        first, few = groups[u][0], all(net.by_name[n].small_integer for n in groups[u])
        for v in dict.fromkeys(v for thing in touching[u] for v in beside.get(thing, ())):
            near = few or options.on_gpu or depth[first] in {depth[n] for n in groups[v]}
            if near and net.key(groups[v][0]) == net.key(first) and graph.apart(u, v):
                graph.merge(v, u)
                groups[v].extend(groups.pop(u))
                break


def _touching(net: _Net, group: list[str]) -> dict[Any, None]:
    """What a group reads, and what reads it; the ends of a function, and of a loop's turn, count as one reader."""
    inside = set(group)
    found: dict[Any, None] = {}
    for n in group:
        info = net.by_name[n]
        found.update((t, None) for t in info.inputs if t[0] not in inside and not net.is_copy(t[0]))
        for r in net.readers[n]:
            if r not in inside:
                last = net.by_name[r].op in NEXT
                found[("turn", net.context[r]) if last else ("node", r)] = None
        if any((n, p) in net.read for p in range(info.outputs)):
            found["end"] = None
    return found


def _root(owner: dict[int, int], k: int) -> int:
    while owner[k] != k:
        k = owner[k]
    return k


class _UnitGraph:
    """The graph of clusters and single nodes, with the set of units that each one reaches (itself included)."""

    def __init__(self, net: _Net, unit_of: Mapping[str, int]):
        self.bit = {u: 1 << k for k, u in enumerate(dict.fromkeys(unit_of[i.name] for i in net.order))}
        self.after: dict[int, set[int]] = {u: set() for u in self.bit}
        for i in net.order:
            for b in net.before[i.name]:
                if unit_of[b] != unit_of[i.name]:
                    self.after[unit_of[b]].add(unit_of[i.name])
        self.reach: dict[int, int] = {}
        for u in _reverse_order(self.after):
            self.reach[u] = self.bit[u]
            for v in self.after[u]:
                self.reach[u] |= self.reach[v]

    def can_merge(self, a: int, b: int) -> bool:
        """No path a -> x -> b through another unit x (there is an edge a -> b)."""
        return not any(self.reach[x] & self.bit[b] for x in self.after[a] if x != b)

    def apart(self, a: int, b: int) -> bool:
        """Neither waits for the other."""
        return not (self.reach[a] & self.bit[b] or self.reach[b] & self.bit[a])

    def merge(self, a: int, b: int) -> None:
        """Puts b into a."""
        self.after[a] = (self.after[a] | self.after.pop(b)) - {a, b}
        for u, successors in self.after.items():
            if b in successors:
                successors.discard(b)
                if u != a:
                    successors.add(a)
        self.reach[a] |= self.reach[b]
        self.bit[a] |= self.bit.pop(b)
        joint, reach = self.bit[a], self.reach[a]
        del self.reach[b]
        for u, r in self.reach.items():
            if r & joint:
                self.reach[u] = r | reach


def _reverse_order(after: Mapping[int, set[int]]) -> list[int]:
    """Units, successors first."""
    waiting = {u: len(s) for u, s in after.items()}
    before: dict[int, list[int]] = {u: [] for u in after}
    for u, successors in after.items():
        for v in successors:
            before[v].append(u)
    order = [u for u, n in waiting.items() if not n]
    for u in order:  # grows while it is walked
        for p in before[u]:
            waiting[p] -= 1
            if not waiting[p]:
                order.append(p)
    if len(order) != len(after):
        raise AssertionError("clusters of equal depth form a cycle")
    return order


def _not_worth_it(net: _Net, group: list[str], options: Options) -> str | None:
    """Why a cluster would cost more than it saves, or None."""
    compute = [n for n in group if net.by_name[n].computes]
    if len(compute) < options.min_ops and not any(net.by_name[n].op == "StatelessIf" for n in compute):
        size = "1 compute op" if len(compute) == 1 else f"{len(compute)} compute ops"
        return f"a cluster of {size} is not worth an op of its own (min_ops={options.min_ops})"
    return None


def _extract(net: _Net, groups: list[list[str]]) -> tuple[list[Cluster], set[str]]:
    """Inputs, outputs and copies of each group; and the nodes outside that stay."""
    groups = [g for g in groups if _is_read(net, g)]
    owner = {n: k for k, g in enumerate(groups) for n in g}
    direct = {t for i in net.order if not net.is_copy(i.name) for t in i.inputs
              if t[0] in owner and owner.get(i.name) != owner[t[0]] and i.op not in SHAPE_OPS} | net.read
    parts = [_part(net, k, group, owner, direct) for k, group in enumerate(groups)]
    live = _live_originals(net, owner, parts)
    wanted = _wanted(net, live, parts)
    clusters = []
    for k, (group, part) in enumerate(zip(groups, parts, strict=True)):
        outputs = tuple((n, p) for n in group for p in range(net.by_name[n].outputs) if (n, p) in wanted)
        nodes = tuple(sorted({*group, *part.copies}, key=net.position.__getitem__))
        before = dict.fromkeys(c for n in group for c in net.by_name[n].controls if owner.get(c) != k)
        before.update(part.controls)
        clusters.append(Cluster(nodes, frozenset(part.copies), tuple(part.inputs), outputs, tuple(before),
                                net.by_name[group[0]].device, sum(net.by_name[n].computes for n in group)))
    return sorted(clusters, key=lambda c: net.position[c.root]), live


def _is_read(net: _Net, group: list[str]) -> bool:
    """False for dead code of a function body (TensorFlow prunes it)."""
    inside = set(group)
    return any(n in net.keep or n in net.pinned or any(t[0] == n for t in net.read) or
               any(r not in inside for r in net.readers[n]) for n in group)


@dataclass
class _Part:
    inputs: dict[Tensor, None] = field(default_factory=dict)
    copies: dict[str, None] = field(default_factory=dict)
    controls: dict[str, None] = field(default_factory=dict)


def _part(net: _Net, k: int, group: list[str], owner: Mapping[str, int], direct: set[Tensor]) -> _Part:
    """What group ``k`` reads, shape arithmetic and small constants copied in."""
    part = _Part()
    stack = [(t, False) for n in reversed(group) for t in reversed(net.by_name[n].inputs)]
    while stack:
        (src, port), exact = stack.pop()
        if owner.get(src) == k or src in part.copies:
            continue
        info = net.by_name[src]
        exact = exact or info.op == "BroadcastGradientArgs"  # must see its shapes symbolically
        if net.is_copy(src) or net.always_copied(src) or (
                info.op in SHAPE_OPS and _copy_shape(info, owner, direct, exact)):
            part.copies[src] = None
            part.controls.update((c, None) for c in net.copy_controls(src) if owner.get(c) != k)
            stack.extend((t, exact) for t in reversed(info.inputs))
        else:
            part.inputs[(src, port)] = None
    return part


def _copy_shape(info: NodeInfo, owner: Mapping[str, int], direct: set[Tensor], exact: bool) -> bool:
    """A Shape op is copied when its operand is in memory anyway; else its owner hands over the shape itself."""
    return info.why is None and (exact or all(t[0] not in owner or t in direct for t in info.inputs))


def _wanted(net: _Net, live: set[str], parts: list[_Part]) -> set[Tensor]:
    """Tensors of members that something outside their cluster reads."""
    wanted: set[Tensor] = set(net.read)
    for part in parts:
        wanted.update(part.inputs)
    wanted.update((n, p) for n in net.keep if n in net.by_name for p in range(net.by_name[n].outputs))
    for name in live:
        wanted.update(net.by_name[name].inputs)
    return wanted


def _live_originals(net: _Net, owner: Mapping[str, int], parts: list[_Part]) -> set[str]:
    """Nodes outside the clusters that stay: all but shape arithmetic and constants that nothing outside reads."""
    live: set[str] = set()
    needed = {n for n, _ in net.read} | net.keep | net.pinned
    needed.update(n for part in parts for n in (*(t[0] for t in part.inputs), *part.controls))
    for i in reversed(net.order):
        if i.name in owner:
            needed.update(i.controls)
        elif i.name in needed or not (net.is_copy(i.name) or i.op in SHAPE_OPS):
            live.add(i.name)
            needed.update(n for n, _ in i.inputs)
            needed.update(i.controls)
    return live
