"""Lowerings of TensorFlow ops to IR, one function per op, grouped by kind."""
from . import (  # noqa: F401  (they fill the tables)
    array,
    backward,
    branches,
    einsum,
    fused,
    gradients,
    image,
    math,
    nn,
    quantise,
    random,
    reduction,
    segments,
    shape,
    transposed,
)
from .registry import (
    INEXACT,
    REGISTRY,
    SYMBOLIC,
    Lowering,
    is_contraction,
    is_literal,
    is_metadata,
    is_product,
    lower,
    needs_gpu,
    needs_value,
    symbolic,
    why_not,
)

__all__ = ["INEXACT", "REGISTRY", "SYMBOLIC", "Lowering", "is_contraction", "is_literal", "is_metadata",
           "is_product", "lower", "needs_gpu", "needs_value", "symbolic", "why_not"]
