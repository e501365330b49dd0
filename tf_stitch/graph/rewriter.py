"""Splices StitchedProgram nodes into a GraphDef and the functions of its library.

For each graph: find clusters, import them, compile all programs together, then splice.  A node that cannot be
imported is left to TensorFlow with the reason, and the clusters of its graph are found anew without it.
"""
from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from .. import compiler
from ..errors import StitchError
from ..ir.dtypes import DTYPES
from ..ir.graph import Graph
from ..options import Options
from ..program import serialize
from ..program.program import AliasStep, Program
from ..report import ClusterReport, GraphReport, LeftNode, Report
from ..schedule.target import of_options
from . import (
    branches,
    clusters,
    conditionals,
    feeds,
    guards,
    inline,
    lists,
    loops,
    lower,
    optimizers,
    updates,
    whiles,
)
from .bodies import add_node, name_by_content
from .clusters import Cluster, Found, NodeInfo, Tensor
from .devices import is_cpu, resolve
from .edits import asserts_aside, with_known_shapes, without_dead, without_relays
from .importer import import_cluster
from .variables import merge_reads, read_before_gathers
from .view import PROGRAM, GraphView, NodeView

Progress = Callable[[int, int, str], None]

OP = PROGRAM
OUTPUT_ARG = "results"
FALLBACK_PREFIX = "tf_stitch_fallback_"
MAX_STRAIGHT = 3  # rounds of writing loops out: what is known of lists may be another loop's number of turns
MAX_ROUNDS = 40  # of finding clusters again after a node turned out not to be importable


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Rewriting makes many objects that live until its end; the collector would walk them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_garbage_collection()
def rewrite(graph_def: graph_pb2.GraphDef, options: Options | None = None, *, functions: bool = True,
            keep_ends: bool = True, keep_in: Mapping[str, Iterable[str]] | None = None, run: Iterable[str] = (),
            only: Callable[[graph_pb2.GraphDef], frozenset[str]] | None = None, runs: feeds.Runs | None = None,
            progress: Progress | None = None) -> tuple[graph_pb2.GraphDef, Report]:
    """A rewritten copy of a graph, and what was done.

    Args:
      graph_def: the graph; it is not changed.
      options: see :class:`tf_stitch.options.Options`.
      functions: rewrite the functions of the library too.
      keep_ends: nodes that nothing reads keep their names (they may be fetched).
      keep_in: names of nodes that must still be there, by function (``options.keep`` is for the main graph).
      run: names of nodes of the main graph that must still be there and run; nobody reads what they give.
      only: picks the nodes of the main graph that may be stitched (None: all of them).
      runs: of the main graph, where parts of it may be run (None: it is run as a whole); what none of them needs
        stays as it is.
      progress: called with (steps done, steps in all, what was just done).

    What cannot be stitched stays as it is, with the reason in the report.  Threads may rewrite at the same time.
    """
    start = time.perf_counter()
    options, keep_in = Options.of(options), keep_in or {}
    if functions and resolve(options, ()).on_gpu:
        graph_def = loops.counted_functions(graph_def)
    out = graph_pb2.GraphDef()
    out.CopyFrom(graph_def)
    places = [_place("", graph_def, None, options, keep_ends=keep_ends, keep=options.keep, run=run, whole=only is None)]
    if functions:
        untouchable = _untouchable(graph_def)
        for fdef in graph_def.library.function:
            name = fdef.signature.name
            places.append(_place(name, fdef, graph_def.library, options, why=untouchable.get(name),
                                 keep=keep_in.get(name, ())))
    if only is not None:
        places[0].only = only(graph_def)
    places[0].runs = runs or {}
    for place in places:
        place.plan()
    failures = _compile(places, progress)
    functions_out = {f.signature.name: f for f in out.library.function}
    for place in places:
        try:
            fallbacks = place.splice(functions_out.get(place.name, out))
        except Exception as e:  # nothing was replaced yet
            place._give_up(_sentence(e))
            continue
        for fallback in fallbacks:
            if fallback.signature.name not in functions_out:
                out.library.function.append(fallback)
                functions_out[fallback.signature.name] = out.library.function[-1]
    if any(place.jobs for place in places):
        for place in places:
            if place.view is not None and place.why_untouched is None and only is None:
                whiles.mark(functions_out.get(place.name, out), out.library, place.options.on_gpu)
        ends = _ends(GraphView(graph_def)) if keep_ends else frozenset()
        out = whiles.as_ops(out, {*options.keep, *run, *ends}, only_stitched=only is not None)
    reports = [p.report() for p in places if p.why_untouched != _IS_FALLBACK]
    return out, Report(reports, seconds=time.perf_counter() - start, failures=failures)


