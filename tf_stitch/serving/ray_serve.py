"""A Ray Serve deployment whose replicas hold a StitchSession each, one per GPU (extra [ray]).

    from ray import serve
    from tf_stitch.serving.ray_serve import Tenant, application

    handle = serve.run(application({"ranker": Tenant("models/ranker/1", slo_ms=20)}))
    answer = handle.run.remote("ranker", {"x": x}).result()

Over HTTP a request is ``{"tenant": "ranker", "inputs": {"x": [[...]]}}`` and its answer ``{"outputs": {...}}``.
"""
from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import OptionError

try:
    import ray
    from ray import serve
except ImportError:
    raise OptionError("The Ray Serve deployment needs Ray; install tf-stitch[ray].") from None

ONGOING = 256  # requests that a replica takes at once
HTTP_STATUS = {"InvalidArgumentError": 400, "OptionError": 400, "ResourceExhaustedError": 429,
               "UnavailableError": 503, "DeadlineExceededError": 504}


@dataclass(frozen=True)
class Tenant:
    """A model that every replica serves.

    ``folder`` must be there on every machine; the rest is as in StitchSession.add.
    """

    folder: str | os.PathLike[str]
    slo_ms: float | None = None
    priority: str = "latency"
    signature: str | None = None
    weight: float = 1.0
    max_queue: int = 1000
    stitch: bool = True
    verify: bool = True


class Replica:
    """One process with one session.  Ray makes it; requests come through a deployment's handle or over HTTP."""

    def __init__(self, tenants: Mapping[str, Tenant], options: Mapping[str, Any]) -> None:
        from .session import StitchSession

        self._session = StitchSession(**options)
        for name, tenant in tenants.items():
            settings = {k: v for k, v in vars(tenant).items() if k != "folder"}
            self._session.add(name, tenant.folder, **settings)

    async def run(self, tenant: str, inputs: Any, timeout_ms: float | None = None) -> dict[str, np.ndarray]:
        """The outputs of a request by name.  Raises what StitchSession.submit raises."""
        return await self._session.arun(tenant, inputs, timeout_ms=timeout_ms)

    async def __call__(self, request: Any) -> Any:
        """Answers an HTTP request."""
        from starlette.responses import JSONResponse

        try:
            body = await request.json()
            answer = await self.run(body["tenant"], _arrays(body["inputs"]), body.get("timeout_ms"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, OptionError):
                return JSONResponse({"error": str(error)}, 400)
            return JSONResponse({"error": "A request is {\"tenant\": NAME, \"inputs\": {NAME: VALUES}}."}, 400)
        except Exception as error:
            return JSONResponse({"error": str(error)}, HTTP_STATUS.get(type(error).__name__, 500))
        return JSONResponse({"outputs": {k: _plain(v) for k, v in answer.items()}})

    async def stats(self) -> dict[str, Any]:
        """StitchSession.stats() of this replica."""
        return {**self._session.stats(), "pid": os.getpid(), "gpus": ray.get_gpu_ids()}

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        """Swaps versions while requests go on: ``user_config={"versions": {NAME: FOLDER}}``.

        Ray calls it in replicas that run when a config file with another user_config is deployed.
        """
        import asyncio

        for name, folder in config.get("versions", {}).items():
            await asyncio.to_thread(self._session.swap, name, folder)

    async def check_health(self) -> None:
        """Raises when the replica serves nothing any more, so that Ray replaces it."""
        if not self._session.tenants:
            raise RuntimeError("The session is closed.")

    def __del__(self) -> None:
        session = getattr(self, "_session", None)
        if session is not None:
            session.close()


def application(tenants: Mapping[str, Tenant], *, replicas: int | None = None,
                versions: Mapping[str, str] | None = None, name: str = "tf_stitch", **options: Any) -> Any:
    """A Serve application, for serve.run.

    Args:
      tenants: what every replica serves.
      replicas: None: one for each GPU of the cluster, at least one.
      versions: folders that tenants are swapped to when a replica starts, by name; also the ``user_config`` of a
        deployment from a config file, where a change swaps them in the replicas that run.
      name: of the deployment.
      options: of the StitchSession of each replica.

    A replica has a GPU for itself where the cluster has any; Ray shows it no other.
    """
    if not tenants:
        raise OptionError("A deployment needs at least one tenant.")
    gpus = int(ray.cluster_resources().get("GPU", 0)) if ray.is_initialized() else 0
    deployment = serve.deployment(
        name=name, num_replicas=replicas or max(1, gpus), max_ongoing_requests=ONGOING,
        logging_config={"enable_access_log": False},
        ray_actor_options={"num_gpus": 1 if gpus else 0, "num_cpus": 1},
        user_config={"versions": dict(versions or {})})(Replica)
    return deployment.bind(dict(tenants), dict(options))


def _arrays(inputs: Any) -> Any:
    """JSON's lists as arrays; their types follow from the signature."""
    return {k: np.asarray(v) for k, v in inputs.items()} if isinstance(inputs, dict) else np.asarray(inputs)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    value = np.asarray(value)
    return [_plain(v) for v in value] if value.dtype.kind == "O" else value.tolist()
