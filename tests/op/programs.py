"""Programs with kernels written by hand, so that the op is tested apart from the code generator."""
from __future__ import annotations

import dataclasses
import functools

from tf_stitch.backend import host
from tf_stitch.ir import dims as D
from tf_stitch.ir.graph import Guard, SymbolSource
from tf_stitch.ir.separable import Batch
from tf_stitch.program.program import AliasStep, Buffer, Grid, KernelStep, LibraryStep, Program

TEXT = r"""
#include <stdint.h>
struct ts_problem { void* const* buffers; const int64_t* dims; int64_t blocks; };
#define KERNEL extern "C" __attribute__((visibility("default"))) void
#define ARGS const ts_problem* p, int64_t begin, int64_t end, char* shared, int32_t* status
#define UNUSED (void)shared; (void)status

// y[i] = 2 x[i] + 1 over dims[0] elements, 64 in a block
KERNEL t_axpb(ARGS) {
  UNUSED;
  const float* x = (const float*)p->buffers[0];
  float* y = (float*)p->buffers[1];
  for (int64_t b = begin; b < end; ++b)
    for (int64_t i = b * 64; i < b * 64 + 64 && i < p->dims[0]; ++i) y[i] = 2.0f * x[i] + 1.0f;
}

// z[i] = x[i] * y[i], 64 in a block
KERNEL t_mul(ARGS) {
  UNUSED;
  const float *x = (const float*)p->buffers[0], *y = (const float*)p->buffers[1];
  float* z = (float*)p->buffers[2];
  for (int64_t b = begin; b < end; ++b)
    for (int64_t i = b * 64; i < b * 64 + 64 && i < p->dims[0]; ++i) z[i] = x[i] * y[i];
}

// out[r] = sum of row r, summed from a copy in shared memory; a block is a row of dims[0]
KERNEL t_rowsum(ARGS) {
  (void)status;
  const float* x = (const float*)p->buffers[0];
  float* y = (float*)p->buffers[1];
  float* row = (float*)shared;
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t i = 0; i < p->dims[0]; ++i) row[i] = x[r * p->dims[0] + i];
    float sum = 0;
    for (int64_t i = 0; i < p->dims[0]; ++i) sum += row[i];
    y[r] = sum;
  }
}

// y[i] = x[idx[i]]; an index out of range sets the status
KERNEL t_gather(ARGS) {
  (void)shared;
  const float* x = (const float*)p->buffers[0];
  const int32_t* idx = (const int32_t*)p->buffers[1];
  float* y = (float*)p->buffers[2];
  for (int64_t i = begin; i < end; ++i) {
    if (idx[i] < 0 || idx[i] >= p->dims[0]) {
      *status = 1;
      y[i] = 0;
    } else {
      y[i] = x[idx[i]];
    }
  }
}

// y[i] = dims[0], a block an element
KERNEL t_fill(ARGS) {
  UNUSED;
  int64_t* y = (int64_t*)p->buffers[0];
  for (int64_t i = begin; i < end; ++i) y[i] = p->dims[0];
}
"""


@functools.cache
def code() -> dict[str, bytes]:
    """The kernels above, for this machine and one level below it."""
    return host.compile_text(TEXT, host.supported_levels()[:2])


def program(buffers, steps, symbols=None, guards=(), **changes) -> Program:
    made = Program(list(buffers), list(steps), dict(symbols or {}), list(guards), TEXT, code(), name="by_hand")
    return dataclasses.replace(made, **changes)


def dim(name: str, lo: int | None = 0, hi: int | None = None) -> D.Expr:
    return D.symbol(name, lo, hi)


def launch(kernel: str, buffers, size, block: int = 64, dims=None, shared=0, cost=100) -> KernelStep:
    return KernelStep(kernel, tuple(buffers), tuple(dims if dims is not None else (size,)), D.ceildiv(size, block),
                      shared, cost, origin=f"from_{kernel}")


def axpb(**changes) -> Program:
    """[n, m] float32 -> 2x + 1."""
    n, m = dim("n"), dim("m")
    return program([Buffer("input", 0, "float32", (n, m)), Buffer("output", 0, "float32", (n, m))],
                   [launch("t_axpb", (0, 1), n * m)],
                   {"n": SymbolSource("dim", 0, 0), "m": SymbolSource("dim", 0, 1)}, **changes)


