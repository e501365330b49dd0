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
from collections.abc import Iterable, Iterator, Sequence
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
        """Lets the process measure, and reads its row; ``end`` is a time.monotonic()."""
        try:
            text, _ = self.process.communicate("go\n", timeout=max(0.1, end - time.monotonic()))
            return json.loads(text.splitlines()[-1])
        except subprocess.TimeoutExpired:
            self.kill()
            return self.missing("not measured: the time was over")
        except (ValueError, IndexError):
            self.errors.seek(0)
            said = self.errors.read().strip().splitlines()
            return self.missing(f"the process died: {said[-1] if said else self.process.returncode}"[:300])

    def kill(self) -> None:
        """Ends the process if it still runs, and the compilers that torch started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()

    def missing(self, note: str) -> Row:
        return {"workload": self.workload, "system": self.peer, "note": note, "how": f"{self.peer} {self.mode}".strip()}


def rows(peers: Sequence[str], workloads: Sequence[str], folder: Path, seconds: float, *, rounds: int = 20,
         round_s: float = 0.05) -> Iterator[Row]:
    """Rows of all workloads in all peers and modes, each as soon as it is there; :func:`best` sums them up.

    Args:
      peers: "jax", "torch".
      workloads: names; their files are in ``folder``.
      folder: files of :mod:`models.reference`, made with the weights.
      seconds: what has no figure by then gets a row that says so.
      rounds, round_s: as the benchmark's.
    """
    end = time.monotonic() + seconds
    for peer in peers:
        for mode in MODES[peer]:
            processes = [_process(peer, w, mode, folder, rounds, round_s) for w in workloads]
            yield from (_one_by_one if mode == AUTOTUNED else _side_by_side)(processes, end)


def _process(peer: str, workload: str, mode: str, folder: Path, rounds: int, round_s: float) -> _Process:
    command = [sys.executable, "-m", "models.peers", peer, workload, f"--folder={folder}", f"--rounds={rounds}",
               f"--round-s={round_s}", *([f"--mode={mode}"] if mode else [])]
    if mode != AUTOTUNED:
        command.append("--wait")
    return _Process(peer, workload, mode, command)


def _one_by_one(processes: Sequence[_Process], end: float) -> Iterator[Row]:
    for p in processes:
        if time.monotonic() > end:
            yield p.missing("not measured: the time was over")
        else:
            p.start()
            yield p.row(end)


def _side_by_side(processes: Sequence[_Process], end: float) -> Iterator[Row]:
    """Starts all, waits until each has compiled or ended, then lets them measure in turn."""
    for p in processes:
        p.start()
    try:
        _wait_for_output([p.process.stdout for p in processes], end)
        for p in processes:
            yield p.row(end)
    finally:
        for p in processes:
            p.kill()


def _wait_for_output(files: Iterable[Any], end: float) -> None:
    """Returns when every file has something to read, or at ``end`` (time.monotonic())."""
    with selectors.DefaultSelector() as selector:
        for f in files:
            selector.register(f, selectors.EVENT_READ)
        while selector.get_map() and time.monotonic() < end:
            for key, _ in selector.select(timeout=max(0.0, end - time.monotonic())):
                selector.unregister(key.fileobj)


def best(found: Sequence[Row]) -> list[Row]:
    """One row per workload and peer: its fastest mode, with the latencies of the others in ``others_us``."""
    by_key: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        by_key.setdefault((row["workload"], row["system"]), []).append(row)
    out = []
    for same in by_key.values():
        first, *rest = sorted(same, key=lambda r: r.get("latency_us") or float("inf"))
        others = {r["how"]: r.get("latency_us") or r["note"] for r in rest}
        out.append({**first, **({"others_us": others} if others else {})})
    return out