def _check_whole(nodes: Iterable[node_def_pb2.NodeDef], source: graph_pb2.GraphDef | function_pb2.FunctionDef) -> None:
    """Raises when a node of a rewritten graph reads what is no longer there: the graph then stays as it was."""
    nodes = list(nodes)
    there = {n.name for n in nodes}
    if isinstance(source, function_pb2.FunctionDef):
        there.update(a.name for a in source.signature.input_arg)
    for n in nodes:
        gone = next((i for i in n.input if i.lstrip("^").split(":")[0] not in there), None)
        if gone is not None:
            raise StitchError(f"Node '{n.name}' would read '{gone}', which the rewritten graph does not hold.")


def _place(name: str, source: graph_pb2.GraphDef | function_pb2.FunctionDef,
           library: function_pb2.FunctionDefLibrary | None, options: Options, *, keep_ends: bool = False,
           why: str | None = None, keep: Iterable[str] = (), run: Iterable[str] = (), whole: bool = False) -> _Place:
    view, keep, run = None, frozenset(keep), frozenset(run)
    options = resolve(options, {n.device for n in _nodes_of(source)} - {""})
    if why is None:
        try:
            view = GraphView(source, library)
            if not any(n.op == OP for n in view):
                if whole or library is not None:
                    source, view = _straight(source, library, view, options, keep, run, keep_ends)
                if whole and isinstance(source, graph_pb2.GraphDef) and plain_ops_pay(options):
                    source = optimizers.plain_updates(source, view)
                    view = view if source is view.source else GraphView(source, library)
                    source = branches.written_out(source, view, keep | run)
                    view = view if source is view.source else GraphView(source, library)
                    source = conditionals.put_together(source, view, keep | run | (_ends(view) if keep_ends else set()),
                                                       lambda v, n: clusters.may_join(v, n.name, options))
                    view = view if source is view.source else GraphView(source, library)
                known = with_known_shapes(source, view, keep, run)
                if known is not source:
                    source = without_dead(known, GraphView(known, library), keep | run | _ends(view))
                    view = GraphView(source, library)
                if options.on_gpu:  # a CPU's ops have errors of their own, which the assertion should come before
                    source = asserts_aside(source, view, run | set(view.control_rets),
                                           (ends for _, ends in conditionals.guards(view)))
                    view = view if source is view.source else GraphView(source, library)
                if options.on_gpu and whole and isinstance(source, graph_pb2.GraphDef):
                    source = guards.joined(source, view, keep | (_ends(view) if keep_ends else set()),
                                           run | set(view.control_rets), functools.partial(_stitches, view, options))
                view = view if source is view.source else GraphView(source, library)
                source = without_relays(source, view, keep | run | set(view.control_rets))
                view = view if source is view.source else GraphView(source, library)
                source = read_before_gathers(source, view) if options.on_gpu else source
                view = view if source is view.source else GraphView(source, library)
                source = merge_reads(source, view, keep, run | set(view.control_rets))
                view = view if source is view.source else GraphView(source, library)
                source = _with_updates(source, view, run, options) if whole else source
                view = view if source is view.source else GraphView(source, library)
        except Exception as e:  # a graph that cannot be understood is left alone
            why = _sentence(e)
    return _Place(name, source, view, options, keep_ends, why, keep, run | set(view.control_rets if view else ()))


def _stitches(view: GraphView, options: Options, n: NodeView) -> bool:
    return clusters.why_not(view, n, options) is None


