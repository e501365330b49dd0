"""Which target a graph is for, from the options and from where its nodes are placed."""
from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

import tensorflow as tf
from tensorflow.python.framework import kernels

from ..options import Options
from .lower import REGISTRY
from .view import GraphView, NodeView

# Ops that read these inputs in host memory when they run on a GPU (negative: from the end).  What computes such small
# integers must stay TensorFlow's: it runs them on the host.
HOST_INPUTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Reshape", "BroadcastTo", "Tile", "Transpose", "ConjugateTranspose", "Pad", "PadV2", "MirrorPad",
                     "ReverseV2", "ExpandDims", "Squeeze", "Cumsum", "Cumprod", "Sum", "Mean", "Prod", "Max", "Min",
                     "All", "Any", "EuclideanNorm", "ArgMax", "ArgMin", "OneHot", "TopKV2", "SplitV", "Roll"),
                    tuple(range(1, 8))),
    **dict.fromkeys(("Fill", "RandomUniform", "RandomStandardNormal", "TruncatedNormal", "Split", "Concat", "Empty",
                     "RandomUniformInt", "Conv2DBackpropInput", "Conv3DBackpropInputV2",
                     "DepthwiseConv2dNativeBackpropInput"), (0,)),
    **dict.fromkeys(("StatelessRandomUniform", "StatelessRandomNormal", "StatelessRandomUniformV2",
                     "StatelessRandomNormalV2", "StatelessTruncatedNormal", "StatelessTruncatedNormalV2"),
                    tuple(range(4))),
    **dict.fromkeys(("Range", "LinSpace", "BroadcastArgs", "BroadcastGradientArgs", "DynamicStitch"), tuple(range(16))),
    **dict.fromkeys(("Slice", "StridedSlice"), (1, 2, 3)), "StridedSliceGrad": (0, 1, 2, 3),
    "GatherV2": (2,), "ConcatV2": (-1,), "If": (0,), "StatelessIf": (0,), "Case": (0,), "StatelessCase": (0,),
    "Switch": (1,), "RefSwitch": (1,), "LoopCond": (0,), "ResizeBilinear": (1,), "ResizeNearestNeighbor": (1,),
    **dict.fromkeys(("TensorListReserve", "EmptyTensorList"), (0, 1)),
    **dict.fromkeys(("TensorListFromTensor", "TensorListSetItem", "TensorListStack", "TensorListPopBack",
                     "TensorListResize"), (1,)), "TensorListGetItem": (1, 2),
    **dict.fromkeys(("AvgPoolGrad", "AvgPool3DGrad"), (0,)),
    "Conv2DBackpropFilter": (1,), "Conv3DBackpropFilterV2": (1,), "DepthwiseConv2dNativeBackpropFilter": (1,),
}
HOST_INTEGERS = ("int32",)  # TensorFlow keeps them on the host where it only routes them
ROUTING = frozenset({"Enter", "Exit", "NextIteration", "Merge", "Switch", "While", "StatelessWhile", "If",
                     "StatelessIf", "PartitionedCall", "StatefulPartitionedCall"})
FAR = 64  # nodes around one that are asked where they are


def is_gpu(device: str) -> bool:
    """True when a placement names a GPU."""
    return "GPU" in device.upper()


def is_cpu(device: str) -> bool:
    """True when a placement names a CPU."""
    return "CPU" in device.upper()


@functools.cache
def gpu_target() -> str | None:
    """The target of the first GPU that TensorFlow lists, e.g. "cuda:sm_90"; None when it lists none."""
    for device in tf.config.list_physical_devices("GPU"):
        capability = tf.config.experimental.get_device_details(device).get("compute_capability")
        if capability:
            return f"cuda:sm_{capability[0]}{capability[1]}"
    return None


def resolve(options: Options, devices: Iterable[str]) -> Options:
    """Options whose target is not "auto": the GPU's when there is one and the graph is not all placed on CPUs."""
    if options.target != "auto":
        return options
    target = gpu_target()
    placed = list(devices)
    on_cpu = bool(placed) and any(map(is_cpu, placed)) and not any(map(is_gpu, placed))
    return replace(options, target="host" if target is None or on_cpu else target)


def home(view: GraphView, n: NodeView) -> str:
    """The device of a node; where TensorFlow has no kernel for a GPU, and so put it on a CPU, that of a GPU near it.

    A program may compute it there: products and splits of int32, images of uint8 ...
    """
    if not is_cpu(n.device) or has_gpu_kernel(n):
        return n.device
    seen, near = {n.name}, [n]
    for node in near:
        around = [*(src for src, _ in node.inputs), *(reader for reader, _, _ in view.consumers(node.name))]
        for other in (view[name] for name in dict.fromkeys(around) if name not in seen):
            if is_gpu(other.device):
                return other.device
            seen.add(other.name)
            if len(near) < FAR and other.op in REGISTRY and is_cpu(other.device) and not has_gpu_kernel(other):
                near.append(other)
    return n.device


def has_gpu_kernel(n: NodeView) -> bool:
    """True where TensorFlow has a kernel of the op for a GPU and the node's types, or the node has no kernel at all."""
    if n.proto is None or n.op in ("Placeholder", "Const"):
        return True
    wanted = {name: n.attr_proto(name) for limits in _gpu_kernels(n.op) for name in limits}
    return any(all(value is None or not value.type or value.type in limits[name]
                   for name, value in wanted.items() if name in limits) for limits in _gpu_kernels(n.op))


@functools.cache
def _gpu_kernels(op: str) -> tuple[dict[str, frozenset[int]], ...]:
    """The element types that each of an op's kernels for a GPU takes, by the attr that names the type."""
    found = kernels.get_registered_kernels_for_op(op).kernel
    return tuple({c.name: frozenset(c.allowed_values.list.type) for c in k.constraint if c.allowed_values.list.type}
                 for k in found if k.device_type in ("GPU", "DEFAULT"))


def host_input(op: str, index: int, count: int) -> bool:
    """True when an op that stays TensorFlow's reads this input in host memory on a GPU."""
    wanted = HOST_INPUTS.get(op, ())
    return index in wanted or index - count in wanted
