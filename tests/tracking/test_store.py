"""Database servers that do not answer as one: MLflow alone would try for 100 s and more."""

from __future__ import annotations

import socket
import threading

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compare.sources import opened
from tests.support.servers import free_port


def test_a_database_that_is_not_there_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortlaunch.tracking.store.connect", lambda uri: pytest.fail("MLflow was asked"))
    port = free_port()
    with pytest.raises(RequestError) as error, opened(f"postgresql://ann:hunter2@127.0.0.1:{port}/mlflow"):
        pass
    assert "Connection refused" in str(error.value) and f"127.0.0.1:{port}" in str(error.value)
    assert "hunter2" not in str(error.value)


def test_a_server_that_refuses_is_asked_once() -> None:
    pytest.importorskip("psycopg")
    asked: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            while True:
                try:
                    connection, peer = server.accept()
                except OSError:
                    return
                asked.append(peer)
                connection.close()

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        uri = f"postgresql+psycopg://ann:hunter2@127.0.0.1:{server.getsockname()[1]}/mlflow"
        with pytest.raises(RequestError) as error, opened(uri):
            pass
        server.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    assert "hunter2" not in str(error.value) and "OperationalError" in str(error.value)
    # Ours, and MLflow's, which psycopg makes with and without TLS.
    assert len(asked) <= 4
