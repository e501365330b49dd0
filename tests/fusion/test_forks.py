"""Processes forked from one that is ready: they answer, and none outlives what it was started for."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tf_stitch import forks

MODULE = """
import os, time
def main(connection):
    connection.sendall(f"{os.getpid()} ".encode())
    said = connection.recv(100)
    while said == b"busy":
        time.sleep(0.01)
    connection.sendall(said.upper())
"""


@pytest.fixture
def server(monkeypatch, tmp_path):
    (tmp_path / "answers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    made = forks.Server("answers")
    yield made
    made.stop()


def ended(pid: int) -> bool:
    """True once a process is gone."""
    for _ in range(500):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_forks_answer_each_for_itself(server):
    connections = [server.fork() for _ in range(3)]
    pids = {int(c.recv(100)) for c in connections}
    for i, c in enumerate(connections):
        c.sendall(f"yes {i}".encode())
    assert [c.recv(100) for c in connections] == [b"YES 0", b"YES 1", b"YES 2"]
    assert len(pids) == 3 and all(map(ended, pids))
    for c in connections:
        c.close()


def test_a_busy_fork_ends_when_its_connection_is_closed(server):
    connection = server.fork()
    pid = int(connection.recv(100))
    connection.sendall(b"busy")
    connection.close()
    assert ended(pid)


def test_one_that_died_is_started_again(server):
    server.start()
    first = server._process
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    with server.fork() as connection:
        assert int(connection.recv(100)) and server._process is not first


def test_it_ends_when_it_is_not_asked_for(server, monkeypatch):
    with server.fork() as connection:
        assert connection.recv(100)
        pid = server._process.pid
        server._stop_unless_asked()  # too early
        assert server._process.pid == pid
        monkeypatch.setattr(forks, "KEPT_S", 0.0)
        server._stop_unless_asked()
        assert ended(pid) and server._process is None
        connection.sendall(b"go on")
        assert connection.recv(100) == b"GO ON"
    monkeypatch.setattr(forks, "KEPT_S", 60.0)
    with server.fork() as connection:
        assert connection.recv(100)


def test_it_ends_with_the_process_that_started_it(server):
    code = ("import sys, os; from tf_stitch import forks; s = forks.Server('answers'); c = s.fork(); c.recv(100); "
            "print(s._process.pid, flush=True); os.kill(os.getpid(), 9)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert ended(int(done.stdout))


def test_what_lies_in_the_working_directory_is_not_imported(server, monkeypatch, tmp_path):
    folder = tmp_path / "elsewhere"
    (folder / "tf_stitch").mkdir(parents=True)
    (folder / "tf_stitch" / "__init__.py").write_text("raise SystemExit('another package')")
    monkeypatch.chdir(folder)
    with server.fork() as connection:
        assert int(connection.recv(100)) > 0


def test_a_copy_of_this_process_has_a_server_of_its_own(server):
    with server.fork() as connection:
        assert connection.recv(100)
        pid = server._process.pid
        with server._lock:  # as a thread might hold it
            child = os.fork()
        if not child:
            try:
                with server.fork() as other:
                    own = bool(other.recv(100)) and server._process.pid != pid
                server.stop()
                os._exit(0 if own else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert server._process.poll() is None


def test_without_a_thread_to_be_had_there_is_no_process(server, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(OSError, match="can't start new thread"):
        server.fork()
    assert server._process is None
