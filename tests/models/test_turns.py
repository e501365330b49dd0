"""Processes that take turns: one measures, one may prepare beside it, and none while calls are timed."""
from __future__ import annotations

import fcntl
from pathlib import Path

from models.turns import Turns


def free(folder: Path, what: str) -> bool:
    """Could another process have this turn now?"""
    with open(folder / what, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_turns(tmp_path: Path) -> None:
    folder = tmp_path / "turns"
    turns = Turns(folder)
    with turns.preparing():
        assert free(folder, "measure") and not free(folder, "prepare")
    with turns.measuring():
        assert free(folder, "prepare") and not free(folder, "measure")
        with turns.quiet():
            assert not free(folder, "prepare")
        assert free(folder, "prepare")
    assert free(folder, "measure")


def test_without_a_folder_no_one_waits() -> None:
    turns = Turns()
    with turns.measuring(), turns.quiet(), turns.preparing():
        pass
