"""The ways of sharing a device that serve-bench compares.

    timeslice    one request at a time, in the order of arrival: one session behind a lock
    hyperq       a thread for each model, and on a GPU a stream and memory of its own (a virtual device)
    processes    a process for each model; the driver switches between them (processes.py)
    mps          the same under NVIDIA's Multi-Process Service, which lets them run side by side
    batching     TensorFlow's BatchFunction: requests of one model are merged
    stitched     stitched models, side by side
    superkernel  stitched models, with the kernels of concurrent requests packed by the scheduler

All but the last two run the models as TensorFlow made them.
"""
from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from .. import saved_model
from ..errors import OptionError
from .load import Client, Inputs
from .session import StitchSession

POLICIES = ("timeslice", "hyperq", "batching", "stitched", "superkernel")
OURS = ("stitched", "superkernel")
OTHERS = ("processes", "mps")  # take longer to start
THREADS = 128            # of the policies that may have many requests at once
BEST_EFFORT_THREADS = 4  # of best effort beside others, while none of those is there: about enough to fill a device
LOADERS = 8              # models that are loaded at a time
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)  # that BatchFunction pads to, in requests' rows
BATCH_WAIT_US, BATCH_THREADS = 1000, 4  # of each model


@dataclass(frozen=True)
class Model:
    """A model under load: where it lies, and its client.

    ``copies``: folders of what a policy serves instead, by policy ("stitched", "superkernel", "batching"); what is not
    there is made when it is needed.
    """

    folder: Path
    client: Client
    signature: str | None = None
    copies: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Devices:
    """Where models run.

    Attributes:
      gpus: virtual GPUs of this process: 0 for the policies that share one, 1, 2, ... for hyperq's models, the last one
        for models that go before others.
      config: a ConfigProto that says so (None on a machine without a GPU).
      memory_mb: of each.
    """

    gpus: int = 0
    config: Any = None
    memory_mb: int = 0

    @property
    def shared(self) -> str | None:
        """The device that models share."""
        return "GPU:0" if self.gpus else None

    def own(self, index: int) -> str | None:
        """A device, with a stream of its own, for one model."""
        return f"GPU:{1 + index % (self.gpus - 2)}" if self.gpus > 2 else self.shared

    @property
    def urgent(self) -> str | None:
        """A device whose stream goes before the others'."""
        return f"GPU:{self.gpus - 1}" if self.gpus > 2 else self.shared


def virtual_gpus(count: int, memory_mb: int) -> Devices:
    """Splits the first GPU into ``count + 2`` virtual ones of ``memory_mb`` each; no devices where there is no GPU.

    The last one's stream has a higher priority.
    Must come before anything else uses the GPU in this process.  Raises OptionError when it comes too late.
    """
    from tensorflow.core.protobuf import config_pb2

    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return Devices()
    limits, priorities = [memory_mb] * (count + 2), [0] * (count + 1) + [-1]
    try:
        tf.config.set_visible_devices(gpus[:1], "GPU")
        tf.config.set_logical_device_configuration(
            gpus[0], [tf.config.LogicalDeviceConfiguration(memory_limit=m, experimental_priority=p)
                      for m, p in zip(limits, priorities)])
    except (RuntimeError, ValueError) as error:
        raise OptionError(f"The GPU cannot be split any more: {error}") from None
    config = config_pb2.ConfigProto()
    config.gpu_options.visible_device_list = "0"
    config.gpu_options.experimental.virtual_devices.add(memory_limit_mb=limits, priority=priorities)
    return Devices(len(limits), config, memory_mb)


