"""Builds the op library ``tf_stitch/_ops.so`` from ``custom_ops/*.cc`` against the installed TensorFlow.

Everything else about the package is in pyproject.toml.  Objects are rebuilt only when a source, a header that
it includes, the compiler, the flags or TensorFlow changed.  Environment: ``CXX`` picks the compiler,
``TF_STITCH_WERROR=1`` turns warnings into errors.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # --no-build-isolation: nobody looked at pyproject.toml's build requirements
    raise SystemExit("Building tf_stitch needs setuptools 77 or later: pip install 'setuptools>=77' wheel.") from None

ROOT = Path(__file__).resolve().parent
HOST_MAIN = "custom_ops/host_main.cc"
FOR_PYTHON = ("grappler_hook.cc", "direct_call.cc")  # they call Python: not for servers
WARNINGS = ["-Wall", "-Wextra"]
FLAGS = ["-O2", "-g0", "-fPIC", "-DNDEBUG", "-pthread"]
LIBRARIES = ["-l:libtensorflow_cc.so.2", "-ldl", "-pthread"]


def tensorflow_version() -> str:
    """The installed TensorFlow's version; ends the build with a sentence when there is none."""
    try:
        return importlib.metadata.version("tensorflow")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit("tf_stitch's op library needs TensorFlow's headers: pip install 'tensorflow~=2.21.0', "
                         "then build with --no-build-isolation.") from None


def compiler() -> str:
    """The C++ compiler to use."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    for name in names:
        if shutil.which(shlex.split(name)[0]):
            return name
    raise SystemExit(f"No C++ compiler found (tried {', '.join(names)}): install g++ or set CXX.")


def tensorflow_flags() -> tuple[list[str], list[str]]:
    """(compile, link) flags of the installed TensorFlow; its headers count as system headers."""
    ask = ("import json, tensorflow as tf; "
           "print(json.dumps([tf.sysconfig.get_compile_flags(), tf.sysconfig.get_link_flags()]))")
    result = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"TensorFlow is installed but cannot be imported:\n{result.stderr}")
    given, link_flags = json.loads(result.stdout.splitlines()[-1])
    compile_flags: list[str] = []
    for flag in given:
        compile_flags += ["-isystem", flag[2:]] if flag.startswith("-I") else [flag]
        if flag.startswith("-I"):  # the eager runtime's headers need one that is not where they look
            compile_flags += ["-isystem", f"{flag[2:]}/external/farmhash_archive/src"]
    return compile_flags, link_flags


class Builder:
    """Compiles and links one library, keeping objects in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cxx = compiler()
        self.version = tensorflow_version()
        self.warnings = WARNINGS + (["-Werror"] if os.environ.get("TF_STITCH_WERROR") == "1" else [])
        self._flags: tuple[list[str], list[str]] | None = None
        key = json.dumps([self.cxx, self.version, FLAGS, LIBRARIES, self.warnings, Path(__file__).read_text()])
        self.key = hashlib.sha256(key.encode()).hexdigest()

    @property
    def flags(self) -> tuple[list[str], list[str]]:
        """TensorFlow's flags; asked for only when there is something to build (the import takes seconds)."""
        if self._flags is None:
            self._flags = tensorflow_flags()
        return self._flags

    def object_of(self, source: Path) -> Path:
        return self.folder / (source.stem + ".o")

    def is_stale(self, source: Path) -> bool:
        """True unless the object is newer than all that it was made from and was made with this key."""
        obj = self.object_of(source)
        depfile, keyfile = obj.with_suffix(".d"), obj.with_suffix(".key")
        if not (obj.exists() and depfile.exists() and keyfile.exists() and keyfile.read_text() == self.key):
            return True
        inputs = re.sub(r"\\\n", " ", depfile.read_text()).split(":", 1)[1].split()
        try:
            return any(os.stat(name).st_mtime > obj.stat().st_mtime for name in inputs)
        except FileNotFoundError:
            return True

    def compile(self, source: Path) -> None:
        obj = self.object_of(source)
        obj.with_suffix(".key").unlink(missing_ok=True)
        run([*shlex.split(self.cxx), *self.flags[0], *FLAGS, *self.warnings, "-MMD", "-MF", str(obj.with_suffix(".d")),
             f'-DTF_STITCH_TF_VERSION="{self.version}"', "-c", str(source), "-o", str(obj)])
        obj.with_suffix(".key").write_text(self.key)

    def link(self, objects: list[Path], target: Path) -> None:
        """Links beside the target and renames, so that a process that has it loaded keeps a whole file."""
        new = target.with_suffix(".new")
        run([*shlex.split(self.cxx), "-shared", "-s", "-o", str(new), *map(str, objects), *self.flags[1], *LIBRARIES])
        os.replace(new, target)
        target.with_suffix(".json").write_text(json.dumps({"tensorflow": self.version, "compiler": self.cxx}) + "\n")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Builds of one tree at the same time wait for each other."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def build(self, sources: list[Path], target: Path) -> None:
        """Brings the op library ``target`` up to date."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with self.locked():
            stamp = self.folder / "linked"
            fresh, objects = self.objects(sources)
            made_from = "\n".join([self.key, str(target), *map(str, objects)])
            if not fresh and target.exists() and target.with_suffix(".json").exists() \
                    and stamp.exists() and stamp.read_text() == made_from:
                return
            stamp.unlink(missing_ok=True)
            self.link(objects, target)
            stamp.write_text(made_from)

    def objects(self, sources: list[Path]) -> tuple[bool, list[Path]]:
        """Brings the sources' objects up to date; (whether any was compiled, all of them)."""
        stale = [s for s in sources if self.is_stale(s)]
        if stale:
            self.flags  # noqa: B018  imported once, before the threads start
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(self.compile, stale))
        return bool(stale), [self.object_of(s) for s in sources]

    def build_host(self, sources: list[Path], main: list[Path], folder: Path) -> None:
        """The op as a static archive, and the host program that it is linked into, whole."""
        folder.mkdir(parents=True, exist_ok=True)
        archive, host = folder / "libtf_stitch_ops.a", folder / "tf_stitch_host"
        with self.locked():
            fresh_ops, ops = self.objects(sources)
            fresh_main, mains = self.objects(main)
            if not (fresh_ops or fresh_main) and host.exists() and archive.exists() and not any(
                    o.stat().st_mtime > min(host.stat().st_mtime, archive.stat().st_mtime) for o in ops + mains):
                return
            archive.unlink(missing_ok=True)
            run(["ar", "rcs", *map(str, ops)], str(archive))
            libraries = [flag for flag in self.flags[1] if flag.startswith("-L")]
            paths = [f"-Wl,-rpath,{flag[2:]}" for flag in libraries]
            new = host.with_suffix(".new")
            run([*shlex.split(self.cxx), *map(str, mains), "-Wl,--whole-archive", str(archive),
                 "-Wl,--no-whole-archive", *self.flags[1], *LIBRARIES, *paths, "-o", str(new)])
            os.replace(new, host)


