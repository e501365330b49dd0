"""Which target a graph is for, from the options and from where its nodes are placed."""
from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

import tensorflow as tf

from ..options import Options

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


def host_input(op: str, index: int, count: int) -> bool:
    """True when an op that stays TensorFlow's reads this input in host memory on a GPU."""
    wanted = HOST_INPUTS.get(op, ())
    return index in wanted or index - count in wanted
