"""Lowerings of TensorFlow ops to IR, one function per op, grouped by kind."""
from . import array, einsum, fused, gradients, math, nn, reduction, shape  # noqa: F401  (they fill the tables)
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
    needs_value,
    symbolic,
    why_not,
)

__all__ = ["INEXACT", "REGISTRY", "SYMBOLIC", "Lowering", "is_contraction", "is_literal", "is_metadata",
           "is_product", "lower", "needs_value", "symbolic", "why_not"]