def plain_ops_pay(options: Options) -> bool:
    """Whether branches and optimizers' ops become plain ops: on a CPU there are no launches to be spared."""
    return options.on_gpu


def _straight(source: graph_pb2.GraphDef | function_pb2.FunctionDef, library: function_pb2.FunctionDefLibrary | None,
              view: GraphView, options: Options, keep: frozenset[str], run: frozenset[str], keep_ends: bool
              ) -> tuple[graph_pb2.GraphDef | function_pb2.FunctionDef, GraphView]:
    """The graph with loops of a known number of turns written out, and its view."""
    ends = _ends(view)
    kept = keep | run | (ends if keep_ends else frozenset())
    if options.on_gpu and isinstance(source, graph_pb2.GraphDef):
        source = inline.inlined(source, view, kept, run, lambda v, n: clusters.why_not(v, n, options) is None)
        view = view if source is view.source else GraphView(source)
    for _ in range(MAX_STRAIGHT):
        done = source
        source = loops.written_out(source, view, kept, loops.MOST_NODES)
        view = view if source is done else GraphView(source, library)
        if source is not done or any(n.op.startswith("TensorList") for n in view):
            read = lists.read_through(source, view)
            view = view if read is source else GraphView(read, library)
            source = read
        if source is done:
            break
        source = without_dead(source, view, kept | ends)
        view = GraphView(source, library)
    counted = loops.counted(source, view) if options.on_gpu else source
    if counted is not source:
        source = without_dead(counted, GraphView(counted, library), kept | ends)
        view = GraphView(source, library)
    return source, view


def _ends(view: GraphView) -> frozenset[str]:
    """What nothing reads or waits for: it may be fetched, or have effects."""
    return frozenset(n.name for n in view if not view.consumers(n.name) and not view.control_consumers(n.name))


def _with_updates(source: graph_pb2.GraphDef | function_pb2.FunctionDef, view: GraphView, run: frozenset[str],
                  options: Options) -> graph_pb2.GraphDef | function_pb2.FunctionDef:
    if not isinstance(source, graph_pb2.GraphDef):
        return source
    return updates.updates_as_values(source, view, run, functools.partial(_stitches, view, options))


_IS_FALLBACK = "it is the fallback of a stitched op"
_IS_STITCHED = "it is stitched already"
_IS_CHECKPOINT = "it saves or restores variables"
_IS_GRADIENT = "it is an op's gradient, for those who differentiate the loaded model"
_IS_CONDITION = "it is a loop's condition, which TensorFlow computes on the host"
_OUTSIDE = "it is outside of the functions to be stitched"
_NOT_RUN = "no signature needs it"


def _untouchable(graph: graph_pb2.GraphDef) -> dict[str, str]:
    """Functions that must stay as they are, with the reason."""
    library = {f.signature.name: f for f in graph.library.function}
    out: dict[str, str] = {}
    nodes = [*graph.node, *(n for f in library.values() for n in f.node_def)]
    out.update((n.attr["fallback"].func.name, _IS_FALLBACK) for n in nodes if n.op == OP)
    out.update((name, _IS_CHECKPOINT) for name, f in library.items()
               if any(n.op in ("SaveV2", "RestoreV2") for n in f.node_def))
    called = {name for node in nodes for name in _called(node)}
    # A model with swish has one for each activation: they would take longer to compile than the model.
    out.update((g.gradient_func, _IS_GRADIENT) for g in graph.library.registered_gradients
               if g.gradient_func not in called)
    out.update((name, "its types are not fixed") for name, f in library.items() if f.signature.attr)
    stack = [n for n, f in library.items() if _is_xla(f.attr)]
    stack.extend(called for node in nodes if _is_xla(node.attr) for called in _called(node))
    out.update((name, _IS_CONDITION) for name in library if name.endswith(loops.ONE_COUNTER))
    while stack:
        name = stack.pop()
        if name in library and name not in out:
            out[name] = "XLA compiles it (jit_compile=True)"
            stack.extend(called for node in library[name].node_def for called in _called(node))
    return out


