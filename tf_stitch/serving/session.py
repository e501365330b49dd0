"""StitchSession: many models, many requests at once, on one process's devices."""
from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import numbers
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from .. import runtime, saved_model
from ..errors import OptionError, SavedModelError
from ..options import Options
from . import garbage, scheduler
from .dispatcher import Dispatcher, Tenant
from .model import ServedModel, devices, is_stitched
from .recording import Recorder
from .sources import save_function, stitched_copy
from .v1 import V1Session

PRIORITIES = ("latency", "best_effort")
WARMUP_RUNS = 3  # of each request: a CUDA graph is recorded on the second run of a shape
Inputs = Mapping[str, Any]
Answer = dict[str, np.ndarray]


@dataclass(frozen=True)
class _Source:
    """What a version of a tenant's model is made of; the fields are arguments of StitchSession.add."""

    model: Any
    signature: str | None
    stitch: bool
    verify: bool
    input_signature: Sequence[tf.TensorSpec] | None
    warmup: bool | Sequence[Inputs]


class StitchSession:
    """Serves several models to concurrent requests.

        with tf_stitch.StitchSession() as session:
            session.add("ranker", "models/ranker/1", slo_ms=20)
            session.add("batch_scores", score, priority="best_effort")
            scores = session.run("ranker", {"x": x})["scores"]
            future = session.submit("ranker", {"x": x}, timeout_ms=50)
            answer = await session.arun("ranker", {"x": x})

    Each model (a *tenant*) has a graph and a session of its own; models that are not stitched yet are, when they are
    added.  All methods may be called from any thread.
    """

    def __init__(self, *, coalesce: bool | None = None, threads: int = 64, reserve: int | None = None,
                 beside: int = 1, scheduler_options: Mapping[str, Any] | None = None,
                 options: Options | None = None, target: str = "auto", config: Any = None,
                 metrics_port: int | None = None) -> None:
        """
        Args:
          coalesce: pack the kernels of concurrent requests into superkernels, through the op library's scheduler
            (None: where TensorFlow sees a GPU).
          threads: requests that run at once, of all tenants together.
          reserve: threads that best-effort requests leave free (None: a quarter of them).
          beside: best-effort requests that may run beside others; further ones begin once no other request is there, or
            when one has waited for five seconds.
          scheduler_options: what tfs_scheduler_enable takes; see docs/session.md.  Without coalescing they are checked
            and not used.
          options: how models that are not stitched yet are rewritten, with ``target`` as in rewrite_saved_model.
          config: a tf.compat.v1.ConfigProto that every tenant's session starts from.
          metrics_port: serve Prometheus metrics on this port (0: any free one; see ``metrics_port``).

        Raises OptionError, LibraryError; SchedulerError when the scheduler refuses its options.
        """
        _check_above_0("threads", threads, whole=True)
        _check_count("beside", beside)
        if reserve is not None and not 0 <= reserve < threads:
            raise OptionError(f"Option 'reserve' is {reserve}; it must be at least 0 and below 'threads' ({threads}).")
        if config is not None and not isinstance(config, tf.compat.v1.ConfigProto):
            raise OptionError(f"Option 'config' is a {type(config).__name__}; it must be a tf.compat.v1.ConfigProto.")
        if coalesce not in (None, True, False):
            raise OptionError(f"Option 'coalesce' is {coalesce!r}; it must be True, False or None.")
        runtime.load()
        scheduler_options = {} if scheduler_options is None else scheduler_options
        _grow_memory()
        gpus = tf.config.list_physical_devices("GPU")
        self.coalesce = bool(gpus) if coalesce is None else coalesce
        self._options = Options.of(options)
        self._target, self._config = target, config
        self._tenants: dict[str, Tenant] = {}
        self._changes = threading.RLock()  # of what follows
        self._adding: set[str] = set()
        self._recorder: Recorder | None = None
        self._placed = 0
        self._closed = False
        self._http: Any = None
        with contextlib.ExitStack() as undo:
            if self.coalesce:  # kernels that concurrent requests can share
                self._options = replace(self._options, superkernels=True)
                scheduler.acquire(scheduler_options)
                undo.callback(scheduler.release)
            else:
                scheduler.check(scheduler_options)
            self._folder = Path(tempfile.mkdtemp(prefix="tf_stitch_session_"))
            undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self._dispatcher = Dispatcher(threads, threads // 4 if reserve is None else reserve, beside)
            undo.pop_all()
        garbage.begin()
        self._end = weakref.finalize(self, _end_here_or_apart, self._dispatcher, self._tenants, self._folder,
                                     self.coalesce)
        _sessions.add(self)
        try:
            if metrics_port is not None:
                self._serve_metrics(metrics_port)
        except BaseException:
            self._end()
            raise

    # --- tenants ------------------------------------------------------------------------------------

    def add(self, name: str, model: str | os.PathLike[str] | Callable[..., Any], *, slo_ms: float | None = None,
            priority: str = "latency", signature: str | None = None, weight: float = 1.0,
            max_in_flight: int | None = None, max_queue: int = 1000, device: str | None = None, stitch: bool = True,
            verify: bool = True, input_signature: Sequence[tf.TensorSpec] | None = None,
            warmup: bool | Sequence[Inputs] = True) -> None:
        """Adds a tenant, warmed up: requests by ``name`` are taken when this returns.

        Args:
          name: any text without NUL characters, not empty and not in use.
          model: a SavedModel folder, stitched or not, a Keras model, or a function (outputs are "output_0", ... unless
            it returns a dict).
          slo_ms: milliseconds within which an answer is due; requests are ordered by it, and metrics judge by it.
          priority: "latency", or "best_effort": gives way to the others.
          signature: of a SavedModel; what requests run unless they say otherwise.
          weight: share among tenants of one priority when the device is full.
          max_in_flight: requests of it that run at once (None: as many as there are threads).
          max_queue: requests of it without an answer, beyond which further ones raise ResourceExhaustedError.
          device: "GPU:1", "CPU:0", ...; "" leaves it to TensorFlow; None: the GPUs in turn, or the CPU.
          stitch: False leaves a SavedModel as it is.
          verify: compare a rewritten model's outputs with the original's.
          input_signature: types and shapes of a plain function's arguments.
          warmup: True sends the model's own warm-up requests (assets.extra/tf_serving_warmup_requests), else drawn
            ones; a list gives the requests; False sends none.

        Raises OptionError, SavedModelError, VerifyError.
        """
        if not isinstance(name, str) or not name or "\0" in name or not _is_unicode(name):
            raise OptionError(f"A tenant's name is text without NUL characters, and not empty; {name!r} is not.")
        self._check_open()  # close() holds the lock below while it waits for requests, perhaps the caller's
        entitled = _entitled(slo_ms, priority, weight, max_in_flight, max_queue)
        slo_s = None if slo_ms is None else slo_ms / 1e3
        with self._changes:
            self._check_open()
            if name in self._tenants or name in self._adding:
                raise OptionError(f"Tenant '{name}' is there already; swap() gives it another version of its model.")
            device = self._device(device)
            self._adding.add(name)
        try:
            with contextlib.ExitStack() as undo:
                key = scheduler.add_tenant(name) if self.coalesce else name
                if self.coalesce:
                    undo.callback(scheduler.remove_tenant, key)
                loaded = self._warmed(key, _Source(model, signature, stitch, verify, input_signature, warmup), device)
                undo.callback(loaded.close)
                if self.coalesce:
                    scheduler.set_tenant(key, entitled)
                with self._changes:
                    self._check_open()
                    self._tenants[name] = Tenant(
                        name, key, loaded, slo_s=slo_s, best_effort=priority == "best_effort",
                        max_in_flight=max_in_flight or self._dispatcher.threads, max_queue=max_queue)
                undo.pop_all()
        finally:
            self._adding.discard(name)
        garbage.settle()

    def swap(self, name: str, model: str | os.PathLike[str] | Callable[..., Any], *, signature: str | None = None,
             stitch: bool = True, verify: bool = True, input_signature: Sequence[tf.TensorSpec] | None = None,
             warmup: bool | Sequence[Inputs] = True) -> None:
        """Gives a tenant another version of its model, while requests go on.

        Requests that were taken before end on the old version, later ones run the new one.  When anything fails, the
        old version stays.  Arguments as in :meth:`add`.

        Raises what :meth:`add` raises; OptionError when requests that the old version takes would not fit: the new one
        must have its signatures, with inputs of the same names and types and at least its shapes, and at least its
        outputs, of the same types.
        """
        tenant = self._tenant(name)
        with tenant.changing:
            source = _Source(model, signature or tenant.model.default, stitch, verify, input_signature, warmup)
            loaded = self._load(tenant.key, source, tenant.model.device)
            with contextlib.ExitStack() as undo:
                undo.callback(loaded.close)
                loaded.check_replaces(tenant.model)
                _warm(loaded, source.warmup)
                if not self._dispatcher.swap(tenant, loaded):
                    raise OptionError(f"Tenant '{name}' was removed meanwhile.")
                undo.pop_all()
        garbage.settle()

    def remove(self, name: str, timeout_s: float | None = None) -> bool:
        """Takes no further requests of a tenant, waits for those that it has, and forgets it.

        False when some were left after ``timeout_s``; they still get their answers.
        """
        self._dispatcher.settle_caller()
        with self._changes:
            tenant = self._tenant(name)
            del self._tenants[name]  # a swap that is under way finds it removed
        done = self._dispatcher.remove(tenant, timeout_s)
        if self.coalesce:
            scheduler.remove_tenant(tenant.key)
        garbage.settle()
        return done

    @property
    def tenants(self) -> list[str]:
        """The names of the tenants."""
        return sorted(self._tenants)

    def signature(self, name: str, signature: str | None = None) -> dict[str, tf.TensorSpec]:
        """The inputs that a tenant's requests have, by name."""
        return self._tenant(name).model.endpoint(signature).specs()

    def version(self, name: str) -> int:
        """A number that changes with every :meth:`swap` of the tenant."""
        return self._tenant(name).model.version

    # --- requests -----------------------------------------------------------------------------------

    def submit(self, name: str, inputs: Any, *, signature: str | None = None, timeout_ms: float | None = None
               ) -> Future[Answer]:
        """Takes a request, and returns at once; the future gives the outputs by name, as arrays.

        ``inputs``: values by name (of a single input, the value itself will do).  Arrays of the right type are not
        copied: leave them alone until the answer is there.  ``timeout_ms``: after it, the request ends with
        DeadlineExceededError, wherever it is.  The future can be cancelled until its answer is there; a request that
        runs already then runs to its end, and the answer is dropped.  Callbacks of the future run on a thread that
        answers requests, so they must not wait for others.

        Raises OptionError when the inputs do not fit, the timeout is no number or there is no such tenant,
        ResourceExhaustedError when the tenant has too many requests, UnavailableError when none are taken any more.
        """
        tenant = self._tenants.get(name) or self._tenant(name)
        request = self._dispatcher.submit(tenant, signature, inputs, _timeout_s(timeout_ms))
        recorder = self._recorder
        if recorder is not None:
            recorder.note(name, request)
        return request.future

    def run(self, name: Any, inputs: Any = None, *, signature: str | None = None, timeout_ms: float | None = None,
            feed_dict: Mapping[Any, Any] | None = None) -> Any:
        """Runs a request and waits for its answer; see :meth:`submit`.

        Also takes what tf.compat.v1.Session.run takes (``fetches, feed_dict``), where the fetches are tensors or
        operations of a tenant's graph (:meth:`v1`).
        """
        if isinstance(name, str):
            return self.submit(name, inputs, signature=signature, timeout_ms=timeout_ms).result()
        return self._v1_of(name).run(name, feed_dict if inputs is None else inputs)

    async def arun(self, name: str, inputs: Any, *, signature: str | None = None, timeout_ms: float | None = None
                   ) -> Answer:
        """Runs a request without blocking the event loop; see :meth:`submit`.  Cancelling it cancels the request."""
        return await asyncio.wrap_future(self.submit(name, inputs, signature=signature, timeout_ms=timeout_ms))

    def v1(self, name: str) -> V1Session:
        """A tenant's graph behind the face of a tf.compat.v1.Session: ``run(fetches, feed_dict)``, ``graph``."""
        return V1Session(self._dispatcher, self._tenant(name))

    def record(self, path: str | os.PathLike[str]) -> Recorder:
        """Records requests (who, when, which shapes; no values) to a trace file for ``tf-stitch serve-bench``.

        Ends with the returned recorder's ``close()``, or use it as a context manager.
        """
        if self._recorder is not None:
            raise OptionError(f"Requests are recorded to '{self._recorder.path}' already.")
        self._recorder = Recorder(path, on_close=self._stop_recording)
        return self._recorder

    def _stop_recording(self) -> None:
        self._recorder = None

    # --- end ----------------------------------------------------------------------------------------

    def drain(self, timeout_s: float | None = None) -> bool:
        """Takes no further requests and waits until all have their answers; False when some are left then.

        :meth:`resume` takes requests again.
        """
        self._dispatcher.settle_caller()
        return self._dispatcher.drain(timeout_s)

    def resume(self) -> None:
        """Takes requests again after :meth:`drain`."""
        self._check_open()
        self._dispatcher.resume()

    def close(self, timeout_s: float | None = 30.0) -> bool:
        """Drains and gives everything back.  Requests that still wait after ``timeout_s`` are cancelled, those that run
        end with an error; False when there were some.  A closed session stays closed.

        This, :meth:`drain` and :meth:`remove` may be called from a future's callback: its own request has its answer
        and is not waited for."""
        self._dispatcher.settle_caller()
        with self._changes:
            if self._closed:
                return True
            self._closed = True
            if self._recorder is not None:
                self._recorder.close()
            done = self._dispatcher.drain(timeout_s)
            if not done:
                self._dispatcher.cancel_waiting(self._tenants.values())
            if self._http is not None:
                self._http.close()
            self._end()
            return done

    def __enter__(self) -> StitchSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("A StitchSession cannot be copied or pickled: it has threads, and models on devices.  Make one "
                        "in each process.")

    # --- watching -----------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """What happened so far: per tenant the counts of Tally and the queue's length; the scheduler's own numbers."""
        tenants = {name: {"submitted": t.tally.submitted, **t.tally.outcomes, "outstanding": t.outstanding,
                          "slo_attainment": t.tally.attainment, "version": t.model.version, "device": t.model.device}
                   for name, t in list(self._tenants.items())}
        return {"tenants": tenants, "outstanding": self._dispatcher.outstanding, "running": self._dispatcher.running,
                "scheduler": scheduler.stats() if self.coalesce and not self._closed else {}}

    def collector(self) -> Any:
        """A Prometheus collector of this session's metrics, to register where you like.  Needs prometheus-client."""
        from .metrics import SessionCollector

        return SessionCollector(self)

    @property
    def metrics_port(self) -> int | None:
        """The port of the metrics; None when they are not served."""
        return self._http.port if self._http is not None else None

    def _serve_metrics(self, port: int) -> None:
        from .metrics import MetricsServer

        self._http = MetricsServer(self, port)

    def _all_tenants(self) -> list[Tenant]:
        return list(self._tenants.values())

    # --- loading ------------------------------------------------------------------------------------

    def _warmed(self, key: str, source: _Source, device: str) -> ServedModel:
        loaded = self._load(key, source, device)
        try:
            _warm(loaded, source.warmup)
        except BaseException:
            loaded.close()
            raise
        return loaded

    def _load(self, key: str, source: _Source, device: str) -> ServedModel:
        own = Path(tempfile.mkdtemp(dir=self._folder))
        model = source.model
        try:
            if callable(model):
                folder = own / "function"
                save_function(model, folder, source.input_signature)
            elif isinstance(model, (str, os.PathLike)):
                folder = Path(model)
            else:
                raise OptionError("A tenant's model is a SavedModel folder or a function, not a "
                                  f"{type(model).__name__}.")
            if source.stitch and not is_stitched(folder):
                folder = stitched_copy(folder, self._options, self._target, source.verify, own, not callable(model))
            return ServedModel(folder, key, device=device, signature=source.signature, config=self._config)
        finally:
            shutil.rmtree(own, ignore_errors=True)

    @functools.cached_property
    def _devices(self) -> list[str]:
        return devices(self._config)

    def _device(self, wanted: str | None) -> str:
        """Where the next model goes: what is wanted ("": TensorFlow chooses), else the next GPU, else the CPU."""
        if wanted is not None:
            if wanted and wanted not in self._devices:  # TensorFlow would place its nodes on the CPU
                raise OptionError(f"There is no device '{wanted}'; there are {', '.join(self._devices)}.")
            return wanted
        gpus = [d for d in self._devices if d.startswith("GPU:")]
        if not gpus:
            return "CPU:0"
        self._placed += 1
        return gpus[(self._placed - 1) % len(gpus)]

    def _tenant(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            self._check_open()
            raise OptionError(f"There is no tenant '{name}'; there are {', '.join(self.tenants) or 'none'}.")
        return tenant

    def _v1_of(self, fetches: Any) -> V1Session:
        first = next(iter(tf.nest.flatten(fetches)), None)
        for tenant in list(self._tenants.values()):
            if getattr(first, "graph", None) is tenant.model.graph:
                return V1Session(self._dispatcher, tenant)
        raise OptionError("run() takes a tenant's name and inputs, or fetches that are tensors of a tenant's graph.")

    def _check_open(self) -> None:
        if self._closed:
            raise tf.errors.UnavailableError(None, None, "The session is closed, or of the process that this one was "
                                             "forked from.")

    def _forked(self) -> None:
        """A forked process has a session's memory and none of its threads: there, it is closed and gives back nothing.
        """
        self._end.detach()
        self._closed, self._changes = True, threading.RLock()  # a thread that is not there may have held the lock
        self._tenants = {}
        if self._http is not None:  # the port is the parent's
            self._http.forked()
            self._http = None
        self._dispatcher.forked()


_sessions: weakref.WeakSet[StitchSession] = weakref.WeakSet()


def _forked() -> None:
    for session in _sessions:
        session._forked()


os.register_at_fork(after_in_child=_forked)


def _end_here_or_apart(dispatcher: Dispatcher, *rest: Any) -> None:
    """A collection of garbage may end a session that was dropped on one of its own threads, under its lock."""
    if dispatcher.is_locked():
        threading.Thread(target=_end, args=(dispatcher, *rest), daemon=True).start()
    else:
        _end(dispatcher, *rest)


def _end(dispatcher: Dispatcher, tenants: dict[str, Tenant], folder: Path, coalesce: bool) -> None:
    """Gives back what a session holds; also when it was dropped without close()."""
    dispatcher.drain(0)
    dispatcher.close(5.0)
    for tenant in tenants.values():
        dispatcher.remove(tenant, 0)
        tenant.model.close()
        if coalesce:
            scheduler.remove_tenant(tenant.key)
    tenants.clear()
    if coalesce:
        scheduler.release()
    garbage.end()
    shutil.rmtree(folder, ignore_errors=True)


def _entitled(slo_ms: float | None, priority: str, weight: float, max_in_flight: int | None, max_queue: int
              ) -> dict[str, Any]:
    """What the scheduler is told of a tenant.  Raises OptionError."""
    if priority not in PRIORITIES:
        raise OptionError(f"Priority '{priority}' is not known; use {' or '.join(map(repr, PRIORITIES))}.")
    for what, value, whole in (("slo_ms", slo_ms, False), ("weight", weight, False),
                               ("max_in_flight", max_in_flight, True), ("max_queue", max_queue, True)):
        if value is not None:
            _check_above_0(what, value, whole)
    # The dispatcher sees to the other two; NumPy's numbers are none to JSON.
    return {"slo_ms": None if slo_ms is None else float(slo_ms), "priority": priority, "weight": float(weight)}


def _check_above_0(what: str, value: Any, whole: bool) -> None:
    """Raises OptionError."""
    number = isinstance(value, numbers.Integral if whole else numbers.Real) and not isinstance(value, bool)
    if not number or not 0 < float(value) < math.inf:
        raise OptionError(f"Option '{what}' is {value!r}; it must be a {'whole ' * whole}number above 0, and finite.")


def _check_count(what: str, value: Any) -> None:
    """Raises OptionError."""
    if not isinstance(value, numbers.Integral) or int(value) < 0:
        raise OptionError(f"Option '{what}' is {value!r}; it must be a whole number, at least 0.")


def _is_unicode(text: str) -> bool:
    """False for half of a character, which nothing outside of Python takes."""
    return text.encode(errors="ignore").decode() == text


def _timeout_s(timeout_ms: float | None) -> float | None:
    """Raises OptionError; NaN cannot be put in order with other requests' deadlines."""
    if timeout_ms is None or timeout_ms == math.inf:
        return None
    if not isinstance(timeout_ms, numbers.Real) or isinstance(timeout_ms, bool) or math.isnan(timeout_ms):
        raise OptionError(f"Option 'timeout_ms' is {timeout_ms!r}; it must be a number of milliseconds.")
    return float(timeout_ms) / 1e3  # NumPy's numbers are none to a lock


def _warm(model: ServedModel, how: bool | Sequence[Inputs]) -> None:
    """Runs warm-up requests, so that code is loaded and shapes are planned before the first real one."""
    if how is False:
        return
    for signature, inputs in _warmup_requests(model, how):
        endpoint = model.endpoint(signature)
        for _ in range(WARMUP_RUNS):
            _warm_once(endpoint, endpoint.bind(inputs))


def _warm_once(endpoint: Any, arrays: list[np.ndarray]) -> None:
    """Runs a request; where the scheduler rejects it because others come first, again a little later."""
    for wait_s in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, None):
        try:
            endpoint(arrays)
            return
        except tf.errors.ResourceExhaustedError:
            if wait_s is None:
                raise
            time.sleep(wait_s)


def _warmup_requests(model: ServedModel, how: Any) -> list[tuple[str | None, Any]]:
    from ..warmup import recorded

    if how is not True:
        if not isinstance(how, Sequence) or isinstance(how, (str, bytes)):
            raise OptionError(f"Option 'warmup' is {how!r}; it must be True, False or a list of requests' inputs.")
        return [(None, inputs) for inputs in how]
    found = recorded(model.folder)
    if found:
        return list(found)
    endpoint = model.endpoint()
    return [(None, _drawn_for(endpoint))]


def _drawn_for(endpoint: Any) -> dict[str, np.ndarray]:
    """Inputs that the signature takes, drawn from its types and shapes."""
    signature = saved_model.Signature(endpoint.name, lambda **_: {}, endpoint.specs())
    last: Exception | None = None
    for inputs in saved_model._drawn(signature, 1):
        try:
            endpoint(endpoint.bind(inputs))
            return inputs
        except (tf.errors.OpError, OptionError) as error:
            last = error
    raise SavedModelError(f"No warm-up inputs could be drawn that signature '{endpoint.name}' accepts "
                          f"({saved_model._first_line(last) if last else 'none'}); give some (warmup=[...]) or "
                          "use warmup=False.")


_grow_once = threading.Lock()


def _grow_memory() -> None:
    """GPU memory is taken as it is needed, unless this process uses the GPU already."""
    with _grow_once:
        for gpu in tf.config.list_physical_devices("GPU"):
            try:
                if tf.config.get_logical_device_configuration(gpu) is None:
                    tf.config.experimental.set_memory_growth(gpu, True)
            except RuntimeError:  # TensorFlow has started its devices
                return
