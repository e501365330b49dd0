"""Machine code is loaded also where the system allows no code in memory files."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tf_stitch.backend import host

ROOT = Path(__file__).resolve().parent.parent.parent

NO_MEMFD = """
#include <errno.h>
extern "C" int memfd_create(const char*, unsigned) { errno = ENOSYS; return -1; }
"""

SCRIPT = """
import os, pathlib
import tensorflow as tf
from tests.op import programs
from tests.op.calls import counted, specs_of, stitched
from tf_stitch.backend import host

def run(program):
    f = tf.function(stitched(program, lambda x: x - 100), input_signature=specs_of(program), autograph=False)
    result, ran, fell_back = counted(lambda: f([[1.0]]))
    return float(result[0, 0]), ran, fell_back

assert run(programs.axpb()) == (3.0, 1, 0)
assert not list(pathlib.Path(os.environ["TMPDIR"]).glob("tf_stitch_*"))  # the file is gone, the code stays
other = programs.TEXT + "// other code\\nKERNEL t_more(ARGS) { UNUSED; (void)p; (void)begin; (void)end; }\\n"
other = programs.axpb(text=other, code=host.compile_text(other))
os.environ["TMPDIR"] = "/proc/no-such-folder"
assert run(other) == (-99.0, 0, 1)
print("good")
"""


def test_without_memory_files(tmp_path):
    (tmp_path / "shim.cc").write_text(NO_MEMFD)
    shim = tmp_path / "shim.so"
    subprocess.run([*host.find_compiler(), "-shared", "-fPIC", str(tmp_path / "shim.cc"), "-o", str(shim)], check=True)
    env = {**os.environ, "LD_PRELOAD": str(shim), "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT),
           "TF_CPP_MIN_LOG_LEVEL": "0"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, cwd=ROOT, capture_output=True, text=True,
                          check=False)
    assert done.stdout.endswith("good\n"), done.stderr[-3000:]
    assert "tf_stitch: the program of node" in done.stderr and "memfd_create: Function not implemented" in done.stderr
