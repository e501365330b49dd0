"""What is known of functions' arguments from their calls, and what follows for SavedModels."""
from __future__ import annotations

import os

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

import tf_stitch
from tf_stitch.graph.calls import annotate_variables, known_arguments
from tf_stitch.saved_model import read


def graph_of(text: str) -> graph_pb2.GraphDef:
    """Lines "function: name op(callee) input...": no function before the colon is the main graph, callee may lack."""
    graph = graph_pb2.GraphDef()
    functions = {}
    for line in text.strip().splitlines():
        where, what = (part.strip() for part in line.split(":", 1))
        if where and where not in functions:
            functions[where] = graph.library.function.add()
            functions[where].signature.name = where
        if what.startswith("args "):
            for name in what.split()[1:]:
                functions[where].signature.input_arg.add(name=name)
            continue
        name, op, *inputs = what.split()
        op, _, callee = op.removesuffix(")").partition("(")
        node = (functions[where].node_def if where else graph.node).add(name=name, op=op, input=inputs)
        if callee:
            node.attr["f"].func.name = callee
    return graph


def test_known_through_nested_calls():
    graph = graph_of("""
        : x Placeholder
        : y Const
        : call PartitionedCall(outer) x:0 y ^x
        outer: args a b
        outer: inner StatefulPartitionedCall(inner) b a
        inner: args c d
    """)
    assert known_arguments(graph, {"x": 1}) == {"outer": {0: 1}, "inner": {1: 1}}


def test_calls_must_agree():
    graph = graph_of("""
        : x Placeholder
        : y Placeholder
        : one PartitionedCall(f) x y
        : two PartitionedCall(f) y y
        : three PartitionedCall(g) x
        : four While(g) x
        f: args a b
        f: deep PartitionedCall(h) a b
        g: args a
        h: args a b
    """)
    assert known_arguments(graph, {"x": 1, "y": 2}) == {"f": {1: 2}, "g": {}, "h": {1: 2}}


def test_functions_that_call_themselves():
    graph = graph_of("""
        : x Placeholder
        : one PartitionedCall(f) x x
        f: args a b
        f: again PartitionedCall(f) b c
    """)
    assert known_arguments(graph, {"x": 1}) == {"f": {}}


@pytest.mark.nvcc
def test_saved_models_gather_in_programs_and_read_once(tmp_path):
    """A SavedModel's functions get their variables as arguments: shapes come from the calls."""
    module = tf.Module()
    module.table = tf.Variable(np.arange(24, dtype=np.float32).reshape(6, 4))
    module.scale = tf.Variable(np.float32(3.0))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32, name="ids")], autograph=False)
    def call(ids):
        rows = tf.tanh(tf.gather(module.table, ids) * module.scale)
        return {"y": rows * module.scale + module.scale}

    tf.saved_model.save(module, os.fspath(tmp_path / "model"), signatures=call)
    (meta,) = read(tmp_path / "model").meta_graphs
    annotate_variables(meta.graph_def)
    annotate_variables(meta.graph_def)  # nothing is written twice
    shapes = [[d.size for d in s.dim] for f in meta.graph_def.library.function if "__inference_call" in f.signature.name
              for a in f.arg_attr.values() for s in a.attr["_handle_shapes"].list.shape]
    assert shapes == [[6, 4], []]

    tf_stitch.rewrite_saved_model(tmp_path / "model", tmp_path / "stitched",
                                  target="cuda:sm_90", verify=False)
    (meta,) = read(tmp_path / "stitched").meta_graphs
    ops = [n.op for f in meta.graph_def.library.function if "__inference_call" in f.signature.name for n in f.node_def]
    assert ops.count("ReadVariableOp") == 2 and "ResourceGather" not in ops and "GatherV2" not in ops
    assert ops.count("StitchedProgram") == 1
