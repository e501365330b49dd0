"""Code generation: a KernelSchedule becomes the text of a kernel, which host and CUDA headers give meaning."""
from .emit import emit
from .kernel import Kernel
from .unit import HOST_FLAGS, level_flags, translation_unit

__all__ = ["HOST_FLAGS", "Kernel", "emit", "level_flags", "translation_unit"]
