"""A session of few threads, and a function that blocks."""
from __future__ import annotations

import pytest

import tf_stitch

from .support import NATIVE, Gate


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open.set()


@pytest.fixture
def session(request):
    """Coalescing where a test asks for it (marks.BOTH)."""
    coalesce = getattr(request, "param", False)
    with tf_stitch.StitchSession(coalesce=coalesce, threads=4, reserve=1, options=NATIVE) as session:
        yield session
