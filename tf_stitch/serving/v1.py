"""A tenant's graph behind the face of a tf.compat.v1.Session, for code written against one."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from .dispatcher import Dispatcher, Tenant


class V1Session:
    """Runs tensors of a tenant's graph: the version that is current when a run begins.

    ``run``, ``make_callable``, ``graph`` and the context manager are those of tf.compat.v1.Session.  Runs go past the
    tenant's queue and its limits; the scheduler still knows whose they are.
    """

    def __init__(self, dispatcher: Dispatcher, tenant: Tenant) -> None:
        self._dispatcher, self._tenant = dispatcher, tenant

    @property
    def graph(self) -> Any:
        """The tenant's graph."""
        return self._tenant.model.graph

    def run(self, fetches: Any, feed_dict: Mapping[Any, Any] | None = None, options: Any = None,
            run_metadata: Any = None) -> Any:
        """Values of ``fetches`` (tensors, operations, their names, nested as you like).

        Raises what tf.compat.v1.Session.run raises, UnavailableError when the tenant takes no requests any more.
        """
        feeds = {_name(key): value for key, value in (feed_dict or {}).items()}
        with self._dispatcher.hold(self._tenant) as model:
            return model.session.run(tf.nest.map_structure(_name, fetches), feeds, options, run_metadata)

    def make_callable(self, fetches: Any, feed_list: Sequence[Any] = ()) -> Callable[..., Any]:
        """A function of the values of ``feed_list`` that gives ``fetches``."""
        return lambda *values: self.run(fetches, dict(zip(feed_list, values, strict=True)))

    def close(self) -> None:
        """Does nothing: the StitchSession owns the graph."""

    def __enter__(self) -> V1Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _name(thing: Any) -> Any:
    """What a tensor or an operation is called: names mean the same in the next version of a model."""
    return thing if isinstance(thing, str) else getattr(thing, "name", thing)
