"""Requests to threads: a bounded pool that takes the most urgent request of a tenant that may still run one.

The graph runs outside of Python's lock, so a thread costs Python only what it takes to hand a request over and to
settle its answer.  What shares the GPU, and with whom, is the scheduler's affair in the op library; here only the order
is kept in which requests reach it, and how many of each tenant do.
"""
from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import tensorflow as tf

from .. import runtime
from .model import Endpoint, ServedModel
from .tally import Tally

THREAD_NAME = "tf_stitch_request"
NEVER_S = 1e9  # timeouts beyond it (30 years) are none: TensorFlow takes no such numbers of microseconds
LONGEST_WAIT_S = 5.0  # after it a best-effort request that may run goes first: none waits for ever
EXPIRY_S = 0.005  # between looks at requests that wait for a thread longer than they may
NO_SLO_S = 1.0  # how urgent requests without a deadline are, to order them with others
now = time.perf_counter
_log = logging.getLogger(__name__)


class Request:
    """A request on its way: bound to the version of the model that it came for."""

    __slots__ = ("arrays", "deadline", "endpoint", "expired", "expires", "future", "model", "settled", "submitted",
                 "tenant")

    def __init__(self, tenant: Tenant, model: ServedModel, endpoint: Endpoint, arrays: list[Any],
                 timeout_s: float | None) -> None:
        self.tenant, self.model, self.endpoint, self.arrays = tenant, model, endpoint, arrays
        self.future: Future[dict[str, Any]] = Future()
        self.settled = False  # it counts as outstanding no more
        self.expired = False  # it has its error, and waits to be taken from its queue
        self.submitted = now()
        self.expires = self.submitted + timeout_s if timeout_s is not None else math.inf
        self.deadline = min(self.submitted + tenant.due_s, self.expires)


class Tenant:
    """Whom requests are of: what they are due, what they may use, and what became of them.

    Attributes:
      key: its name in the scheduler.
      slo_s: seconds within which an answer is due (None: no promise).
      best_effort: gives way to the others.
      max_in_flight: requests of it that run at once.
      max_queue: requests of it that are taken and have no answer yet, beyond which further ones are rejected.
      model: the version that new requests go to.
    """

    def __init__(self, name: str, key: str, model: ServedModel, *, slo_s: float | None, best_effort: bool,
                 max_in_flight: int, max_queue: int) -> None:
        self.name, self.key, self.model = name, key, model
        self.slo_s, self.best_effort = slo_s, best_effort
        self.due_s = NO_SLO_S if slo_s is None else slo_s
        self.max_in_flight, self.max_queue = max_in_flight, max_queue
        self.tally = Tally(slo_s)
        self.waiting: deque[Request] = deque()  # beyond max_in_flight
        self.active = 0       # ready or running
        self.running = 0
        self.outstanding = 0  # taken and not settled
        self.removed = False
        self.changing = threading.Lock()  # held while another version is made


