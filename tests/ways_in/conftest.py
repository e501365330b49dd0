"""Fixtures of the tests of the ways in."""
from __future__ import annotations

import pytest


@pytest.fixture
def switched_off():
    """Whatever a test enables is off again after it."""
    import tf_stitch

    yield
    tf_stitch.disable()
