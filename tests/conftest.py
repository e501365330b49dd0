"""Settings that all tests share."""
from __future__ import annotations

import os
import shutil
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
    if "PYTEST_XDIST_WORKER" in os.environ:
        _skip(items, "alone", "measures the GPU's free memory, which other workers change")
    if not any(Path(p).exists() for p in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/nvidia0")):
        _skip(items, "gpu", "no NVIDIA GPU here")
    if shutil.which("nvcc") is None:
        _skip(items, "nvcc", "no nvcc here")


def _skip(items: list[pytest.Item], keyword: str, reason: str) -> None:
    for item in items:
        if keyword in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))