def chain() -> Program:
    """x [n], y [k] with n == k guarded: t = 2x+1; u = 2t+1; v = t*u; z = v*y.  Outputs z, and v as [n, 1]."""
    n, k = dim("n"), dim("k")
    f = "float32"
    buffers = [Buffer("input", 0, f, (n,)), Buffer("input", 1, f, (k,)), Buffer("output", 0, f, (n,)),
               Buffer("output", 1, f, (n, 1)), Buffer("temp", 0, f, (n,)), Buffer("temp", 1, f, (n,)),
               Buffer("temp", 2, f, (n,))]
    steps = [launch("t_axpb", (0, 4), n), launch("t_axpb", (4, 5), n), launch("t_mul", (4, 5, 6), n),
             launch("t_mul", (6, 1, 2), n), AliasStep(6, 3)]
    return program(buffers, steps, {"n": SymbolSource("dim", 0, 0), "k": SymbolSource("dim", 1, 0)},
                   [Guard("eq", n, k, "y has x's length")])


def phased() -> Program:
    """x, y [n] -> z = v*u with t = 2x+1, s = 2y+1; v = t*s, u = 2t+1; and u.  A grid of three phases."""
    n, f = dim("n"), "float32"
    buffers = [Buffer("input", 0, f, (n,)), Buffer("input", 1, f, (n,)), Buffer("output", 0, f, (n,)),
               Buffer("output", 1, f, (n,)), *(Buffer("temp", i, f, (n,)) for i in range(4))]
    steps = [launch("t_axpb", (0, 4), n), launch("t_axpb", (1, 5), n), launch("t_mul", (4, 5, 6), n),
             launch("t_axpb", (4, 7), n), launch("t_mul", (6, 7, 2), n), AliasStep(7, 3)]
    grid = Grid("t_grid", ("t_axpb", "t_mul"), (0, 1, 2, 3), 0, (2, 2, 1), ((0, ()), (64, (0,))))
    return program(buffers, steps, {"n": SymbolSource("dim", 0, 0)}, grids=[grid])


def rowsum() -> Program:
    """[n, m] float32 -> [n]; needs a row of shared memory."""
    n, m = dim("n"), dim("m")
    return program([Buffer("input", 0, "float32", (n, m)), Buffer("output", 0, "float32", (n,))],
                   [launch("t_rowsum", (0, 1), n, 1, (m,), m * 4, m * 10)],
                   {"n": SymbolSource("dim", 0, 0), "m": SymbolSource("dim", 0, 1)})


def gather() -> Program:
    """x [n] float32, idx [k] int32 -> x[idx]."""
    n, k = dim("n"), dim("k")
    return program([Buffer("input", 0, "float32", (n,)), Buffer("input", 1, "int32", (k,)),
                    Buffer("output", 0, "float32", (k,))],
                   [launch("t_gather", (0, 1, 2), k, 1, (n,))],
                   {"n": SymbolSource("dim", 0, 0), "k": SymbolSource("dim", 1, 0)})


def joinable() -> Program:
    """x [n, m], table [v], idx [n] -> sums of x's rows [n], table[idx] [n], 2 table + 1 [v], table[idx] as [n, 1].

    Requests of one table may be joined along n.
    """
    n, m, v, f = dim("n"), dim("m"), dim("v"), "float32"
    buffers = [Buffer("input", 0, f, (n, m)), Buffer("input", 1, f, (v,)), Buffer("input", 2, "int32", (n,)),
               Buffer("output", 0, f, (n,)), Buffer("output", 1, f, (n,)), Buffer("output", 2, f, (v,)),
               Buffer("output", 3, f, (n, 1))]
    steps = [launch("t_rowsum", (0, 3), n, 1, (m,), m * 4, m * 10), launch("t_gather", (1, 2, 4), n, 1, (v,)),
             launch("t_axpb", (1, 5), v), AliasStep(4, 6)]
    symbols = {"n": SymbolSource("dim", 0, 0), "m": SymbolSource("dim", 0, 1), "v": SymbolSource("dim", 1, 0)}
    return program(buffers, steps, symbols, batch=Batch("n", (0, None, 0), ((0, 1), (0, 1), None, (0, 1))))


def joinable_matrices() -> Program:
    """x, y [n, m], u [k], w [m, n] -> (2x + 1) y [n, m], 2u + 1 [k], 2w + 1 [m, n], all float32.

    Requests of one u may be joined along n, which is not the outermost dim of all.
    """
    n, m, k, f = dim("n"), dim("m"), dim("k"), "float32"
    buffers = [Buffer("input", 0, f, (n, m)), Buffer("input", 1, f, (n, m)), Buffer("input", 2, f, (k,)),
               Buffer("input", 3, f, (m, n)), Buffer("output", 0, f, (n, m)), Buffer("output", 1, f, (k,)),
               Buffer("output", 2, f, (m, n)), Buffer("temp", 0, f, (n, m))]
    steps = [launch("t_axpb", (0, 7), n * m), launch("t_mul", (7, 1, 4), n * m), launch("t_axpb", (2, 5), k),
             launch("t_axpb", (3, 6), n * m)]
    symbols = {"n": SymbolSource("dim", 0, 0), "m": SymbolSource("dim", 0, 1), "k": SymbolSource("dim", 2, 0)}
    return program(buffers, steps, symbols, batch=Batch("n", (0, 0, None, 1), ((0, 1), None, (1, 1))))