class Dispatcher:
    """The pool.  ``threads`` at most; best-effort requests leave ``reserve`` of them free for the others.

    While requests of the others run, best-effort ones begin only while fewer than ``beside`` of them run, or after
    LONGEST_WAIT_S: the others may be more than there is time for.
    """

    def __init__(self, threads: int, reserve: int, beside: int) -> None:
        self.threads, self.best_effort_limit = threads, max(1, threads - reserve)
        self.beside = min(beside, self.best_effort_limit)
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)
        self._expires = threading.Condition(self._lock)
        self._next_expiry = math.inf  # of requests that wait; earlier than any does no harm
        self._expirer: threading.Thread | None = None  # there once a request has a timeout
        self._ready: tuple[list[Any], list[Any]] = ([], [])  # heaps: those with a deadline to keep, best effort
        self._full: set[Tenant] = set()  # those whose requests wait beyond max_in_flight
        self._order = itertools.count()
        # Where each worker waits.  True: look for a request; False: end.
        self._wakes: list[SimpleQueue[bool]] = [SimpleQueue() for _ in range(threads)]
        # Of those that wait, the last one to begin first: its stack, its malloc arena and its core's caches are warm.
        self._idle: list[SimpleQueue[bool]] = []
        self._coming = threads  # workers that were woken and have not looked yet; at first, all
        self._running = [0, 0]  # as the heaps
        self._outstanding = 0
        self._waiters = 0
        self._answering = threading.local()  # .request: whose callbacks this thread runs
        self._callers: set[threading.Thread] = set()  # workers that may wait for others, in such a callback
        self._accepts = True
        self._closed = False
        self._workers = [threading.Thread(target=self._work, args=(wake,), name=f"{THREAD_NAME}_{i}", daemon=True)
                         for i, wake in enumerate(self._wakes)]
        for worker in self._workers:
            worker.start()

    # --- taking requests ----------------------------------------------------------------------------

    def submit(self, tenant: Tenant, endpoint_name: str | None, inputs: Any, timeout_s: float | None) -> Request:
        """Takes a request; its future gets the answer.

        Raises OptionError when the inputs do not fit, UnavailableError when no requests are taken,
        ResourceExhaustedError when the tenant has too many.
        """
        if timeout_s is not None:
            self._watch_expiry()
        while True:
            model = tenant.model
            endpoint = model.endpoint(endpoint_name)
            request = Request(tenant, model, endpoint, endpoint.bind(inputs), timeout_s)
            with self._lock:
                if tenant.model is model:  # not swapped meanwhile
                    self._take(request)
                    return request

    def _take(self, request: Request) -> None:
        tenant = request.tenant
        self._admit(tenant)
        request.model.outstanding += 1
        tenant.tally.submitted += 1
        if request.expires < self._next_expiry:
            self._next_expiry = request.expires
            self._expires.notify()
        if tenant.active < tenant.max_in_flight:
            tenant.active += 1
            self._make_ready(request)
            if self._runnable():
                self._wake_one()
        else:
            tenant.waiting.append(request)
            self._full.add(tenant)

    def _admit(self, tenant: Tenant) -> None:
        if not self._accepts or tenant.removed:
            gone = f"tenant '{tenant.name}' was removed" if tenant.removed else "the session is draining or closed"
            raise tf.errors.UnavailableError(None, None, f"The request was not taken: {gone}.")
        if tenant.outstanding >= tenant.max_queue:
            tenant.tally.count("rejected")
            raise tf.errors.ResourceExhaustedError(
                None, None, f"The request was not taken: tenant '{tenant.name}' has {tenant.outstanding} requests "
                "without an answer, and max_queue allows no more.")
        tenant.outstanding += 1
        self._outstanding += 1

    def _make_ready(self, request: Request) -> None:
        heapq.heappush(self._ready[request.tenant.best_effort], (request.deadline, next(self._order), request))

    def _wake_one(self) -> None:
        """A wake-up costs more than a short request, so none is given while as many workers come as requests are ready.
        """
        if self._idle and self._coming < len(self._ready[False]) + len(self._ready[True]):
            self._coming += 1
            self._idle.pop().put(True)

    # --- running them -------------------------------------------------------------------------------

    def _work(self, wake: SimpleQueue[bool]) -> None:
        runtime.library().tf_stitch_flush_denormals()  # graphs may run on this thread; TensorFlow's own do so
        request, _ = self._next(None, wake)
        while request is not None or wake.get():
            if request is not None:
                self._answer(request)
            request, closing = self._next(request, wake)
            if closing is not None:
                closing.close()
                closing = None  # a thread that waits holds nothing

    def _answer(self, request: Request) -> None:
        if not request.expired:
            self._end(request, *self._run(request))

    def _end(self, request: Request, value: Any, error: BaseException | None) -> None:
        latency_s = now() - request.submitted
        cancelled = not _begins(request.future)
        with self._lock:
            request.tenant.tally.settle(latency_s, error, cancelled)
        if cancelled:
            return  # whoever cancelled it gets no answer
        self._answering.request = request
        try:
            if error is not None:
                request.future.set_exception(error)
            else:
                request.future.set_result(value)
        except BaseException:  # a callback's SystemExit, say, which is not to end this thread; futures log errors
            _log.exception("A callback of a request to tenant '%s' ended with:", request.tenant.name)
        finally:
            self._answering.request = None
            if request.settled:
                with self._lock:
                    self._callers.discard(threading.current_thread())

    def _run(self, request: Request) -> tuple[Any, BaseException | None]:
        if request.future.cancelled():
            return None, None
        left = request.expires - now()
        if left <= 0:
            return None, _over()
        try:
            timeout_ms = 0 if left >= NEVER_S else max(1, math.ceil(left * 1e3))
            return request.endpoint(request.arrays, timeout_ms), None
        except BaseException as error:  # whatever it is, it is the request's
            return None, error

    def _next(self, done: Request | None, wake: SimpleQueue[bool]) -> tuple[Request | None, ServedModel | None]:
        """Books what is done, and picks what this thread does next (None: nothing may run now; it waits at ``wake``).

        Also gives the model to close, when that was the last request of a retired one.
        """
        with self._lock:
            if done is None:
                closing, self._coming = None, self._coming - 1
            else:
                closing = self._book(done)
            request = self._pick()
            if request is None:
                self._idle.append(wake)
            elif self._runnable():
                self._wake_one()
        return request, closing

    def _runnable(self) -> bool:
        urgent, best_effort = self._ready
        return bool(urgent or (best_effort and self._may_fill()))

    def _may_fill(self) -> bool:
        few = self._running[False] and not self._waits_long()
        return self._running[True] < (self.beside if few else self.best_effort_limit)

    def _overdue(self) -> bool:
        return self._waits_long() and self._may_fill()

    def _waits_long(self) -> bool:
        best_effort = self._ready[True]
        return bool(best_effort) and now() - best_effort[0][2].submitted > LONGEST_WAIT_S

    def _pick(self) -> Request | None:
        if not self._runnable():
            return None
        urgent, best_effort = self._ready
        request = heapq.heappop(best_effort if not urgent or self._overdue() else urgent)[2]
        self._running[request.tenant.best_effort] += 1
        request.tenant.running += 1
        return request

    def _book(self, request: Request) -> ServedModel | None:
        tenant, model = request.tenant, request.model
        self._running[tenant.best_effort] -= 1
        if tenant.waiting:
            self._make_ready(tenant.waiting.popleft())
            if not tenant.waiting:
                self._full.discard(tenant)
        else:
            tenant.active -= 1
        tenant.running -= 1
        if request.settled or request.expired:  # then who ends it settles it
            return None
        request.settled = True
        return self._release(tenant, model)

    def _release(self, tenant: Tenant, model: ServedModel) -> ServedModel | None:
        tenant.outstanding -= 1
        model.outstanding -= 1
        self._outstanding -= 1
        if self._waiters:
            self._settled.notify_all()
        return model if model.retired and not model.outstanding else None

    # --- requests that wait too long ----------------------------------------------------------------

    def _watch_expiry(self) -> None:
        if self._expirer is None:
            with self._lock:
                if self._expirer is None and not self._closed:
                    self._expirer = threading.Thread(target=self._expire, name=f"{THREAD_NAME}_expiry", daemon=True)
                    self._expirer.start()

    def _expire(self) -> None:
        """Ends requests that no thread has taken up in their time; a thread takes them from their queues later."""
        while not self._closed:
            with self._lock:
                left = self._next_expiry - now()
                if left > 0 and not self._closed:
                    self._expires.wait(None if left >= NEVER_S else left)
                over = self._overdue_in_queues() if self._next_expiry <= now() else []
            for request in over:
                self._end(request, None, _over())
                self._settle(request)
            if over or left <= 0:
                time.sleep(EXPIRY_S)

    def _overdue_in_queues(self) -> list[Request]:
        time_now, self._next_expiry, found = now(), math.inf, []
        heaps = (entry[2] for heap in self._ready for entry in heap)
        for request in itertools.chain(heaps, *(tenant.waiting for tenant in self._full)):
            if request.expired:
                continue
            if request.expires <= time_now:
                request.expired = True
                found.append(request)
            else:
                self._next_expiry = min(self._next_expiry, request.expires)
        return found

    # --- those who wait for requests ----------------------------------------------------------------

    def settle_caller(self) -> None:
        """To be called before what waits for requests: it may come from a callback of one, which has its answer.

        That one is settled now, or it would be waited for until its callback ends.
        """
        request: Request | None = getattr(self._answering, "request", None)
        if request is None or request.settled:
            return
        with self._lock:
            self._callers.add(threading.current_thread())
        self._settle(request)

    def _settle(self, request: Request) -> None:
        with self._lock:
            if request.settled:
                return
            request.settled = True
            closing = self._release(request.tenant, request.model)
        if closing is not None:
            closing.close()

    @contextlib.contextmanager
    def hold(self, tenant: Tenant) -> Iterator[ServedModel]:
        """The tenant's current version, which stays open until the body ends."""
        with self._lock:
            self._admit(tenant)
            model = tenant.model
            model.outstanding += 1
        try:
            yield model
        finally:
            with self._lock:
                closing = self._release(tenant, model)
            if closing is not None:
                closing.close()

    # --- control ------------------------------------------------------------------------------------

    def swap(self, tenant: Tenant, model: ServedModel) -> bool:
        """New requests go to ``model``; the old version is closed when its last request is answered.

        False, and nothing was done, when the tenant was removed.
        """
        with self._lock:
            if tenant.removed:
                return False
            old, tenant.model = tenant.model, model
            close = self._retire(old)
        if close:
            old.close()
        return True

    def remove(self, tenant: Tenant, timeout_s: float | None) -> bool:
        """Takes no further requests of a tenant and waits for those it has; False when some are left.

        The model is closed when the last one is answered.
        """
        with self._lock:
            tenant.removed = True
            done = self._wait(lambda: not tenant.outstanding, timeout_s)
            close = self._retire(tenant.model)
        if close:
            tenant.model.close()
        return done

    def _retire(self, model: ServedModel) -> bool:
        first, model.retired = not model.retired, True
        return first and not model.outstanding

    def drain(self, timeout_s: float | None) -> bool:
        """Takes no further requests, and waits for those that are under way; False when some are left."""
        with self._lock:
            self._accepts = False
            return self._wait(lambda: not self._outstanding, timeout_s)

    def resume(self) -> None:
        """Takes requests again after :meth:`drain`."""
        with self._lock:
            self._accepts = not self._closed

    def cancel_waiting(self, tenants: Iterable[Tenant]) -> None:
        """Cancels every request of ``tenants`` that no thread has taken up yet."""
        with self._lock:
            waiting = [request for tenant in tenants for request in tenant.waiting]
            waiting += [entry[2] for heap in self._ready for entry in heap]
        for request in waiting:
            request.future.cancel()

    def close(self, timeout_s: float | None) -> bool:
        """Ends the threads once they are idle; False when one still runs after ``timeout_s``.

        One that waits in a callback, perhaps for this, ends after it.
        """
        end = math.inf if timeout_s is None else now() + timeout_s
        with self._lock:
            self._closed, self._accepts = True, False
            self._expires.notify()
        for wake in self._wakes:
            wake.put(False)
        with self._lock:
            mine = {*self._callers, threading.current_thread()}
        threads = [*self._workers, *([self._expirer] if self._expirer else [])]
        others = [thread for thread in threads if thread not in mine]
        for worker in others:
            worker.join(None if end == math.inf else max(0.0, end - now()))
        return not any(worker.is_alive() for worker in others)

    def forked(self) -> None:
        """In a forked process, which has no threads of this one's and cannot know who held the lock: takes and has no
        requests."""
        self._lock = threading.Lock()
        self._settled, self._expires = threading.Condition(self._lock), threading.Condition(self._lock)
        self._closed, self._accepts, self._expirer = True, False, None
        self._workers, self._wakes, self._idle, self._outstanding = [], [], [], 0

    def is_locked(self, patience_s: float = 0.2) -> bool:
        """Whether the lock is held, perhaps by the calling thread, for so long."""
        free = self._lock.acquire(timeout=patience_s)
        if free:
            self._lock.release()
        return not free

    def _wait(self, done: Any, timeout_s: float | None) -> bool:
        self._waiters += 1
        try:
            return self._settled.wait_for(done, timeout_s)
        finally:
            self._waiters -= 1

    @property
    def running(self) -> int:
        """Threads that are at work."""
        with self._lock:
            return len(self._workers) - len(self._idle)

    @property
    def outstanding(self) -> int:
        """Requests that were taken and have no answer yet."""
        return self._outstanding


def _over() -> tf.errors.OpError:
    return tf.errors.DeadlineExceededError(None, None, "The request's time was over before it ran.")


def _begins(future: Future[Any]) -> bool:
    """False when it has ended: it was cancelled, or whoever holds it gave it a result."""
    try:
        return future.set_running_or_notify_cancel()
    except RuntimeError:
        return False
