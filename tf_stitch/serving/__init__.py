"""Serving several models to concurrent requests: StitchSession, its metrics, load generation and Ray Serve."""
from __future__ import annotations

from .scheduler import SchedulerError
from .session import StitchSession
from .v1 import V1Session

__all__ = ["SchedulerError", "StitchSession", "V1Session"]
