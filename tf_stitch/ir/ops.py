"""The primitive operations: one table entry each, read by the verifier, the interpreter, the schedule
rules and the emitter.  Adding an elementwise op is one line here.

Attrs by op (``Dim`` = int or symbolic):
  param        index:int
  const        value:np.ndarray                     (small literals; large constants are params)
  shape_value  dims:tuple[Dim,...] (flat, row-major) integer tensor whose contents are symbolic dims
  iota         axis:int                             0,1,2,... along axis
  cast         -                                    TensorFlow's Cast (float to int truncates)
  bitcast      -                                    same element size
  select       inputs (cond, x, y), one shape       cond ? x : y
  broadcast    axes:tuple[int]  operand dim i is result dim axes[i] (equal sizes; axes increasing); other dims are new
  reshape      -
  transpose    perm:tuple[int]                      result dim i is operand dim perm[i]
  slice        starts:tuple[Dim], steps:tuple[int>0]
  reverse      axes:tuple[int]
  pad          low:tuple[Dim], high:tuple[Dim], interior:tuple[int]; inputs (x, value scalar)
  concat       axis:int; any number of inputs
  gather       inputs (params, indices); axis:int, batch_dims:int, mode:"error"|"clip"|"zero": what an index out of
               range gives (the error status, the nearest element, zero; clipping to an empty dim is the error)
               result = params.shape[:axis] + indices.shape[batch_dims:] + params.shape[axis+1:]
  gather_nd    inputs (params, indices); batch_dims:int, mode as gather
  order        integers to integers: which elements of the last dim are at its places in ascending order, the first of
               equal ones first
  search       inputs (table, queries); side:"left"|"right", batch_dims:int: for each query, how many elements of its
               row of the table (sorted along the last dim, the only one behind the batch dims) are less (or equal)
  segment      inputs (x, starts); kind:"sum"|"prod"|"max"|"min": result row s folds the rows of x from starts[s] to
               starts[s + 1] (clipped to what x has; none: the fold's identity)
  reduce       kind:"sum"|"prod"|"max"|"min"|"and"|"or"; axes:tuple[int] (sorted; dropped from the shape)
  arg_reduce   kind:"max"|"min"; axis:int           first index that beats the lowest (highest) finite number, else 0,
               so NaN never wins; an empty axis gives 0 (the importer rules it out: TensorFlow raises)
  scan         kind:"sum"|"prod"; axis:int, exclusive:bool, reverse:bool
  dot          batch:tuple[tuple[int],tuple[int]] and contract:likewise (lhs axes, rhs axes)
               result dims: batch, lhs free, rhs free (each in operand order)
  conv         inputs (x NHWC-like, filter HWIO-like); strides, padding:tuple[(lo,hi)], dilations, groups:int
               spatial rank 1..3, channels last; filter [*k, in/groups, out]
  conv_filter  inputs (x as conv's, g as conv's result); size:tuple[int], strides, padding, dilations, groups as conv's
               the gradient of a conv by its filter, [out, *size, in/groups]: sums over batch and places
  window       kind:"max"|"sum"|"mean"(mean ignores padding); size, strides, padding over spatial dims, channels last
Elementwise ops take operands of one shape (broadcasts are explicit) and one dtype.

The table is filled by ``elementwise`` and ``structural``; :func:`make` checks and makes a node.
"""
from __future__ import annotations

from . import elementwise, structural
from .opdef import CHEAP, COSTLY, EXPENSIVE, FREE, OPS, IRError, OpDef, Type, make, register, result_type

__all__ = ["CHEAP", "COSTLY", "EXPENSIVE", "FREE", "OPS", "IRError", "OpDef", "Type", "elementwise", "make", "register",
           "result_type", "structural"]
