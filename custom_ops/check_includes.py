"""Checks that what the op's sources include is in TensorFlow Serving's build.

    python custom_ops/check_includes.py [--tensorflow CHECKOUT]

Every header outside this folder must be named in TARGETS, and its target must be a dependency in BUILD.  With a
TensorFlow checkout, or an installed TensorFlow, the headers must be there too.  Exits with 1 and a sentence for each
header that is not.
"""
from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
NOT_SERVED = {"direct_call.cc", "grappler_hook.cc", "host_main.cc"}  # as BUILD has it

_CORE = "@org_tensorflow//tensorflow/core"
TARGETS = {
    "absl/container/inlined_vector.h": "@com_google_absl//absl/container:inlined_vector",
    "absl/synchronization/notification.h": "@com_google_absl//absl/synchronization",
    "absl/time/clock.h": "@com_google_absl//absl/time",
    "absl/time/time.h": "@com_google_absl//absl/time",
    "openssl/curve25519.h": "@boringssl//:crypto",
    "tensorflow/core/common_runtime/device_mgr.h": f"{_CORE}:core_cpu",
    "tensorflow/core/common_runtime/device_set.h": f"{_CORE}:core_cpu",
    "tensorflow/core/common_runtime/function_body.h": f"{_CORE}:core_cpu",
    "tensorflow/core/common_runtime/function_def_utils.h": f"{_CORE}:core_cpu",
    "tensorflow/core/common_runtime/optimization_registry.h": f"{_CORE}:core_cpu",
    "tensorflow/core/framework/cancellation.h": f"{_CORE}:framework",
    "tensorflow/core/framework/device.h": f"{_CORE}:core_cpu",  # of framework_internal, which core_cpu depends on
    "tensorflow/core/framework/function.h": f"{_CORE}:framework",
    "tensorflow/core/framework/memory_types.h": f"{_CORE}:framework",
    "tensorflow/core/framework/node_def_util.h": f"{_CORE}:framework",
    "tensorflow/core/framework/op.h": f"{_CORE}:framework",
    "tensorflow/core/framework/op_kernel.h": f"{_CORE}:framework",
    "tensorflow/core/framework/resource_mgr.h": f"{_CORE}:framework",
    "tensorflow/core/framework/resource_var.h": f"{_CORE}:framework",
    "tensorflow/core/framework/shape_inference.h": f"{_CORE}:framework",
    "tensorflow/core/graph/algorithm.h": f"{_CORE}:core_cpu",  # of graph, which core_cpu depends on
    "tensorflow/core/graph/graph.h": f"{_CORE}:core_cpu",
    "tensorflow/core/lib/core/threadpool.h": f"{_CORE}:lib",
    "tensorflow/core/platform/env.h": f"{_CORE}:lib",
    "tensorflow/core/platform/tensor_float_32_utils.h": f"{_CORE}/platform:tensor_float_32_utils",
    "tensorflow/core/protobuf/config.pb.h": f"{_CORE}:protos_all_cc",
    "tensorflow/core/profiler/lib/traceme.h": f"{_CORE}/profiler/lib:traceme",
    "tensorflow/core/util/determinism.h": f"{_CORE}/util:determinism_for_kernels",
    "xla/stream_executor/stream.h": f"{_CORE}/platform:stream_executor",  # its name for XLA's repository may change
}
_INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+/[^>]+)>)', re.MULTILINE)
_SYSTEM = ("sys/",)  # <sys/mman.h> and the like


def served(folder: Path = HERE) -> list[Path]:
    """The sources and headers that BUILD takes."""
    return sorted(p for p in folder.iterdir() if p.suffix in (".cc", ".h") and p.name not in NOT_SERVED)


def includes(folder: Path = HERE) -> Iterator[tuple[Path, str]]:
    """(source, header) of every include, but for the C and C++ standard libraries' and the system's."""
    for path in served(folder):
        for quoted, angled in _INCLUDE.findall(path.read_text(encoding="utf-8")):
            header = quoted or angled
            if not header.startswith(_SYSTEM):
                yield path, header


def dependencies(folder: Path = HERE) -> set[str]:
    """The deps of the target in BUILD."""
    text = re.sub(r"#.*", "", (folder / "BUILD").read_text(encoding="utf-8"))
    found = re.search(r"\bdeps = \[(.*?)\]", text, re.DOTALL)
    return set(re.findall(r'"([^"]+)"', found[1])) if found else set()


def problems(folder: Path = HERE, roots: Sequence[Path] = ()) -> list[str]:
    """A sentence for each include that Serving's build does not have."""
    own, deps, out = {p.name for p in served(folder)}, dependencies(folder), []
    for path, header in includes(folder):
        if header in own:
            continue
        target = TARGETS.get(header)
        if target is None:
            out.append(f"{path.name} includes {header}, which no target in check_includes.py has.")
            continue
        if target not in deps:
            out.append(f"{path.name} includes {header}, and BUILD lacks its target {target}.")
        if roots and header != "openssl/curve25519.h" and not any((root / header).is_file() for root in roots):
            out.append(f"{path.name} includes {header}, which is not in {roots[0]}.")
    return out


def installed() -> list[Path]:
    """The headers of the installed TensorFlow; none when there is none."""
    spec = importlib.util.find_spec("tensorflow")
    folders = list(spec.submodule_search_locations or []) if spec else []
    return [Path(f) / "include" for f in folders if (Path(f) / "include").is_dir()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tensorflow", type=Path, metavar="CHECKOUT", help="a TensorFlow source tree to look into")
    args = parser.parse_args(argv)
    roots = installed()
    if args.tensorflow:
        if not (args.tensorflow / "tensorflow" / "core").is_dir():
            parser.error(f"'{args.tensorflow}' is no TensorFlow source tree")
        roots = [args.tensorflow, args.tensorflow / "third_party" / "xla"]
        roots += [p / "absl" for p in installed()]  # Abseil is not in TensorFlow's tree
    found = problems(roots=roots)
    print("\n".join(found) or f"All {len(set(h for _, h in includes()))} included headers are in Serving's build.")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