def _is_xla(attrs) -> bool:
    return "_XlaMustCompile" in attrs and attrs["_XlaMustCompile"].b


def _called(node: node_def_pb2.NodeDef) -> Iterator[str]:
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        for f in value.list.func:
            yield f.name


@dataclass
class _Job:
    """A cluster on its way to becoming a node."""

    cluster: Cluster
    graph: Graph
    program: Program
    code: dict[str, bytes] | None = None


@dataclass
class _Place:
    """One graph or function body, and what becomes of it."""

    name: str
    source: graph_pb2.GraphDef | function_pb2.FunctionDef
    view: GraphView | None
    options: Options
    keep_ends: bool
    why_untouched: str | None = None
    keep: frozenset[str] = frozenset()
    run: frozenset[str] = frozenset()
    jobs: list[_Job] = field(default_factory=list)
    found: Found = field(default_factory=lambda: Found([], [], frozenset()))
    infos: list[NodeInfo] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)  # job -> stitched node
    only: frozenset[str] | None = None
    runs: feeds.Runs = field(default_factory=dict)
    nodes_after: int = -1

    # --- finding -------------------------------------------------------------------------------------

    def plan(self) -> None:
        """Finds clusters until every one of them imports and has a program."""
        if self.view is None:
            return
        if any(n.op == OP for n in self.view):
            self.why_untouched = _IS_STITCHED
            return
        try:
            if self.options.on_gpu:
                compiler.prepare(any(None in (self.view.shape((n.name, 0)) or ()) for n in self.view if n.is_arg))
            needs = feeds.needs(self.view, self.runs)
            self.infos = [replace(i, needs=needs.get(i.name, frozenset()))
                          for i in clusters.describe(self.view, self.options)]
            if self.runs:  # what makes variables or trains is no part of a model that is served
                self.infos = [i if i.needs else replace(i, why=_NOT_RUN) for i in self.infos]
            if self.only is not None:
                self.exclude({i.name: _OUTSIDE for i in self.infos if i.name not in self.only})
        except Exception as e:  # nothing that happens here may break the model
            self._give_up(_sentence(e))
        else:
            self.settle()

    def _give_up(self, why: str) -> None:
        self.why_untouched, self.jobs, self.found = why, [], Found([], [], frozenset())

    def settle(self) -> None:
        """Finds the clusters of what is not excluded; gives the graph up after an unexpected error."""
        try:
            self._settle()
        except Exception as e:
            self._give_up(_sentence(e))

    def _settle(self) -> None:
        done: dict[Cluster, _Job] = {}
        for _ in range(MAX_ROUNDS):
            self.found = self._find()
            failed: dict[str, str] = {}
            for c in self.found.clusters:
                if c not in done:
                    try:
                        done[c] = self._job(c)
                    except Exception as e:
                        failed.update(self._blame(c, e))
            self.jobs = [done[c] for c in self.found.clusters if c in done]
            if not failed:
                return
            self.exclude(failed)
        raise StitchError(f"too many nodes could not be imported (more than {MAX_ROUNDS} rounds)")

    def exclude(self, reasons: dict[str, str]) -> None:
        """Leaves nodes to TensorFlow."""
        self.infos = [replace(i, why=i.why or reasons[i.name]) if i.name in reasons else i for i in self.infos]

    def _find(self) -> Found:
        view = self.view
        assert view is not None
        keep = set(self.keep)
        if self.keep_ends:
            keep |= _ends(view)
        rets = view.rets if view.is_function else ()
        return clusters.find(self.infos, self.options, keep, rets, self.run, prune=view.is_function)

    def _job(self, c: Cluster) -> _Job:
        assert self.view is not None
        graph = import_cluster(self.view, c.nodes, list(c.inputs), list(c.outputs), c.root)
        program = compiler.build_program(graph, of_options(self.options), compiler.beginner(self.options))
        if self.options.on_gpu:
            c, program = _split_host_values(c, program)
        _check_references(self.view, c, program)
        serialize.dumps(program)  # a program that cannot be written must not come up again while splicing
        return _Job(c, graph, program)

    def _blame(self, c: Cluster, error: Exception) -> dict[str, str]:
        """The nodes to leave out after an error: the one that the error names, else the whole cluster."""
        text = _sentence(error)
        named = [n for n in c.nodes if text.startswith(f"Node '{n}' ")]
        return dict.fromkeys(named or c.members, text)

    # --- splicing ------------------------------------------------------------------------------------

    def splice(self, target: graph_pb2.GraphDef | function_pb2.FunctionDef) -> list[function_pb2.FunctionDef]:
        """Replaces the clusters' nodes in ``target``; returns the functions that the new nodes need."""
        if self.view is None or not self.jobs:
            return []
        taken = set(self.view.nodes)
        moved: dict[Tensor, str] = {}
        moved_control: dict[str, str] = {}
        for k, job in enumerate(self.jobs):
            name = _unique(f"{job.cluster.root}/stitched", taken)
            self.names[k] = name
            moved.update((t, self._output_text(name, i)) for i, t in enumerate(job.cluster.outputs))
            moved_control.update(dict.fromkeys(job.cluster.members, name))
        edit = _Edit(self.view, moved, moved_control, self.found.removed)
        fallbacks = [_fallback(self.view, job.cluster) for job in self.jobs]
        at_root = {job.cluster.root: k for k, job in enumerate(self.jobs)}
        kept = self._kept()
        result: list[node_def_pb2.NodeDef] = []
        for node in _nodes_of(self.source):
            if node.name in at_root:
                k = at_root[node.name]
                result.append(_stitched_node(self.names[k], self.jobs[k], fallbacks[k], edit, self.options))
            if node.name in kept:
                result.append(edit.stand_in(node.name))
            elif node.name in moved_control and node.name in self.run and not self.view.is_function:
                result.append(edit.must_run(node.name))
            elif node.name not in self.found.removed:
                result.append(edit.node(node))
        _check_whole(result, self.source)
        nodes = _nodes_of(target)
        del nodes[:]
        nodes.extend(result)
        self.nodes_after = len(result)
        if isinstance(target, function_pb2.FunctionDef):
            edit.function_ends(target)
        made = conditionals.BRANCH_PREFIX, guards.PREFIX
        return [*fallbacks, *(f for f in self.view.library.values() if f.signature.name.startswith(made))]

    def _output_text(self, name: str, port: int) -> str:
        assert self.view is not None
        if self.view.is_function:
            return f"{name}:{OUTPUT_ARG}:{port}"
        return f"{name}:{port}" if port else name

    def _kept(self) -> set[str]:
        """Members whose name must live on."""
        assert self.view is not None
        members = {n for job in self.jobs for n in job.cluster.members}
        ends = {n for n in members if self.keep_ends and not self.view.consumers(n)
                and not self.view.control_consumers(n)}
        return ends | (members & self.keep)

    # --- reporting -----------------------------------------------------------------------------------

    def report(self) -> GraphReport:
        if self.why_untouched is not None:
            return self._report_whole(self.why_untouched)
        infos = {i.name: i for i in self.infos}
        reports = [self._cluster_report(k, job, infos) for k, job in enumerate(self.jobs)]
        left = [LeftNode(x.node, x.op, x.reason, lower.is_contraction(x.op)) for x in self.found.left]
        # Shape arithmetic that every reader computes for itself is neither stitched nor left.
        free = sum(r.compute_ops for r in reports) + sum(not x.contraction and x.reason != _NOT_RUN for x in left)
        before = len(_nodes_of(self.source))
        after = before if self.nodes_after < 0 else self.nodes_after
        return GraphReport(self.name, self.why_untouched, before, after, free, reports, left, self._edges())

    def _report_whole(self, why: str) -> GraphReport:
        """A graph left as it is: its compute ops count as left, unless they are no part of the model's arithmetic."""
        nodes = _nodes_of(self.source)
        aside = why in (_IS_STITCHED, _IS_CHECKPOINT, _IS_GRADIENT)
        counted = [] if aside else [n for n in nodes if clusters.computes(n.op)]
        left = [LeftNode(n.name, n.op, why, lower.is_contraction(n.op)) for n in counted]
        free = sum(not x.contraction for x in left)
        return GraphReport(self.name, why, len(nodes), len(nodes), free, [], left, [])

    def _cluster_report(self, k: int, job: _Job, ops: Mapping[str, NodeInfo]) -> ClusterReport:
        assert self.view is not None
        kernels = job.program.launched()
        nodes = [(n, ops[n].op) for n in job.cluster.members]
        stitched = [n for n, op in nodes if ops[n].computes and not lower.is_contraction(op)]
        c = job.cluster
        return ClusterReport(self.names.get(k, c.root), nodes, len(stitched), kernels,
                             [_tensor_text(t) for t in c.inputs],
                             [_tensor_text(t) for t in c.outputs], len(job.program.guards))

    def _edges(self) -> list[tuple[str, str]]:
        """Data edges between clusters and the compute nodes left out, by name; other nodes are looked through."""
        assert self.view is not None
        box = {n: self.names.get(k, j.cluster.root) for k, j in enumerate(self.jobs) for n in j.cluster.members}
        box.update((x.node, x.node) for x in self.found.left)
        behind: dict[str, set[str]] = {}
        edges: dict[tuple[str, str], None] = {}
        for n in self.view:
            sources = {s for ref in n.inputs for s in behind.get(ref[0], ())}
            if n.name in box:
                edges.update(((s, box[n.name]), None) for s in sorted(sources) if s != box[n.name])
                behind[n.name] = {box[n.name]}
            else:
                behind[n.name] = sources
        return list(edges)


