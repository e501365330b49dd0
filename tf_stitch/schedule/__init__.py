"""Schedules: which box of every tensor a block owns, what is kept on chip, and in which stages."""
from .build import Known, build
from .kernel_schedule import KernelSchedule
from .target import CUDA, HOST, Target
from .tile import Schedule

__all__ = ["CUDA", "HOST", "KernelSchedule", "Known", "Schedule", "Target", "build"]
