"""What a workload is: a function with seeded random weights, its inputs, and its registry.

Weights and inputs are drawn in float32 from a fixed seed and then cast, so that a float64 instance of a
workload computes the same mathematical function: it is the reference that errors are measured against.
"""
from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

Function = Callable[..., Any]
Inputs = list[np.ndarray]


class Params:
    """Draws the weights of one workload in order, and keeps them."""

    def __init__(self, seed: int, dtype: tf.DType = tf.float32) -> None:
        self.dtype = dtype
        self.variables: list[tf.Variable] = []
        self._rng = np.random.default_rng(seed)

    def variable(self, value: np.ndarray, trainable: bool = True) -> tf.Variable:
        """A variable that holds ``value`` in the dtype of the instance."""
        var = tf.Variable(value.astype(self.dtype.as_numpy_dtype), trainable=trainable)
        self.variables.append(var)
        return var

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> tf.Variable:
        return self.variable((mean + scale * self._rng.standard_normal(shape)).astype(np.float32))

    def uniform(self, *shape: int, low: float, high: float) -> tf.Variable:
        return self.variable(self._rng.uniform(low, high, shape).astype(np.float32))

    def weight(self, *shape: int) -> tf.Variable:
        """A matrix or filter whose variance keeps activations near 1 (fan in: all axes but the last)."""
        return self.normal(*shape, scale=float(np.prod(shape[:-1])) ** -0.5)

    def bias(self, units: int) -> tf.Variable:
        return self.normal(units, scale=0.1)


@dataclass(frozen=True)
class Workload:
    """A benchmark case.

    Attributes:
      name: short name, as in the tables.
      about: one line: sizes and what one call does.
      batch: batch size of the benchmark.
      make: builds the weights and returns the function to call.
      inputs: (rng, batch) -> the arguments, in order; floats in float32.
      batched: per argument, whether its axis 0 is the batch.
      training: a call changes the weights.
    """

    name: str
    about: str
    batch: int
    make: Callable[[Params], Function]
    inputs: Callable[[np.random.Generator, int], Inputs]
    batched: tuple[bool, ...]
    training: bool = False

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.encode())

    def instance(self, dtype: tf.DType = tf.float32) -> Instance:
        """Fresh weights, the same every time."""
        params = Params(self.seed, dtype)
        return Instance(self, params, self.make(params))


@dataclass(frozen=True)
class Instance:
    """A workload with weights."""

    workload: Workload
    params: Params
    function: Function

    def inputs(self, batch: int | None = None) -> list[tf.Tensor]:
        """Seeded arguments for ``batch`` (default: the workload's own batch)."""
        w = self.workload
        arrays = w.inputs(np.random.default_rng(w.seed + 1), batch or w.batch)
        return [tf.constant(cast_floats(a, self.params.dtype)) for a in arrays]

    def signature(self, batch: int | None = None) -> list[tf.TensorSpec]:
        """Argument specs; ``batch`` None leaves the batch dim unknown where an argument has one."""
        specs = []
        for tensor, batched in zip(self.inputs(), self.workload.batched, strict=True):
            shape = tensor.shape.as_list()
            if batched:
                shape[0] = batch
            specs.append(tf.TensorSpec(shape, tensor.dtype))
        return specs

    def results(self, call: Function, args: Sequence[tf.Tensor]) -> Inputs:
        """Outputs of ``call`` as arrays; a training step's changed weights are part of them."""
        out = [np.asarray(t) for t in tf.nest.flatten(call(*args))]
        if self.workload.training:
            out += [v.numpy() for v in self.params.variables]
        return out


def cast_floats(array: np.ndarray, dtype: tf.DType) -> np.ndarray:
    return array.astype(dtype.as_numpy_dtype) if array.dtype == np.float32 else array


REGISTRY: dict[str, Workload] = {}


def workload(
    name: str,
    about: str,
    *,
    batch: int,
    inputs: Callable[[np.random.Generator, int], Inputs],
    batched: tuple[bool, ...] = (True,),
    training: bool = False,
) -> Callable[[Callable[[Params], Function]], Callable[[Params], Function]]:
    """Registers the decorated builder as a workload."""

    def add(make: Callable[[Params], Function]) -> Callable[[Params], Function]:
        REGISTRY[name] = Workload(name, about, batch, make, inputs, batched, training)
        return make

    return add
