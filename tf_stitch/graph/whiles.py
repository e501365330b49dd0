"""Loops whose number of turns is not known, as one op each: its kernel runs the turns, node after node.

TensorFlow's executor has a Merge, a Switch and a NextIteration for each variable of a loop in every turn, besides the
nodes that compute something, and a node takes it longer than a small kernel.  Once a graph is rewritten, the condition
and the body of a loop that stayed (:mod:`.loops`) become functions of its variables, and a StitchedWhile node
(custom_ops/while_op.cc) takes its place.  The nodes are those that were there, programs among them.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from .bodies import add_functions, name_by_content
from .control import CONTROL_FLOW, ENTER
from .devices import is_cpu, is_gpu
from .edits import Edit
from .loops import BRANCHES, READS, WHILES, Loop, loops_of, plain
from .view import PASS_THROUGH, PROGRAM, GraphView, NodeView, Ref, may_have_effects, op_def

OPS = {False: "StatelessStitchedWhile", True: "StitchedWhile"}  # by whether a turn sees effects of others
TURN_PREFIX = "tf_stitch_turn_"
MARK = "_tf_stitch_turns"  # as custom_ops/while_pass.cc has it
# Have a state of their own, whose order in a turn means nothing.
RANDOM = frozenset({"RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "RandomGamma",
                    "RandomPoissonV2", "Multinomial", "RandomShuffle"})
FREE = PASS_THROUGH | {"NoOp"}  # are not part of a turn
HOST_TYPES = frozenset({"int32", "string", "resource"})  # TensorFlow keeps loops' variables of these on the host


def as_ops(source: graph_pb2.GraphDef, keep: Iterable[str], *, only_stitched: bool = False) -> graph_pb2.GraphDef:
    """The same graph, or a copy in which loops are StitchedWhile nodes.

    Args:
      source: a graph whose nodes are placed on devices.
      keep: names of nodes that must still be there.
      only_stitched: change only loops that hold a program.

    A loop stays where it holds another one, a branch, a call or an effect, where its nodes are on several devices,
    and, on a CPU, where no turn needs another one's result: TensorFlow runs several of those at once.
    """
    if not any(n.op in ENTER for n in source.node):
        return source
    keep, view = set(keep), GraphView(source, source.library)
    edit = Edit(source, view)
    made: list[function_pb2.FunctionDef] = []
    for loop in loops_of(view, in_branches=True):
        wanted = not only_stitched or any(n.op == PROGRAM for n in loop.body)
        if wanted and loop.turns is view and keep.isdisjoint(loop.inside) and _can_be_op(view, loop):
            _put(edit, loop, made)
    if not edit.waits:
        return source
    out = edit.graph()
    add_functions(out, made)
    return out


def mark(source: graph_pb2.GraphDef | function_pb2.FunctionDef, library: function_pb2.FunctionDefLibrary,
         on_gpu: bool) -> None:
    """Marks the While nodes of a rewritten graph that can be run so, in place.

    They stay While nodes, as those who load the model may differentiate them; the op library puts StitchedWhile nodes
    in their places when a graph is made ready to run (custom_ops/while_pass.cc).
    """
    nodes = {n.name: n for n in (source.node_def if isinstance(source, function_pb2.FunctionDef) else source.node)}
    if not any(n.op in WHILES for n in nodes.values()):
        return
    view = GraphView(source, library)
    for loop in loops_of(view):
        runs = loop.turns is not view and loop.tests.dtype(loop.test) == "bool" and all(
            _can_be_run(n) for n in (*loop.body, *loop.tests) if not n.is_arg)
        if runs and (on_gpu or any(_carries(view, loop, v) for v in loop.next)):
            nodes[loop.name].attr[MARK].b = True


def _can_be_op(view: GraphView, loop: Loop) -> bool:
    """Whether the loop of a frame can be an op."""
    devices = {n.device for n in loop.body if n.op not in FREE}
    if len(devices) != 1 or not all(map(_can_be_run, loop.body)):
        return False
    device = devices.pop()
    if not is_cpu(device) and not is_gpu(device):  # whether there are kernels is not known
        return False
    enters = [n for n in view if n.op in ENTER and n.name in loop.inside and not n.attr("is_constant")]
    if any(view[reader].op != "Merge" for n in enters for reader in view.readers(n.name)):
        return False
    return is_gpu(device) or any(_carries(view, loop, v) for v in loop.next)


def _can_be_run(n: NodeView) -> bool:
    """Whether a node is one kernel, without effects, that the device it is placed on has."""
    if n.op == PROGRAM or n.op in READS or n.op in RANDOM or n.op == "NoOp":
        return True
    if n.op in CONTROL_FLOW or n.op in BRANCHES or may_have_effects(n.op) or n.outputs is None:
        return False
    signature = op_def(n.op)
    assert signature is not None
    calls = any(a.type in ("func", "list(func)") for a in signature.attr)
    return not calls and not any(a.is_ref for a in (*signature.input_arg, *signature.output_arg))


def _carries(outside: GraphView, loop: Loop, variable: Ref) -> bool:
    """Whether a turn needs what the one before made of a variable: all but counters, lists and what never changes."""
    dtype = outside.dtype(loop.initial[variable])
    counts = tf.as_dtype(dtype).is_integer and outside.proven_shape(loop.initial[variable]) == ()
    return dtype != "variant" and not counts and plain(loop.turns, loop, loop.next[variable]) != variable


def _put(edit: Edit, loop: Loop, made: list[function_pb2.FunctionDef]) -> None:
    """Puts one node in a loop's place, and its functions into ``made``."""
    view = loop.turns
    constant = [ref for ref in loop.initial if view[ref[0]].op in ENTER and view[ref[0]].attr("is_constant")]
    variables = {ref: i for i, ref in enumerate([*loop.next, *constant])}
    types = [view.dtype(loop.initial[ref]) for ref in variables]
    cond = _function(loop, variables, types, [loop.test], ["bool"])
    body = _function(loop, variables, types, [loop.next.get(ref, ref) for ref in variables], types)
    made += cond, body
    node = node_def_pb2.NodeDef(op=OPS[any(n.op in READS | RANDOM for n in loop.body)],
                                device=next(n.device for n in loop.body if n.op not in FREE))
    node.attr["T"].list.type.extend(tf.as_dtype(t).as_datatype_enum for t in types)
    node.attr["cond"].func.name, node.attr["body"].func.name = cond.signature.name, body.signature.name
    exits = {of: ref for ref, of in loop.exits.items()}
    shapes = [view.proven_shape(exits.get(ref, loop.initial[ref])) for ref in variables]
    node.attr["output_shapes"].list.shape.extend(tf.TensorShape(s).as_proto() for s in shapes)
    if is_gpu(node.device):
        host = [i for i, t in enumerate(types) if t in HOST_TYPES]
        for name in ("_input_hostmem", "_output_hostmem"):
            node.attr[name].list.i.extend(host)
    name = edit.add(node, f"{loop.name}/stitched", types, [loop.initial[ref] for ref in variables], loop.after)
    edit.waits.update(dict.fromkeys(loop.inside, (name,)))
    edit.instead.update((ref, (name, variables[of])) for ref, of in loop.exits.items())


