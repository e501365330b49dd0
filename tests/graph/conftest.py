"""What tests of several edits of graphs share."""
from __future__ import annotations

import pytest
import tensorflow as tf

from tf_stitch import rewrites
from tf_stitch.graph import updates


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that functions are made of while a test runs."""
    made: list[tf.compat.v1.GraphDef] = []
    changed = updates.updates_as_values

    def spy(*args):
        made.append(changed(*args))
        return made[-1]

    monkeypatch.setattr(updates, "updates_as_values", spy)
    monkeypatch.setattr(rewrites, "remembered", lambda graph, options, what, make: make())  # not from the disk
    return made
