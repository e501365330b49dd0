"""Processes that share a machine: several are busy at a time, each lane has one that compiles, and quiet is quiet."""
from __future__ import annotations

import fcntl
import threading
from pathlib import Path

from models.turns import Turns


def free(folder: Path, what: str, how: int = fcntl.LOCK_EX) -> bool:
    """Could another process have this turn now?"""
    with open(folder / what, "w") as file:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_turns(tmp_path: Path) -> None:
    folder = tmp_path / "turns"
    one, other = Turns(folder, 0), Turns(folder, 1)
    with one.busy(), other.busy():
        assert not free(folder, "machine") and free(folder, "machine", fcntl.LOCK_SH) and free(folder, "door")
    with one.lane():
        assert not free(folder, "lane0")
        with other.lane(), one.quiet():
            assert not free(folder, "machine", fcntl.LOCK_SH) and not free(folder, "door")
        assert free(folder, "machine") and free(folder, "lane1")
    assert free(folder, "lane0")


def test_who_waits_for_quiet_goes_before_who_wants_to_be_busy(tmp_path: Path) -> None:
    turns, log = Turns(tmp_path), []

    def quiet() -> None:
        with turns.quiet():
            log.append("quiet")

    def busy() -> None:
        with turns.busy():
            log.append("busy")

    with turns.busy():
        first = threading.Thread(target=quiet)
        first.start()
        while free(tmp_path, "door"):  # until it waits
            pass
        second = threading.Thread(target=busy)
        second.start()
    first.join()
    second.join()
    assert log == ["quiet", "busy"]


def test_without_a_folder_no_one_waits() -> None:
    turns = Turns()
    with turns.lane(), turns.quiet(), turns.busy():
        pass