def columns(guards=()) -> Program:
    """x [m, n] float32 -> 2x + 1, whose requests may be joined along n."""
    n, m = dim("n"), dim("m")
    return program([Buffer("input", 0, "float32", (m, n)), Buffer("output", 0, "float32", (m * n,))],
                   [launch("t_axpb", (0, 1), n * m)],
                   {"m": SymbolSource("dim", 0, 0), "n": SymbolSource("dim", 0, 1)}, guards,
                   batch=Batch("n", (1,), ((0, 1),)))


def reshape() -> Program:
    """x [n, m] float32 -> [m, n] (the same memory), no kernels."""
    n, m = dim("n"), dim("m")
    return program([Buffer("input", 0, "float32", (n, m)), Buffer("output", 0, "float32", (m, n))], [AliasStep(0, 1)],
                   {"n": SymbolSource("dim", 0, 0), "m": SymbolSource("dim", 0, 1)}, code={}, text="")


def fill() -> Program:
    """shape int32 [2], value known at run time -> int64 [shape[0]] filled with shape[1]; shape[0] is not above 1000."""
    n, v = dim("n", 0, 1000), dim("v", None)
    return program([Buffer("input", 0, "int32", (2,)), Buffer("output", 0, "int64", (n,))],
                   [launch("t_fill", (1,), n, 1, (v,))],
                   {"n": SymbolSource("value", 0, 0), "v": SymbolSource("value", 0, 1)})


def matmul(dtype: str = "float32", flags=(0, 0, 0, 0, 0), **changes) -> Program:
    """lhs [b, m, k], rhs [b, k, n] (each as its flags say), [bias [n]] -> [b, m, n], by a library step."""
    trans_lhs, trans_rhs, broadcast_lhs, broadcast_rhs, has_bias = flags
    batch, m, n, k = (dim(name) for name in ("batch", "m", "n", "k"))
    lhs = [1 if broadcast_lhs else batch, *((k, m) if trans_lhs else (m, k))]
    rhs = [1 if broadcast_rhs else batch, *((n, k) if trans_rhs else (k, n))]
    shapes = [tuple(lhs), tuple(rhs)] + ([(n,)] if has_bias else [])
    symbols, guards = {}, []
    for i, shape in enumerate(shapes):
        for axis, d in enumerate(shape):
            if isinstance(d, D.Expr):
                symbols.setdefault(str(d), SymbolSource("dim", i, axis))
    if broadcast_lhs and broadcast_rhs:
        batch = 1
    buffers = [Buffer("input", i, dtype, shape) for i, shape in enumerate(shapes)]
    buffers.append(Buffer("output", 0, dtype, (batch, m, n)))
    step = LibraryStep("matmul", tuple(range(len(buffers))), (batch, m, n, k), tuple(flags), "from_matmul")
    return program(buffers, [step], symbols, guards, **{"code": {}, "text": "", **changes})


def conv(dtype: str = "float32", image=(9, 7), window=(3, 2), strides=(2, 1), low=(1, 0), high=(0, 2), dilations=(1, 2),
         channels: int = 6, results: int = 10, groups: int = 1, bias: int = 0, residual: int = 0, relu: int = 0,
         gradient: bool = False, **changes) -> Program:
    """x [batch, *image, channels], w [results, *window, channels / groups], [bias [results]], [residual], by a library
    step -> [batch, *places, results]; with ``gradient`` x and what that gives, by one -> what lies as w does."""
    batch = dim("batch")
    places = tuple(max(0, (n + a + b - (k - 1) * d - 1) // s + 1)
                   for n, a, b, k, d, s in zip(image, low, high, window, dilations, strides, strict=True))
    out = (batch, *places, results)
    shapes = [(batch, *image, channels), (results, *window, channels // groups), *[(results,)] * bias,
              *[out] * residual]
    if gradient:
        shapes[1], out = out, shapes[1]
    buffers = [Buffer("input", i, dtype, shape) for i, shape in enumerate(shapes)]
    buffers.append(Buffer("output", 0, dtype, out))
    step = LibraryStep("conv_filter" if gradient else "conv", tuple(range(len(buffers))),
                       (batch, channels, results, *image, *places, *window),
                       (bias, residual, relu, groups, *strides, *low, *high, *dilations), "from_conv")
    return program(buffers, [step], {"batch": SymbolSource("dim", 0, 0)}, **{"code": {}, "text": "", **changes})
