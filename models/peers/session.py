"""Many workloads in the peers: processes compile side by side, then measure one after the other.

A row's ``compile_s`` is therefore that of a machine that compiles other workloads too, except for torch's
"max-autotune": it chooses kernels by timing them, so its processes run one by one.
"""
from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
AUTOTUNED = "max-autotune"
MODES = {"jax": ("",), "torch": ("reduce-overhead", AUTOTUNED)}
Row = dict[str, Any]


@dataclass
class _Process:
    """A peer's process for one workload; what it says on standard error is kept for the note."""

    peer: str
    workload: str
    mode: str
    command: Sequence[str]
    errors: IO[str] = field(default_factory=lambda: tempfile.TemporaryFile("w+"))  # noqa: SIM115 (lives as long)

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, cwd=ROOT, text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self.errors, start_new_session=True)

    def row(self, end: float) -> Row:
        """Lets the process measure, and reads its row."""
        try:
            text, _ = self.process.communicate("go\\n", timeout=max(0.1, end - time.monotonic()))
            return json.loads(text.splitlines()[-1])
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # torch has compilers of its own running
            self.process.communicate()
            return self._missing("not measured: the time was over")
        except (ValueError, IndexError):
            self.errors.seek(0)
            said = self.errors.read().strip().splitlines()
            return self._missing(f"the process died: {said[-1] if said else self.process.returncode}"[:300])

    def _missing(self, note: str) -> Row:
        return {"workload": self.workload, "system": self.peer, "note": note, "how": f"{self.peer} {self.mode}".strip()}


def measure(peers: Iterable[str], workloads: Sequence[str], folder: Path, seconds: float, *, rounds: int = 20,
            round_s: float = 0.05, tell: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """Rows of all workloads in all peers; ``tell`` gets each as soon as it is there.

    Args:
      peers: "jax", "torch".
      workloads: names; their files are in ``folder`` (:mod:`models.reference`, with weights).
      folder: where those files are.
      seconds: what has no figure by then gets a row that says so.
      rounds, round_s: as the benchmark's.
      tell: called with every row.
    """
    end = time.monotonic() + seconds
    rows = []
    for row in _rows(list(peers), workloads, folder, end, [f"--rounds={rounds}", f"--round-s={round_s}"]):
        rows.append(row)
        tell(row)
    return best(rows)


def _rows(peers: Sequence[str], workloads: Sequence[str], folder: Path, end: float, extra: list[str]) -> Iterator[Row]:
    def process(peer: str, workload: str, mode: str, *more: str) -> _Process:
        command = [sys.executable, "-m", "models.peers", peer, workload, f"--folder={folder}", *extra,
                   *([f"--mode={mode}"] if mode else []), *more]
        return _Process(peer, workload, mode, command)

    for peer in peers:
        for mode in MODES[peer]:
            if mode == AUTOTUNED:
                for w in workloads:
                    one = process(peer, w, mode)
                    if time.monotonic() > end:
                        yield one._missing("not measured: the time was over")
                    else:
                        one.start()
                        yield one.row(end)
            else:
                yield from _side_by_side([process(peer, w, mode, "--wait") for w in workloads], end)


def _side_by_side(processes: Sequence[_Process], end: float) -> Iterator[Row]:
    """Starts all, waits until each has compiled or ended, then lets them measure in turn."""
    for p in processes:
        p.start()
    ready = {p.process.stdout.fileno() for p in processes if p.process.stdout}
    _wait_for_output(ready, end)
    for p in processes:
        yield p.row(end)


def _wait_for_output(files: set[int], end: float) -> None:
    """Returns when every file has something to read, or at ``end`` (time.monotonic())."""
    with selectors.DefaultSelector() as selector:
        for f in files:
            selector.register(f, selectors.EVENT_READ)
        while selector.get_map() and time.monotonic() < end:
            for key, _ in selector.select(timeout=max(0.0, end - time.monotonic())):
                selector.unregister(key.fd)


def best(rows: Sequence[Row]) -> list[Row]:
    """One row per workload and peer: its fastest mode, with the latencies of the others beside it."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["workload"], row["system"]), []).append(row)
    out = []
    for same in found.values():
        first, *rest = sorted(same, key=lambda r: r.get("latency_us") or float("inf"))
        others = {r["how"]: r.get("latency_us") or r["note"] for r in rest}
        out.append({**first, **({"others_us": others} if others else {})})
    return out