def run(command: list[str], archive: str = "") -> None:
    if archive:  # ar names its target by place
        command = [*command[:2], archive, *command[2:]]
    print("building", archive or command[command.index("-o") + 1], flush=True)
    result = subprocess.run(command, check=False)
    if result.returncode:
        print(" ".join(command), flush=True)
        raise SystemExit(f"Building the op library failed: {command[0]} ended with status {result.returncode}.")


class BuildOps(build_ext):
    """build_ext for the op library: no Python headers, no ABI tag in the name."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        Builder(ROOT / "build" / "custom_ops").build([ROOT / s for s in ext.sources], target)

    def copy_extensions_to_source(self) -> None:
        """For in-place builds (also editable installs)."""
        for ext in self.extensions:
            built = Path(self.build_lib) / self.get_ext_filename(ext.name)
            for path in (built, built.with_suffix(".json")):
                here = ROOT / path.relative_to(self.build_lib)
                if here.exists() and here.stat().st_mtime >= path.stat().st_mtime:
                    continue
                shutil.copy2(path, here.with_suffix(".tmp"))  # renamed: a process that has it loaded keeps its file
                os.replace(here.with_suffix(".tmp"), here)

    def get_outputs(self) -> list[str]:
        outputs = super().get_outputs()
        return outputs + [str(Path(name).with_suffix(".json")) for name in outputs]


class BuildHost(Command):
    """The host program without Python (build/host/tf_stitch_host) and the archive that it holds."""

    description = "build the host program without Python"
    user_options: list[tuple[str, str | None, str]] = []

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        ops = [ROOT / s for s in sources if not s.endswith(FOR_PYTHON)]
        host = [ROOT / HOST_MAIN, *sorted((ROOT / "custom_ops" / "host").glob("*.cc"))]
        Builder(ROOT / "build" / "custom_ops").build_host(ops, host, ROOT / "build" / "host")


class PlatformWheel(bdist_wheel):
    """The op library does not depend on the Python version, only on the platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "custom_ops").glob("*.cc") if p.name != Path(HOST_MAIN).name)
headers = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "custom_ops").glob("*.h"))
setup(
    ext_modules=[Extension("tf_stitch._ops", sources, depends=headers)] if sources else [],
    cmdclass={"build_ext": BuildOps, "build_host": BuildHost, "bdist_wheel": PlatformWheel},
)