def _function(loop: Loop, variables: Mapping[Ref, int], types: Iterable[str], results: Sequence[Ref],
              result_types: Iterable[str]) -> function_pb2.FunctionDef:
    """What values of a turn are made of, as a function of the loop's variables; equal ones have one name."""
    view, out = loop.turns, function_pb2.FunctionDef()

    def text(ref: Ref) -> str:
        ref = plain(view, loop, ref)
        return f"variable_{variables[ref]}" if ref in variables else view.body_text(ref)

    for i, t in enumerate(types):
        out.signature.input_arg.add(name=f"variable_{i}", type=tf.as_dtype(t).as_datatype_enum)
    for n in _made_of(loop, variables, results):
        node = out.node_def.add()
        assert n.proto is not None
        node.CopyFrom(n.proto)
        node.attr.pop("_class", None)
        node.input[:] = map(text, n.inputs)
    for i, (ref, t) in enumerate(zip(results, result_types, strict=True)):
        out.signature.output_arg.add(name=f"next_{i}", type=tf.as_dtype(t).as_datatype_enum)
        out.ret[f"next_{i}"] = text(ref)
    name_by_content(out, TURN_PREFIX)
    return out


def _made_of(loop: Loop, variables: Mapping[Ref, int], results: Iterable[Ref]) -> Iterator[NodeView]:
    """The nodes that values of a turn need, in the order of the graph; not those that only hand on."""
    needed: set[str] = set()
    stack = list(results)
    while stack:
        ref = plain(loop.turns, loop, stack.pop())
        if ref not in variables and ref[0] not in needed:
            needed.add(ref[0])
            stack.extend(loop.turns[ref[0]].inputs)
    return (n for n in loop.turns if n.name in needed)