def _nodes_of(graph: graph_pb2.GraphDef | function_pb2.FunctionDef):
    return graph.node_def if isinstance(graph, function_pb2.FunctionDef) else graph.node


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, StitchError) else f"{type(error).__name__}: {text}"


def _tensor_text(t: Tensor) -> str:
    return f"{t[0]}:{t[1]}" if t[1] else t[0]


def _unique(name: str, taken: set[str]) -> str:
    for k in itertools.count():
        candidate = f"{name}_{k}" if k else name
        if candidate not in taken:
            taken.add(candidate)
            return candidate
    raise AssertionError


def _compile(places: Iterable[_Place], progress: Progress | None) -> list[str]:
    """Machine code for every program; a cluster whose code does not compile goes back to TensorFlow.

    Returns why, for each program that did not compile.
    """
    groups: dict[Options, list[_Place]] = {}
    for place in places:
        groups.setdefault(replace(place.options, keep=()), []).append(place)
    return [why for options, together in groups.items() for why in _compile_for(together, options, progress)]


def _compile_for(places: list[_Place], options: Options, progress: Progress | None) -> list[str]:
    tell = progress or (lambda done, total, what: None)
    jobs = [j for p in places for j in p.jobs]
    texts = [j.program.text for j in jobs]
    try:
        code = compiler.compile_texts(texts, options, tell)
        bad: dict[str, str] = {}
    except Exception:
        code, bad = _compile_one_by_one(texts, options)
    failures: list[str] = []
    while bad:
        failures += bad.values()
        for place in places:
            failed = {n: bad[j.program.text] for j in place.jobs if j.program.text in bad for n in j.cluster.members}
            if failed:
                place.exclude(failed)
                place.settle()
        fresh = [j.program.text for p in places for j in p.jobs if j.program.text not in code]
        more, bad = _compile_one_by_one(fresh, options)
        code.update(more)
    for place in places:
        for job in place.jobs:
            job.code = code[job.program.text]
    return failures


