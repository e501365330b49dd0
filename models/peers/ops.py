"""What the definitions are written in: the same operations of JAX and of PyTorch.

Images are NHWC in the files; :meth:`image` brings them into the library's own layout, which ``conv``, ``batch_norm``,
``max_pool``, ``pool_all`` and ``scale_channels`` keep.  Filters and matrices are TensorFlow's ([h, w, in, out] and
[in, out]); :meth:`prepare` lays a weight out as the library likes it, once.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = Any


class JaxOps:
    """jax.numpy, jax.nn and jax.lax."""

    def __init__(self) -> None:
        import jax
        import jax.numpy as jnp

        self.jax, self.jnp, self.nn = jax, jnp, jax.nn
        self.sigmoid, self.relu, self.relu6, self.softplus = jax.nn.sigmoid, jax.nn.relu, jax.nn.relu6, jax.nn.softplus
        self.tanh, self.matmul, self.where, self.sum, self.mean = jnp.tanh, jnp.matmul, jnp.where, jnp.sum, jnp.mean
        self.concat, self.stack, self.split, self.permute = jnp.concatenate, jnp.stack, jnp.split, jnp.transpose

    def prepare(self, weight: np.ndarray) -> Array:
        return self.jnp.asarray(weight)

    def image(self, x: Array) -> Array:
        return x

    def softmax(self, x: Array) -> Array:
        return self.nn.softmax(x, axis=-1)

    def log_softmax(self, x: Array) -> Array:
        return self.nn.log_softmax(x, axis=-1)

    def gelu(self, x: Array) -> Array:
        return self.nn.gelu(x, approximate=False)

    def gelu_tanh(self, x: Array) -> Array:
        return self.nn.gelu(x, approximate=True)

    def linear(self, x: Array, kernel: Array, bias: Array) -> Array:
        return x @ kernel + bias

    def transpose(self, x: Array) -> Array:
        return self.jnp.swapaxes(x, -1, -2)

    def take(self, table: Array, ids: Array) -> Array:
        return table[ids]

    def columns(self, x: Array, at: Sequence[int]) -> Array:
        return x[:, np.asarray(at)]

    def zeros_like(self, x: Array, shape: Sequence[int]) -> Array:
        return self.jnp.zeros(shape, x.dtype)

    def arange(self, x: Array, n: int) -> Array:
        return self.jnp.arange(n)

    def cast(self, x: Array, like: Array) -> Array:
        return x.astype(like.dtype)

    def layer_norm(self, x: Array, gamma: Array, beta: Array, epsilon: float) -> Array:
        return self.nn.standardize(x, axis=-1, epsilon=epsilon) * gamma + beta

    def attention(self, q: Array, k: Array, v: Array, bias: Array) -> Array:
        scores = q @ self.transpose(k) * q.shape[-1] ** -0.5
        return self.softmax(scores + bias) @ v

    def conv(self, x: Array, kernel: Array, stride: int, groups: int) -> Array:
        if groups > 1:  # TensorFlow's depthwise filter is [h, w, channels, 1]
            kernel = self.permute(kernel, (0, 1, 3, 2))
        return self.jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", feature_group_count=groups,
                                                 dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def batch_norm(self, x: Array, gamma: Array, beta: Array, mean: Array, variance: Array, epsilon: float) -> Array:
        return (x - mean) * (gamma * self.jax.lax.rsqrt(variance + epsilon)) + beta

    def max_pool(self, x: Array, size: int, stride: int) -> Array:
        return self.jax.lax.reduce_window(x, -self.jnp.inf, self.jax.lax.max, (1, size, size, 1),
                                          (1, stride, stride, 1), "SAME")

    def pool_all(self, x: Array) -> Array:
        return x.mean((1, 2))

    def scale_channels(self, x: Array, gates: Array) -> Array:
        return x * gates[:, None, None, :]

    def cross_entropy(self, logits: Array, labels: Array) -> Array:
        return -self.jnp.take_along_axis(self.log_softmax(logits), labels[:, None], 1).mean()

    def value_and_grad(self, loss: Callable[..., Array], at: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
        return self.jax.value_and_grad(loss, argnums=tuple(range(len(at))))(*at)

    def add_to(self, weight: Array, change: Array) -> Array:
        return weight + change

    def add_rows(self, table: Array, ids: Array, rows: Array) -> Array:
        return table.at[ids].add(rows)


class TorchOps:
    """torch and torch.nn.functional; images in channels-last memory."""

    def __init__(self) -> None:
        import torch
        import torch.nn.functional as F

        self.torch, self.F = torch, F
        self.sigmoid, self.tanh, self.relu, self.relu6 = torch.sigmoid, torch.tanh, F.relu, F.relu6
        self.matmul, self.softplus, self.gelu, self.take = torch.matmul, F.softplus, F.gelu, self._take
        self.concat, self.stack, self.permute, self.sum, self.mean = (torch.cat, torch.stack, torch.permute, torch.sum,
                                                                      torch.mean)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def prepare(self, weight: np.ndarray) -> Array:
        """Filters become [out, in, h, w] in channels-last memory."""
        tensor = self.torch.from_numpy(weight).to(self.device)
        if tensor.ndim != 4:
            return tensor
        depthwise = tensor.shape[3] == 1
        order = (2, 3, 0, 1) if depthwise else (3, 2, 0, 1)
        return tensor.permute(order).contiguous(memory_format=self.torch.channels_last)

    def image(self, x: Array) -> Array:
        return x.permute(0, 3, 1, 2)  # NHWC in memory is channels-last

    def softmax(self, x: Array) -> Array:
        return self.torch.softmax(x, -1)

    def log_softmax(self, x: Array) -> Array:
        return self.torch.log_softmax(x, -1)

    def gelu_tanh(self, x: Array) -> Array:
        return self.F.gelu(x, approximate="tanh")

    def linear(self, x: Array, kernel: Array, bias: Array) -> Array:
        return self.F.linear(x, kernel.T, bias)

    def transpose(self, x: Array) -> Array:
        return x.transpose(-1, -2)

    def split(self, x: Array, parts: int, axis: int) -> Sequence[Array]:
        return self.torch.chunk(x, parts, axis)

    def where(self, condition: Array, a: Array, b: Array) -> Array:
        return self.torch.where(condition, a, b)

    def _take(self, table: Array, ids: Array) -> Array:
        return self.F.embedding(ids, table)

    def columns(self, x: Array, at: Sequence[int]) -> Array:
        return x[:, self.torch.tensor(at, device=x.device)]

    def zeros_like(self, x: Array, shape: Sequence[int]) -> Array:
        return x.new_zeros(tuple(shape))

    def arange(self, x: Array, n: int) -> Array:
        return self.torch.arange(n, device=x.device)

    def cast(self, x: Array, like: Array) -> Array:
        return x.to(like.dtype)

    def layer_norm(self, x: Array, gamma: Array, beta: Array, epsilon: float) -> Array:
        return self.F.layer_norm(x, (x.shape[-1],), gamma, beta, epsilon)

    def attention(self, q: Array, k: Array, v: Array, bias: Array) -> Array:
        return self.F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(-1, -1, q.shape[2], -1))

    def conv(self, x: Array, kernel: Array, stride: int, groups: int) -> Array:
        """TensorFlow's SAME padding, which is not symmetric where a stride cuts it."""
        size = kernel.shape[2]
        return self.F.conv2d(self._pad(x, size, stride, 0.0), kernel, stride=stride, groups=groups)

    def _pad(self, x: Array, size: int, stride: int, value: float) -> Array:
        over = [max((-(-n // stride) - 1) * stride + size - n, 0) for n in (x.shape[3], x.shape[2])]
        edges = [e for o in over for e in (o // 2, o - o // 2)]
        return self.F.pad(x, edges, value=value) if any(edges) else x

    def batch_norm(self, x: Array, gamma: Array, beta: Array, mean: Array, variance: Array, epsilon: float) -> Array:
        return self.F.batch_norm(x, mean, variance, gamma, beta, False, 0.0, epsilon)

    def max_pool(self, x: Array, size: int, stride: int) -> Array:
        return self.F.max_pool2d(self._pad(x, size, stride, -float("inf")), size, stride)

    def pool_all(self, x: Array) -> Array:
        return x.mean((2, 3))

    def scale_channels(self, x: Array, gates: Array) -> Array:
        return x * gates[:, :, None, None]

    def cross_entropy(self, logits: Array, labels: Array) -> Array:
        return self.F.cross_entropy(logits, labels.long())

    def value_and_grad(self, loss: Callable[..., Array], at: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
        grads, value = self.torch.func.grad_and_value(loss, argnums=tuple(range(len(at))))(*at)
        return value, grads

    def add_to(self, weight: Array, change: Array) -> Array:
        return weight.add_(change)

    def add_rows(self, table: Array, ids: Array, rows: Array) -> Array:
        return table.index_add_(0, ids, rows)
