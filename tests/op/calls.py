"""Puts programs into TensorFlow graphs."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from tf_stitch import runtime
from tf_stitch.program import serialize
from tf_stitch.program.program import Program


def fallback(fn: Callable, specs: Sequence[tf.TensorSpec]):
    """``fn`` as a function that a node can name."""
    concrete = tf.function(fn, autograph=False).get_concrete_function(*specs)
    concrete.add_to_graph()
    return concrete


def specs_of(program: Program) -> list[tf.TensorSpec]:
    """What the program takes; symbolic dims are unknown."""
    return [tf.TensorSpec([d if isinstance(d, int) else None for d in b.shape], b.dtype)
            for b in program.of_kind("input")]


def stitched(program: Program | bytes, fn: Callable, like: Program | None = None, shapes: bool = True,
             hostmem: Sequence[int] = ()) -> Callable:
    """A Python function that adds a StitchedProgram node; ``fn`` is what it falls back to.

    ``like`` gives the types when ``program`` is bytes.  ``hostmem``: inputs that a GPU finds in host memory.
    """
    like = like or program
    data = program if isinstance(program, bytes) else serialize.dumps(program)
    outputs = like.of_kind("output")
    output_shapes = [[d if isinstance(d, int) else None for d in b.shape] for b in outputs]
    specs = specs_of(like)

    def call(*args):
        function = fallback(fn, specs)
        function.add_to_graph(tf.compat.v1.get_default_graph())
        results = runtime.load().stitched_program(
            args=list(args), Tout=[tf.as_dtype(b.dtype) for b in outputs], program=data, fallback=function,
            output_shapes=output_shapes if shapes else [])
        if hostmem:
            positions = attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue(i=hostmem))
            results[0].op._set_attr("_input_hostmem", positions)
        return results if len(results) > 1 else results[0]

    return call


def counted(call: Callable):
    """(result, stitched runs, fallback runs) of a call."""
    before = runtime.counters()
    result = call()
    after = runtime.counters()
    return result, after.stitched - before.stitched, after.fallbacks - before.fallbacks
