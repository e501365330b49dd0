"""The op in a TensorFlow Serving checkout."""
from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "custom_ops" / "serving_sources.py"
sys.path.insert(0, str(SCRIPT.parent))
sources, checker = (importlib.import_module(name) for name in ("serving_sources", "check_includes"))

# The layout of the real file: a list that is a sum, comments with brackets, what comes before and after.
SERVER = '''# Description: Model Server
load("//tensorflow_serving:tensorflow_version.bzl", "if_not_v2", "if_v2")

cc_library(
    name = "server_core",
    deps = [":prefetch"],
)

# This is not inlined by tools because inlining non-constant values
# is not provably safe.
SUPPORTED_TENSORFLOW_OPS = if_v2([]) + if_not_v2([
    "@org_tensorflow//tensorflow/contrib:contrib_kernels",
]) + [
    "@org_tensorflow_text//tensorflow_text:ops_lib",
    # Support for decision forests (]: a comment with a bracket.
    "@forests//ops/inference:kernel_and_op"%s
]

cc_library(
    name = "server_lib",
    deps = [
        "@org_tensorflow//tensorflow/core:tensorflow",
    ] + SUPPORTED_TENSORFLOW_OPS,
)
'''
ALONE = 'licenses(["notice"])\nSUPPORTED_TENSORFLOW_OPS = []\n'


def checkout(folder: Path, text: str) -> Path:
    (folder / "tensorflow_serving" / "model_servers").mkdir(parents=True)
    (folder / sources.SERVER).write_text(text)
    return folder


def evaluated(text: str) -> list[str]:
    """The list as Bazel would see it: the file is Python but for its functions."""
    scope = {name: lambda *args, **kwargs: None for name in ("load", "cc_library", "licenses", "package")}
    scope |= {"if_v2": lambda x: x, "if_not_v2": lambda x: []}
    exec(text, scope)
    return scope["SUPPORTED_TENSORFLOW_OPS"]


@pytest.mark.parametrize("text", [SERVER % ",", SERVER % "", ALONE])
def test_the_target_is_added_once(text, tmp_path):
    folder = checkout(tmp_path, text)
    assert sources.put(folder)
    once = (folder / sources.SERVER).read_text()
    assert evaluated(once) == [*evaluated(text), sources.TARGET]
    assert not sources.put(folder) and (folder / sources.SERVER).read_text() == once
    assert [line for line in text.splitlines() if line not in once.splitlines() and "kernel_and_op" not in line
            and "= []" not in line] == []


def test_files_are_copied_and_old_ones_go(tmp_path):
    folder = checkout(tmp_path, SERVER % ",")
    sources.put(folder)
    goal = folder / sources.FOLDER
    names = {p.name for p in goal.iterdir()}
    assert names == {"BUILD", *(p.name for p in checker.served())}
    assert "stitched_op.cc" in names and not names & checker.NOT_SERVED
    (goal / "gone.cc").write_text("")
    (goal / "program.h").write_text("")
    sources.put(folder)
    assert not (goal / "gone.cc").exists()
    assert (goal / "program.h").read_bytes() == (ROOT / "custom_ops" / "program.h").read_bytes()


def test_command_and_its_errors(tmp_path):
    def run(*args):
        return subprocess.run([sys.executable, SCRIPT, *args], capture_output=True, text=True, check=False)

    good = run(checkout(tmp_path / "good", SERVER % ","))
    assert good.returncode == 0 and "target added" in good.stdout
    assert run().returncode == 2
    (tmp_path / "empty").mkdir()
    for folder, says in ((tmp_path / "empty", "no TensorFlow Serving checkout"),
                         (checkout(tmp_path / "other", "OPS = []\n"), "does not set SUPPORTED_TENSORFLOW_OPS"),
                         (checkout(tmp_path / "call", "\nSUPPORTED_TENSORFLOW_OPS = f()\n"), "by hand")):
        done = run(folder)
        assert done.returncode == 1 and says in done.stderr and len(done.stderr.splitlines()) == 1
        assert not (folder / sources.FOLDER).exists()


def test_includes_are_in_serving_s_build():
    roots = checker.installed()
    assert roots
    assert checker.problems(roots=roots) == []
    assert len({h for _, h in checker.includes()}) > 15


def test_the_check_notices(tmp_path):
    shutil.copytree(ROOT / "custom_ops", tmp_path / "ops", ignore=shutil.ignore_patterns("__pycache__", "host"))
    folder = tmp_path / "ops"
    (folder / "new.cc").write_text('#include "tensorflow/core/graph/subgraph.h"\n#  include <fcntl.h>\n')
    build = (folder / "BUILD").read_text()
    (folder / "BUILD").write_text(build.replace('"@org_tensorflow//tensorflow/core:lib",', '"//a:b",'))
    found = "\n".join(checker.problems(folder, [tmp_path]))
    assert "new.cc includes tensorflow/core/graph/subgraph.h, which no target" in found
    assert "BUILD lacks its target @org_tensorflow//tensorflow/core:lib" in found
    assert f"which is not in {tmp_path}" in found
    assert checker.main([]) == 0
    with pytest.raises(SystemExit):
        checker.main(["--tensorflow", os.fspath(tmp_path)])
