"""A TCP proxy on loopback that throttles the line and cuts it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class Proxy:
    """Forward to `port`. `rate`: bytes a second to the client (None: no limit); `cut_after`: close every
    connection once that many bytes went through in all, `cuts` times; while `down`, none is served."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.rate: int | None = None
        self.cut_after: int | None = None
        self.cuts = 0
        self.down = False
        self.passed = 0
        self._pairs: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.address = f"https://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening and drop every connection."""
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Drop every connection now."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for item in pairs:
            _shut(item)
            item.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.down:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._port))
            with self._lock:
                self._pairs += [client, server]
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, to_client: bool) -> None:
        try:
            while data := source.recv(16384 if self.rate else 262144):
                if to_client:
                    self._count(len(data))
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for item in (source, sink):
                _shut(item)

    def _count(self, count: int) -> None:
        if self.rate:
            time.sleep(count / self.rate)
        self.passed += count
        if self.cut_after is not None and self.passed >= self.cut_after and self.cuts > 0:
            self.cuts -= 1
            self.passed = 0
            self.cut()
            raise OSError("cut")


def _shut(item: socket.socket) -> None:
    with contextlib.suppress(OSError):
        item.shutdown(socket.SHUT_RDWR)
