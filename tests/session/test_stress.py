"""Requests under way while everything around them changes: callbacks that raise, cancelled awaits, removed and swapped
tenants, drains, the v1 face, and the end of the session."""
from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from tf_stitch.errors import OptionError

from .support import NATIVE, WIDTH, check, rows, scaled, workers

EXPECTED = (tf.errors.OpError, OptionError, CancelledError)
TENANTS = ("a", "b", "c")


class Callers:
    """Threads that use a session in every way; ``bad`` holds what should not have happened."""

    def __init__(self, session, folders, seed):
        self.session, self.folders, self.seed = session, folders, seed
        self.stop, self.futures, self.bad, self.answers = threading.Event(), [], [], 0

    def run(self, seconds):
        works = [self.submits] * 4 + [self.awaits] * 2 + [self.runs_v1, self.changes, self.changes]
        threads = [threading.Thread(target=self.guard, args=(w, i), daemon=True) for i, w in enumerate(works)]
        for t in threads:
            t.start()
        self.stop.wait(seconds)
        self.stop.set()
        for t in threads:
            t.join(30)
        assert not any(t.is_alive() for t in threads)

    def guard(self, work, number):
        rng = random.Random(100 * self.seed + number)
        try:
            while not self.stop.is_set():
                try:
                    work(rng, rng.choice(TENANTS))
                except EXPECTED:
                    self.stop.wait(0.001)
        except BaseException as error:
            self.bad.append(f"{work.__name__}: {error!r}")

    def submits(self, rng, name):
        x = rows(rng.randrange(1000), rng.randrange(1, 4))
        future = self.session.submit(name, x, timeout_ms=rng.choice([None, None, 1, 50]))
        self.futures.append(future)
        if rng.random() < 0.05:
            future.cancel()
        if not future.done():  # a callback of a future that is done runs here
            future.add_done_callback(lambda _: self.after(random.Random(rng.random())))
        if rng.random() < 0.7:
            answer = future.result(20)
            self.answers += 1
            if not any(np.allclose(answer["y"], self.right(factor, x), rtol=1e-4, atol=1e-5) for factor in (1.0, 2.0)):
                self.bad.append("a wrong answer")

    @staticmethod
    def right(factor, x):
        return (np.tanh(x) * factor + 1.0) / (1.0 + np.exp(-x))

    def after(self, rng):
        """What a caller's callback does."""
        kind = rng.random()
        if threading.current_thread().name.startswith("tf_stitch_request") and kind < 0.05:
            raise rng.choice([SystemExit, KeyboardInterrupt])
        if kind < 0.1:
            raise ValueError("from a callback")
        if kind < 0.11:
            self.session.remove(rng.choice(TENANTS), 0.01)
        elif kind < 0.15:
            self.futures.append(self.session.submit(rng.choice(TENANTS), rows(1)))

    def awaits(self, rng, _):
        async def several():
            one = [asyncio.create_task(asyncio.wait_for(self.session.arun(rng.choice(TENANTS), rows(2)), limit))
                   for limit in (0.0005, 0.01, 5.0, 5.0)]
            await asyncio.sleep(0.001)
            one[rng.randrange(4)].cancel()
            if rng.random() < 0.5:  # else the loop ends with tasks under way
                await asyncio.gather(*one, return_exceptions=True)

        asyncio.run(several())

    def runs_v1(self, rng, name):
        with self.session.v1(name) as face:
            endpoint = face._tenant.model.endpoint()
            face.run(endpoint._fetches, {endpoint.inputs[0].tensor: np.ones((2, WIDTH), np.float32)})

    def changes(self, rng, name):
        kind = rng.random()
        if kind < 0.35:
            self.session.swap(name, rng.choice(self.folders), stitch=False, warmup=False)
        elif kind < 0.6:
            self.session.remove(name, rng.choice([None, 0.0, 1.0]))
        elif kind < 0.7:
            self.session.drain(rng.choice([0.0, 0.1, 2.0]))
            self.session.resume()
        else:
            self.session.add(name, self.folders[0], stitch=False, warmup=False, max_queue=40,
                             max_in_flight=rng.choice([None, 1, 2]), priority=rng.choice(["latency", "best_effort"]))
        self.stop.wait(0.02)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = []
    for factor in (1.0, 2.0):
        module = tf.Module()
        module.call = scaled(factor)
        module.weights = module.call.get_concrete_function().variables
        source, stitched = (tmp_path_factory.mktemp("models") / name for name in ("source", "stitched"))
        tf.saved_model.save(module, str(source), signatures=module.call)
        tf_stitch.rewrite_saved_model(source, stitched, options=NATIVE, verify=False)
        made.append(stitched)
    return made


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of coroutines that their loop did not wait for
@pytest.mark.parametrize(("coalesce", "seed"), [(False, 1), (False, 2), (True, 3)])
def test_every_request_ends_while_everything_changes(folders, coalesce, seed):
    before = workers()
    session = tf_stitch.StitchSession(coalesce=coalesce, threads=6, reserve=1, options=NATIVE)
    for name in TENANTS:
        session.add(name, folders[0], stitch=False, warmup=False)
    callers = Callers(session, folders, seed)
    callers.run(4.0)
    assert callers.bad == [] and callers.answers > 20
    session.resume()
    session.add("last", folders[1], stitch=False, warmup=False)
    check(session.run("last", rows(3)), 2.0, rows(3))
    assert session.close(20) is True
    assert all(future.done() for future in callers.futures)
    assert session._dispatcher.outstanding == 0 and workers() == before
