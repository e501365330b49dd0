"""The Ray Serve deployment, on local replicas."""
from __future__ import annotations

import asyncio

import numpy as np
import pytest

from models import soak
from tf_stitch.errors import OptionError

from .support import NATIVE

ray = pytest.importorskip("ray", reason="the extra [ray] is not installed")
pytest.importorskip("ray.serve", reason="the extra [ray] is not installed")
from ray import serve  # noqa: E402

from models import ray_serve  # noqa: E402
from tf_stitch.serving.ray_serve import Replica, Tenant, application  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    return soak.toys(tmp_path_factory.mktemp("ray"), 2, NATIVE)


@pytest.fixture(scope="module")
def cluster():
    yield ray_serve.start(3)
    serve.shutdown()
    ray.shutdown()


def test_replicas(cluster, subjects):
    faulty, plain = subjects
    tenants = {"a": Tenant(plain.versions[0], slo_ms=1000), "f": Tenant(faulty.versions[0])}
    handle = serve.run(application(tenants, replicas=2, threads=8))
    ray_serve.check(handle, plain, "a", 0, 60)
    assert len(ray_serve.processes(handle, 2)) == 2
    with pytest.raises(Exception, match="too large"):
        handle.run.remote("f", {"x": np.full((1, soak.WIDTH), 3.0)}).result(timeout_s=60)
    with pytest.raises(Exception, match="no tenant 'z'"):
        handle.run.remote("z", {}).result(timeout_s=60)

    url = f"http://127.0.0.1:{cluster}/"
    x = np.linspace(-1, 1, soak.WIDTH).reshape(1, -1)
    status, answer = ray_serve.post(url, {"tenant": "a", "inputs": {"x": x.tolist()}})
    assert status == 200
    y = {"y": np.array(answer["outputs"]["y"])}
    assert plain.right(0, {"x": x.astype(np.float32)}, y)
    assert ray_serve.post(url, {"tenant": "f", "inputs": {"x": (x + 5).tolist()}})[0] == 400
    assert ray_serve.post(url, {"tenant": "z", "inputs": {}}) == (400, {
        "error": "There is no tenant 'z'; there are a, f."})
    assert "A request is" in ray_serve.post(url, ["a"])[1]["error"]

    handle = serve.run(application(tenants, replicas=2, threads=8, versions={"a": str(plain.versions[1])}))
    ray_serve.check(handle, plain, "a", 1, 60)


def test_versions_are_swapped_in_place(subjects):
    _, plain = subjects
    replica = Replica({"a": Tenant(plain.versions[0])}, {"threads": 4, "coalesce": False})
    inputs = plain.draw(np.random.default_rng(0))

    async def swapped():
        await replica.check_health()
        waiting = [asyncio.ensure_future(replica.run("a", inputs)) for _ in range(20)]
        await replica.reconfigure({"versions": {"a": str(plain.versions[1])}})
        return await asyncio.gather(*waiting), await replica.run("a", inputs)

    before, after = asyncio.run(swapped())
    assert all(plain.right(0, inputs, y) or plain.right(1, inputs, y) for y in before)
    assert plain.right(1, inputs, after)
    replica._session.remove("a")
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(replica.check_health())


def test_needs_a_tenant():
    with pytest.raises(OptionError, match="at least one tenant"):
        application({})

