"""The cache on disk keeps what is used, and no more than so much."""
from __future__ import annotations

import os

import pytest

from tf_stitch.backend import cache
from tf_stitch.backend.cache import Cache


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.FOLDER, str(tmp_path))
    return tmp_path


def aged(kept: Cache, key: str, seconds: float) -> None:
    os.utime(kept._path(key), (seconds, seconds))


def test_what_was_not_used_for_longest_goes(monkeypatch, folder):
    monkeypatch.setenv(cache.LIMIT, str(3 * 132))
    monkeypatch.setattr(cache, "LOOK_EVERY", 1)
    kept = Cache("things", ".thing")
    for k, key in enumerate(("one", "two", "three")):
        kept.put(key, bytes(100))  # 132 with their checksum
        aged(kept, key, 1000 + k)
    assert kept.get("one") == bytes(100)  # now it was used last
    kept.put("four", bytes(100))
    assert [kept.get(key) is not None for key in ("one", "two", "three", "four")] == [True, False, True, True]
    other = Cache("others", ".thing")
    other.put("five", bytes(100))  # another kind does not count
    assert kept.get("three") and other.get("five")


def test_a_process_looks_at_its_first_file_and_now_and_then(monkeypatch):
    looks = []
    monkeypatch.setattr(cache, "remove_oldest", looks.append)
    kept = Cache("things", ".thing")
    for k in range(2 * cache.LOOK_EVERY):
        kept.put(str(k), b"x")
    assert len(looks) == 2


def test_folders_go_whole_but_not_those_just_used(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.LIMIT, "100")
    made = [tmp_path / name for name in "abc"]
    for k, folder in enumerate(made):
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "file").write_bytes(bytes(60))
        os.utime(folder, (1000 + k, 1000 + k))
    os.utime(made[0])
    cache.remove_oldest(made, spared_s=60)
    assert [f.exists() for f in made] == [True, False, False]
    monkeypatch.setenv(cache.LIMIT, "1")
    cache.remove_oldest(made, spared_s=60)
    assert made[0].exists()
    cache.remove_oldest(made)
    assert not made[0].exists()


def test_a_limit_that_is_no_number_is_told_once(monkeypatch, caplog):
    monkeypatch.setenv(cache.LIMIT, "4GB")
    cache._complain.cache_clear()
    assert cache.most_bytes() == cache.most_bytes() == cache.MOST_BYTES
    assert [r.message for r in caplog.records] == [
        "TF_STITCH_CACHE_BYTES is '4GB', which is no number of bytes; 4294967296 are kept."]


def test_a_damaged_file_counts_as_none(folder):
    kept = Cache("things", ".thing")
    kept.put("key", b"code")
    (path,) = folder.rglob("*.thing")
    path.write_bytes(path.read_bytes()[:-1])
    assert kept.get("key") is None


def test_a_folder_that_cannot_be_written_is_told_once(monkeypatch, caplog):
    monkeypatch.setenv(cache.FOLDER, "/proc/no-such-folder")
    monkeypatch.setattr(cache, "_complained", set())
    kept = Cache("things", ".thing")
    kept.put("key", b"code")
    kept.put("key", b"code")
    Cache("others", ".thing").put("key", b"code")
    assert kept.get("key") is None and len(caplog.records) == 1
