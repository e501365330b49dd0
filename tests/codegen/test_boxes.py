"""Box rules are sound: the box of an operand covers every index that the result's box reads (by brute force)."""
from __future__ import annotations

import itertools
import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_stitch.ir import dims as D
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.graph import Node
from tf_stitch.ir.ops import OPS
from tf_stitch.schedule import rules

SIZES = (1, 2, 3, 4, 6)


def _made(r: random.Random) -> Node:
    """One primitive over static operands."""
    b = Builder()
    shape = tuple(r.choice(SIZES) for _ in range(r.randint(1, 4)))
    x = b.param(shape, "float32", "x")
    kind = r.choice(("reshape", "transpose", "slice", "reverse", "pad", "concat", "broadcast", "reduce", "scan",
                     "gather", "dot"))
    axis = r.randrange(len(shape))
    if kind == "reshape":
        return b.reshape(x, _regrouped(shape, r))
    if kind == "transpose":
        return b.transpose(x, tuple(r.sample(range(len(shape)), len(shape))))
    if kind == "slice":
        steps = [r.choice((1, 1, 2, 3)) for _ in shape]
        starts = [r.randrange(d) for d in shape]
        sizes = [r.randint(1, (d - s - 1) // t + 1) for d, s, t in zip(shape, starts, steps, strict=True)]
        return b.slice(x, starts, sizes, steps)
    if kind == "reverse":
        return b.reverse(x, tuple(sorted(r.sample(range(len(shape)), r.randint(1, len(shape))))))
    if kind == "pad":
        return b.pad(x, [r.randrange(3) for _ in shape], [r.randrange(3) for _ in shape], 0,
                     [r.choice((0, 0, 1)) for _ in shape])
    if kind == "concat":
        y = b.param(tuple(r.choice(SIZES) if d == axis else n for d, n in enumerate(shape)), "float32", "y")
        return b.concat([x, y, x], axis)
    if kind == "broadcast":
        return b.broadcast_to(x, (*(r.choice(SIZES) for _ in range(r.randint(0, 2))), *shape))
    if kind == "reduce":
        return b.reduce("sum", x, tuple(sorted(r.sample(range(len(shape)), r.randint(1, len(shape))))))
    if kind == "scan":
        return b.scan("sum", x, axis, False, False)
    if kind == "gather":
        return b.gather(x, b.param(tuple(r.choice(SIZES) for _ in range(r.randint(0, 2))), "int32", "i"), axis)
    y = b.param((shape[axis], r.choice(SIZES)), "float32", "y")
    return b.dot(x, y, ((), ()), ((axis,), (0,)))


def _regrouped(shape: tuple[int, ...], r: random.Random) -> tuple[int, ...]:
    """Another shape of the same size: dims split into factors and runs merged."""
    factors = [f for d in shape for f in ((2, d // 2) if d % 2 == 0 and r.random() < 0.6 else (d,))]
    out = [factors[0]]
    for f in factors[1:]:
        if r.random() < 0.5:
            out[-1] *= f
        else:
            out.append(f)
    return tuple(out)


def _box(shape, r: random.Random) -> rules.Box:
    spans = []
    for d in shape:
        off = r.randrange(d)
        spans.append((0, d) if r.random() < 0.4 else (off, r.randint(1, d - off)))
    return tuple(spans)


def _read(node: Node, box: rules.Box) -> list[set]:
    """The operand elements that the interpreter's results in ``box`` depend on, by changing one at a time."""
    shapes = [x.shape for x in node.inputs]
    plain = [np.zeros(x.shape, np.int32 if x.dtype == "int32" else np.float64) for x in node.inputs]
    if node.op == "dot":
        plain = [np.ones(s) for s in shapes]
    inside = tuple(slice(o, o + e) for o, e in box)

    def run(arrays):
        return OPS[node.op].evaluate(arrays, node.attrs, node.shape, node.dtype)[inside]

    found = []
    for k, shape in enumerate(shapes):
        if node.inputs[k].dtype == "int32":
            found.append(set())
            continue
        base, seen = run(plain), set()
        for index in itertools.product(*map(range, shape)):
            arrays = [a.copy() for a in plain]
            arrays[k][index] += 1
            if not np.array_equal(run(arrays), base):
                seen.add(index)
        found.append(seen)
    return found


@settings(max_examples=300)
@given(st.randoms(use_true_random=False))
def test_operand_boxes_cover_what_is_read(r):
    node = _made(r)
    box = rules.computed_box(node, _box(node.shape, r))
    for needed, covered in zip(_read(node, box), rules.operand_boxes(node, box), strict=True):
        for index in needed:
            assert all(o <= i < o + e for i, (o, e) in zip(index, covered, strict=True)), (node, box, covered, index)


@settings(max_examples=200)
@given(st.randoms(use_true_random=False))
def test_view_indices_match_the_interpreter(r):
    node = _made(r)
    if node.op not in rules.VIEWS:
        return
    x = np.arange(int(np.prod(node.inputs[0].shape)), dtype=np.float32).reshape(node.inputs[0].shape)
    want = OPS[node.op].evaluate([x], node.attrs, node.shape, node.dtype)
    symbols = tuple(D.symbol(f"i{d}", 0, n - 1) for d, n in enumerate(node.shape))
    view = rules.VIEWS[node.op](node, symbols)
    for index in itertools.product(*map(range, node.shape)):
        env = {f"i{d}": i for d, i in enumerate(index)}
        assert x[tuple(D.evaluate(v, env) for v in view)] == want[index]


@settings(max_examples=200)
@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_boxes_of_cut_axes_cover_every_block(r, chunk):
    """The box with the block's index as a symbol holds, for every block, what the concrete box needs."""
    node = _made(r)
    if not node.rank:
        return
    d = r.randrange(node.rank)
    size = node.shape[d]
    b, e = D.symbol("ts_b0", 0, -(-size // chunk) - 1), D.symbol("ts_e0", 0, chunk)
    symbolic = tuple((b * chunk, e if size % chunk else chunk) if k == d else (0, n) for k, n in enumerate(node.shape))
    symbolic = rules.computed_box(node, symbolic)
    boxes = rules.operand_boxes(node, symbolic)
    for block in range(-(-size // chunk)):
        env = {"ts_b0": block, "ts_e0": min(chunk, size - block * chunk)}
        concrete = tuple((D.evaluate(o, env), D.evaluate(x, env)) for o, x in symbolic)
        for needed, covered in zip(_read(node, concrete), boxes, strict=True):
            spans = [(D.evaluate(o, env), D.evaluate(x, env)) for o, x in covered]
            for index in needed:
                assert all(o <= i < o + x for i, (o, x) in zip(index, spans, strict=True)), (node, env, covered)
