"""A process for each model: what serving looks like without anything that shares a device on purpose.

The GPU's driver switches between processes in time slices.  Under NVIDIA's Multi-Process Service (MPS) their kernels
run side by side.  Every process makes its own load, since requests through a pipe would measure the pipe; the clock
that they keep to is the machine's.

They are forked from a process that has imported TensorFlow and used no device: a process's own import takes longer than
all that is measured, and many at a time much longer.
"""
from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import StitchError
from . import load
from .load import Arrivals, Measured, Outcome
from .policies import Model

START_S, LEAD_S = 180.0, 0.2  # a process's start takes at most; from asking for a load to its beginning
IMPORTED = ["tf_stitch.serving.session"]  # by the process that others are forked from


class ProcessError(StitchError):
    """A process of a benchmark could not start, or ended early."""


def get_ready() -> None:
    """Starts the process that others are forked from, unless it is there, and does not wait for it.

    Called early, it imports TensorFlow while other things are done.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
    multiprocessing.forkserver.ensure_running()


class ProcessPerModel:
    """Serves each model from a process of its own, until it is closed."""

    def __init__(self, models: Sequence[Model], *, mps: bool = False, memory_mb: int = 0) -> None:
        """``memory_mb``: of each process on a GPU (0: as much as it needs).

        Raises ProcessError when MPS is asked for and cannot be started, or a process cannot start.
        """
        self._clients = [m.client for m in models]
        self._stack = contextlib.ExitStack()
        try:
            needed = self._stack.enter_context(_mps()) if mps else {}
            get_ready()
            self._workers = [self._start(m, memory_mb, needed) for m in models]
            for pipe, process in self._workers:
                _receive(pipe, process)
        except BaseException:
            self.close()
            raise

    def load(self, arrivals: Arrivals, threads: int, warm: float) -> Outcome:
        """Sends a load; see load.run."""
        begin = time.perf_counter() + LEAD_S
        count = len(arrivals.times)
        whole = Measured(np.full(count, np.inf), np.full(count, np.inf), {}, 0, 0.0, 0.0)
        parts = [np.flatnonzero(arrivals.clients == i) for i in range(len(self._clients))]
        for part, (pipe, _) in zip(parts, self._workers):
            pipe.send((begin, arrivals.times[part], arrivals.samples[part]))
        for part, worker in zip(parts, self._workers):
            _merge(whole, part, _receive(*worker))
        return load.summary(self._clients, arrivals, whole, warm)

    def launches(self) -> None:
        """None: there is no scheduler."""

    def close(self) -> None:
        """Ends the processes, and MPS where it was started."""
        for pipe, _ in getattr(self, "_workers", []):
            with contextlib.suppress(OSError):
                pipe.send(None)
        for _, process in getattr(self, "_workers", []):
            process.join(10)
            if process.is_alive():
                process.terminate()
                process.join()
        self._workers = []
        self._stack.close()

    def _start(self, model: Model, memory_mb: int, environment: Mapping[str, str]) -> tuple[Any, Any]:
        context = multiprocessing.get_context("forkserver")
        mine, its = context.Pipe()
        process = context.Process(target=_serve, args=(its, model, memory_mb, environment), daemon=True)
        process.start()
        its.close()
        return mine, process


def _receive(pipe: Any, process: Any) -> Any:
    end = time.monotonic() + START_S
    while not pipe.poll(0.2):
        if not process.is_alive() or time.monotonic() > end:
            raise ProcessError("The process of a model ended early or did not answer; its messages say why.")
    try:
        answer = pipe.recv()
    except EOFError:
        raise ProcessError("The process of a model ended early; its messages say why.") from None
    if isinstance(answer, str):
        raise ProcessError(f"The process of a model failed: {answer}")
    return answer


def _merge(whole: Measured, part: np.ndarray, its: Measured) -> None:
    whole.sent[part], whole.done[part] = its.sent, its.done
    whole.errors.update({int(part[i]): error for i, error in its.errors.items()})
    whole.wrong += its.wrong
    whole.worst_error = max(whole.worst_error, its.worst_error)
    whole.finished = max(whole.finished, its.finished)


def _serve(pipe: Any, model: Model, memory_mb: int, environment: Mapping[str, str]) -> None:
    """What a process does: serves one model, one request at a time, to the loads that it is told to make."""
    os.environ.update(environment)  # before CUDA is used
    try:
        session = _session(model, memory_mb)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send(True)
    with session:
        for begin, times, samples in iter(pipe.recv, None):
            arrivals = Arrivals(times, np.zeros(len(times), int), samples)
            pipe.send(load.measure(session.submit, [model.client], arrivals, begin, 1))


def _session(model: Model, memory_mb: int) -> Any:
    import tensorflow as tf

    from .session import StitchSession

    gpus = tf.config.list_physical_devices("GPU")
    if gpus and memory_mb:
        tf.config.set_logical_device_configuration(
            gpus[0], [tf.config.LogicalDeviceConfiguration(memory_limit=memory_mb)])
    session = StitchSession(coalesce=False, threads=1, reserve=0)
    session.add(model.client.name, model.folder, stitch=False, signature=model.signature, max_queue=100_000,
                warmup=model.client.samples[:1])
    return session


@contextlib.contextmanager
def _mps() -> Iterator[dict[str, str]]:
    """Starts NVIDIA's Multi-Process Service for this user; the environment that its clients need."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        raise ProcessError("MPS cannot be started: there is no nvidia-cuda-mps-control.")
    with tempfile.TemporaryDirectory(prefix="tf_stitch_mps_") as folder:
        needed = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        started = subprocess.run([control, "-d"], env={**os.environ, **needed}, capture_output=True, text=True,
                                 check=False)
        if started.returncode:
            raise ProcessError(f"MPS cannot be started: {_last_line(started.stderr or started.stdout)}")
        try:
            yield needed
        finally:
            subprocess.run([control], input="quit\n", env={**os.environ, **needed}, capture_output=True, text=True,
                           check=False, timeout=30)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it gave no reason"])[-1][:200]

