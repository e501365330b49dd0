"""Graphs of many small parts that do not depend on each other."""
from __future__ import annotations

import random

import numpy as np

from tests.ir_graphs import random_inputs
from tf_stitch.ir.builder import Builder


def updates(shapes, kind="adam", dtypes=("float32",)):
    """The step of an optimizer for variables of some shapes, every one of which is a few independent loops."""
    b = Builder()
    outs = []
    rates = {dtype: b.param((), dtype, f"rate {dtype}") for dtype in dtypes}
    for i, shape in enumerate(shapes):
        dtype = dtypes[i % len(dtypes)]
        x, g = b.param(shape, dtype, f"x{i}"), b.param(shape, dtype, f"g{i}")
        rate = b.broadcast_to(rates[dtype], x.shape)
        if kind == "sgd":
            outs.append(b.ew("sub", x, b.ew("mul", g, rate)))
            continue
        m = b.param(shape, dtype, f"m{i}")
        m = b.ew("add", m, b.ew("mul", b.ew("sub", g, m), 0.1))
        if kind == "momentum":
            outs += [m, b.ew("sub", x, b.ew("mul", m, rate))]
            continue
        v = b.ew("mul", b.param(shape, dtype, f"v{i}"), 0.999)
        v = b.ew("add", b.ew("mul", v, v), b.ew("mul", b.ew("mul", g, g), 0.001))
        outs += [m, v, b.ew("sub", x, b.ew("div", b.ew("mul", m, rate), b.ew("add", b.ew("sqrt", v), 0.01)))]
    return b.finish(outs, kind)


def features(count, batch=None, seed=0):
    """Look-ups of many features in tables of their own, each with a norm of its own, all of them outputs."""
    rng, b = random.Random(seed), Builder()
    outs = []
    for i in range(count):
        table = b.param((rng.randint(2, 40), rng.choice([4, 8, 16])), "float32", f"table{i}")
        ids = b.param((batch,), "int32", f"ids{i}")
        rows = b.gather(table, ids)
        outs += [rows, b.ew("sqrt", b.reduce("sum", b.ew("mul", rows, rows), (1,)))]
    return b.finish(outs, "features")


def heads(count, batch=None, width=24, least=3):
    """Many small heads over one input: a product, its bias and a softmax each."""
    b = Builder()
    x = b.param((batch, width), "float32", "x")
    outs = []
    for i in range(count):
        units = least + i % 4
        w, bias = b.param((width, units), "float32", f"w{i}"), b.param((units,), "float32", f"b{i}")
        y = b.dot(x, w, contract=((1,), (0,)))
        e = b.ew("exp", b.ew("add", y, b.broadcast_to(bias, y.shape)))
        total = b.reduce("sum", e, (1,), keepdims=True)
        outs.append(b.ew("div", e, b.broadcast_to(total, e.shape)))
    return b.finish(outs, "heads")


def joined_features(count, batch=None, kinds=3):
    """Features side by side in one matrix: looked up after a modulo, normalised, or as they are."""
    rng, b = random.Random(count), Builder()
    x = b.param((batch, count), "float32", "x")
    pieces = []
    for i in range(count):
        rows = 1 + rng.randint(1, 40)
        if i % kinds == 0:
            ids = b.param((batch,), "int64", f"ids{i}")
            ids = b.ew("int_mod", b.ew("abs", ids), b.broadcast_to(b.const(rows, "int64"), ids.shape))
            pieces.append(b.ew("tanh", b.gather(b.param((rows, 8), "float32", f"table{i}"), ids)))
        elif i % kinds == 1:
            column = b.slice(x, (0, i), (x.shape[0], 1))
            y = b.param((batch, 12), "float32", f"y{i}")
            total = b.reduce("sum", y, (1,), keepdims=True)
            pieces.append(b.ew("mul", b.broadcast_to(total, (total.shape[0], 4)), b.broadcast_to(column, (
                total.shape[0], 4))))
        else:
            pieces.append(b.param((batch, 3), "float32", f"z{i}"))
    return b.finish([b.concat(pieces, 1)], "joined features")


SHAPES = [(1,), (3,), (16,), (10, 10), (33,), (128,), (7, 5), (64, 40), (2, 3, 4), (1000,), (1024, 2), (1, 1), (4100,)]


def mixed(count, seed=0):
    rng = random.Random(seed)
    return [rng.choice(SHAPES) for _ in range(count)]


GRAPHS = {
    "sgd": lambda: updates(mixed(40, 1), "sgd"),
    "momentum": lambda: updates(mixed(24, 2), "momentum", ("float32", "float16", "float64")),
    "adam": lambda: updates(mixed(36, 3)),
    "sizes unknown": lambda: updates([(None, 3)] * 14 + [(None,)] * 14),
    "features": lambda: features(40),
    "features of a few rows": lambda: features(24, 5),
    "heads": lambda: heads(40),
}


def drawn(graph, seed, size):
    """Inputs whose integers are valid in every table."""
    inputs = random_inputs(graph, seed, dict.fromkeys(graph.symbols, size))
    return [np.abs(x) % 2 if x.dtype.kind in "iu" else x for x in inputs]