def _compile_one_by_one(texts: Iterable[str], options: Options) -> tuple[dict[str, dict[str, bytes]], dict[str, str]]:
    code: dict[str, dict[str, bytes]] = {}
    bad: dict[str, str] = {}
    for text in dict.fromkeys(texts):
        try:
            code.update(compiler.compile_texts([text], options, lambda done, total, what: None))
        except Exception as e:
            bad[text] = _sentence(e)
    return code, bad


class _Edit:
    """Rewires references to nodes that are gone."""

    def __init__(self, view: GraphView, moved: dict[Tensor, str], moved_control: dict[str, str],
                 removed: frozenset[str]):
        self.view, self.moved, self.moved_control, self.removed = view, moved, moved_control, removed

    def text(self, ref: Tensor) -> str:
        return self.moved.get(ref) or self.view.ref_text(ref)

    def control(self, name: str) -> str:
        return f"^{self.moved_control.get(name, name)}"

    def node(self, node: node_def_pb2.NodeDef) -> node_def_pb2.NodeDef:
        """The node with its references brought up to date (the same object when there is nothing to do)."""
        seen = self.view[node.name]
        loc = [s for s in node.attr["_class"].list.s] if "_class" in node.attr else []
        touched = any(r in self.moved for r in seen.inputs) or any(c in self.moved_control for c in seen.control_inputs)
        gone = any(_located(s) and not self._is_there(_located(s)) for s in loc)
        if not touched and not gone:
            return node
        out = node_def_pb2.NodeDef()
        out.CopyFrom(node)
        if touched:
            texts = [self.moved.get(ref, text) for ref, text in zip(seen.inputs, node.input, strict=False)]
            controls = dict.fromkeys(self.control(c) for c in seen.control_inputs)
            del out.input[:]
            out.input.extend([*texts, *controls])
        if gone:
            self._relocate(out, loc)
        return out

    def _is_there(self, name: str) -> bool:
        return name in self.view and name not in self.removed  # no more: replaced by an op, or dead since loops went

    def _relocate(self, node: node_def_pb2.NodeDef, loc: list[bytes]) -> None:
        """Colocation with a removed node: with the op that took its place, else none."""
        kept = [f"loc:@{self.moved_control.get(_located(s), _located(s))}".encode() if _located(s) else s
                for s in loc if not _located(s) or self._is_there(_located(s)) or _located(s) in self.moved_control]
        del node.attr["_class"].list.s[:]
        node.attr["_class"].list.s.extend(kept)
        if not kept:
            del node.attr["_class"]

    def stand_in(self, name: str) -> node_def_pb2.NodeDef:
        """A node of the old name that hands on the results of the stitched op."""
        ports = range(self.view.num_outputs(name))
        types = [tf.as_dtype(self.view.dtype((name, p))).as_datatype_enum for p in ports]
        out = node_def_pb2.NodeDef(name=name, op="Identity" if len(types) == 1 else "IdentityN",
                                   input=[self.text((name, p)) for p in ports], device=self.view[name].device)
        if len(types) == 1:
            out.attr["T"].type = types[0]
        else:
            out.attr["T"].list.type.extend(types)
        return out

    def must_run(self, name: str) -> node_def_pb2.NodeDef:
        """A node of the old name that is done when the stitched op is."""
        return node_def_pb2.NodeDef(name=name, op="NoOp", input=[self.control(name)], device=self.view[name].device)

    def function_ends(self, fdef: function_pb2.FunctionDef) -> None:
        """Points a function's results to where they are computed now."""
        for arg, ref in zip(fdef.signature.output_arg, self.view.rets, strict=True):
            if ref in self.moved:
                fdef.ret[arg.name] = self.moved[ref]
        for key, name in list(fdef.control_ret.items()):
            fdef.control_ret[key] = self.moved_control.get(name, name)


