"""Settings that all tests share."""
from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_STITCH_CACHE", str(Path(__file__).resolve().parent.parent / "build" / "test_cache"))

# The same examples in every CI run; new ones in every local run.
hypothesis.settings.register_profile("tf_stitch", deadline=None, derandomize=bool(os.environ.get("CI")),
                                     suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tf_stitch")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(Path(p).exists() for p in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/nvidia0")):
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))