def open_session(policy: str, models: Sequence[Model], devices: Devices, work: Path, *,
                 scheduler_options: Mapping[str, Any] | None = None, threads: int = THREADS) -> StitchSession:
    """A session that serves ``models`` in one of the POLICIES, warmed up.  ``work``: a folder for what it makes.

    Raises OptionError for another policy, SchedulerError when the scheduler refuses its options.
    """
    if policy not in POLICIES:
        raise OptionError(f"Policy '{policy}' is not known; use {', '.join((*POLICIES, *OTHERS))}.")
    count = {"timeslice": 1, "hyperq": len(models)}.get(policy, threads)
    mixed = policy in OURS and any(m.client.best_effort for m in models)
    session = StitchSession(coalesce=policy == "superkernel", threads=count, config=devices.config,
                            reserve=max(count - BEST_EFFORT_THREADS, 0) if mixed else 0, beside=0,
                            scheduler_options=scheduler_options)

    def add(index: int) -> None:
        model = models[index]
        device = devices.own(index) if policy == "hyperq" else devices.shared
        urgent = mixed and not model.client.best_effort
        _add(session, policy, model, devices.urgent if urgent else device, work)

    try:
        with ThreadPoolExecutor(LOADERS) as pool:
            list(pool.map(add, range(len(models))))
    except BaseException:
        session.close(0)
        raise
    return session


def _add(session: StitchSession, policy: str, model: Model, device: str | None, work: Path) -> None:
    client, folder = model.client, model.copies.get(policy, model.folder)
    own_way = policy in OURS
    if policy == "batching" and policy not in model.copies:
        folder = work / f"batching_{client.name}"
        batched(model, folder)
    session.add(
        client.name, folder, stitch=own_way, verify=False, signature=None if policy == "batching" else model.signature,
        # without an SLO, requests of one priority go in the order in which they came
        slo_ms=client.slo_ms if own_way else None,
        priority="best_effort" if own_way and client.best_effort else "latency",
        max_in_flight=1 if policy == "hyperq" else None, max_queue=100_000,
        warmup=_of_every_size(client.samples[0]) if policy == "batching" else client.samples[:1],
        device=device)


def _of_every_size(sample: Inputs) -> list[Inputs]:
    """A request of each batch size that BatchFunction pads to."""
    rows = max((np.shape(v)[0] for v in sample.values() if np.ndim(v)), default=1)
    sizes = [size for size in BATCH_SIZES if size >= rows] or [rows]
    return [{k: np.resize(v, (size, *np.shape(v)[1:])) for k, v in sample.items()} for size in sizes]


def merging(function: Callable[..., Sequence[tf.Tensor]]) -> Callable[..., Sequence[tf.Tensor]]:
    """A function whose concurrent calls BatchFunction merges along the first dim of every argument and result."""
    merged = tf.nondifferentiable_batch_function(
        BATCH_THREADS, BATCH_SIZES[-1], BATCH_WAIT_US, allowed_batch_sizes=list(BATCH_SIZES),
        max_enqueued_batches=10_000)(lambda *args: list(function(*args)))

    def call(*args: tf.Tensor) -> Sequence[tf.Tensor]:
        with tf.device("/CPU:0"):  # merging is on the host; the model's own nodes run where they are put
            results = merged(*args)
        return results if isinstance(results, (list, tuple)) else [results]

    return call


def batched(model: Model, folder: Path) -> None:
    """Writes a copy of a model whose requests BatchFunction merges."""
    loaded = saved_model.load(model.folder)
    signature = saved_model.signature_of(loaded, model.signature or "serving_default")
    specs = dict(sorted(signature.structured_input_signature[1].items()))
    outputs = sorted(signature.structured_outputs)

    def of_model(*args: tf.Tensor) -> list[tf.Tensor]:
        results = signature(**dict(zip(specs, args)))
        return [results[k] for k in outputs]

    merged = merging(of_model)
    module = tf.Module()
    module.loaded = loaded
    module.call = tf.function(lambda *args: dict(zip(outputs, merged(*args))), autograph=False, input_signature=[
        tf.TensorSpec(s.shape, s.dtype, name) for name, s in specs.items()])
    shutil.rmtree(folder, ignore_errors=True)
    tf.saved_model.save(module, os.fspath(folder), signatures=module.call)


def expected(model: Model) -> list[dict[str, np.ndarray]]:
    """The answers of the model as TensorFlow made it to its client's samples, one at a time."""
    signature = saved_model.signature_of(saved_model.load(model.folder), model.signature or "serving_default")
    specs = signature.structured_input_signature[1]
    return [{k: v.numpy() for k, v in signature(**{n: tf.constant(x, specs[n].dtype) for n, x in s.items()}).items()}
            for s in model.client.samples]