def _located(colocation: bytes) -> str:
    return colocation.decode().removeprefix("loc:@") if colocation.startswith(b"loc:@") else ""


def _types(view: GraphView, refs: Iterable[Tensor]) -> list[int]:
    return [tf.as_dtype(view.dtype(r)).as_datatype_enum for r in refs]


def _stitched_node(name: str, job: _Job, fallback: function_pb2.FunctionDef, edit: _Edit,
                   options: Options) -> node_def_pb2.NodeDef:
    c, view = job.cluster, edit.view
    controls = dict.fromkeys(edit.control(x) for x in c.controls)
    node = node_def_pb2.NodeDef(name=name, op=OP, device=c.device,
                                input=[*(edit.text(r) for r in c.inputs), *controls])
    node.attr["Tin"].list.SetInParent()
    node.attr["Tin"].list.type.extend(_types(view, c.inputs))
    node.attr["Tout"].list.type.extend(_types(view, c.outputs))
    if options.on_gpu and (host := {*_host_values(job.program), *_host_integers(edit, c)}):
        node.attr["_input_hostmem"].list.i.extend(sorted(host))
    if options.on_gpu and not options.autotune:
        node.attr["_autotune"].b = False
    node.attr["program"].s = serialize.dumps(replace(job.program, code=job.code or {}))
    node.attr["fallback"].func.name = fallback.signature.name
    node.attr["output_shapes"].list.shape.extend(tf.TensorShape(view.proven_shape(r)).as_proto() for r in c.outputs)
    return node


