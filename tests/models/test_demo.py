"""The demo's first impression."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_no_log_lines_of_tensorflow():
    """Not those of the import, nor of the search for GPUs."""
    script = "import models.demo, tensorflow as tf; print(float(tf.constant(1.0) + 1))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("2.0\n", "")