def _host_values(program: Program) -> list[int]:
    """Inputs whose contents are sizes: the host reads them."""
    return sorted({s.param for s in program.symbols.values() if s.kind == "value"})


def _host_integers(edit: _Edit, c: Cluster) -> list[int]:
    """Integer inputs that a CPU has (TensorFlow keeps int32 arguments there): the op copies them all at once, where
    TensorFlow would hand each of them over by a transfer that waits for its end.
    """
    view = edit.view
    return [i for i, ref in enumerate(c.inputs) if ref not in edit.moved and is_cpu(view[ref[0]].device)
            and DTYPES[view.dtype(ref)].is_integer]


def _split_host_values(c: Cluster, program: Program) -> tuple[Cluster, Program]:
    """Hands an input whose contents are sizes over twice when a GPU's kernels read it too: it must be on the host."""
    read = {b for step in program.steps for b in ((step.source,) if isinstance(step, AliasStep) else step.buffers)}
    buffers, symbols = list(program.buffers), dict(program.symbols)
    inputs = list(c.inputs)
    for i in _host_values(program):
        k = next(k for k, b in enumerate(buffers) if (b.kind, b.index) == ("input", i))
        if k in read:
            buffers.append(replace(buffers[k], index=len(inputs)))
            symbols = {name: replace(s, param=len(inputs)) if s.kind == "value" and s.param == i else s
                       for name, s in symbols.items()}
            inputs.append(inputs[i])
    return replace(c, inputs=tuple(inputs)), replace(program, buffers=buffers, symbols=symbols)


def _check_references(view: GraphView, c: Cluster, program: Program) -> None:
    """Raises StitchError where a result would be an input's buffer and the graph may overwrite that buffer.

    TensorFlow copies a resource variable that somebody still reads before it writes to it, but not a reference one.
    """
    if not view.has_references:
        return
    for step in program.steps:
        if isinstance(step, AliasStep) and program.buffers[step.source].kind == "input":
            name = c.outputs[program.buffers[step.output].index][0]
            raise StitchError(f"Node '{name}' only shows what it reads, which may be a reference variable's memory; "
                              "it stays TensorFlow's, which copies it.")


def _fallback(view: GraphView, c: Cluster) -> function_pb2.FunctionDef:
    """The original nodes as a function; its name is a hash of what it holds, so equal ones are one."""
    fdef = function_pb2.FunctionDef()
    arg_of = {ref: f"arg_{i}" for i, ref in enumerate(c.inputs)}
    for i, enum in enumerate(_types(view, c.inputs)):
        fdef.signature.input_arg.add(name=f"arg_{i}", type=enum)
    for i, enum in enumerate(_types(view, c.outputs)):
        fdef.signature.output_arg.add(name=f"out_{i}", type=enum)
    for name in c.nodes:
        add_node(fdef, view[name], [arg_of.get(r) or view.body_text(r) for r in view[name].inputs])
    for i, ref in enumerate(c.outputs):
        fdef.ret[f"out_{i}"] = view.body_text(ref)
    name_by_content(fdef, FALLBACK_PREFIX)
    return fdef
