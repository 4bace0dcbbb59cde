"""An engine that costs nothing: streams the asked number of one-token chunks. Measures what a load generator can take.

python trivial_server.py PORT [TOKENS_PER_SECOND_AND_STREAM]; without a rate it writes as fast as it is read.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

MODEL = "trivial"


def _chunk(delta: dict[str, str], finish: str | None = None) -> bytes:
    body = {
        "id": "chatcmpl-trivial",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }
    return _framed(f"data: {json.dumps(body)}\n\n".encode())


def _framed(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


TOKEN = _chunk({"content": " token"})
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _usage(prompt: int, tokens: int) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    body = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": MODEL, "choices": [], "usage": usage}
    return _framed(f"data: {json.dumps(body)}\n\n".encode())


class Server:
    """Counts what it sent, so that a client's totals can be compared."""

    def __init__(self, rate: float | None = None) -> None:
        self.rate = rate
        self.tokens = 0
        self.requests = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await self._request(reader):
                await self._answer(writer, *request)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader) -> tuple[str, bytes] | None:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split(b" ", 2)[1].decode()
        length = 0
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        return path, await reader.readexactly(length) if length else b""

    async def _answer(self, writer: asyncio.StreamWriter, path: str, body: bytes) -> None:
        if not path.endswith("/chat/completions"):
            self._json(writer, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            return
        asked = json.loads(body)
        count = int(asked.get("max_completion_tokens") or asked.get("max_tokens") or 16)
        self.requests += 1
        writer.write(HEAD)
        if self.rate is None:
            for start in range(0, count, 32):
                writer.write(TOKEN * min(32, count - start))
                await writer.drain()
        else:
            await self._paced(writer, count, self.rate)
        self.tokens += count
        writer.write(_chunk({}, "length") + _usage(len(body) // 4, count) + _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()

    async def _paced(self, writer: asyncio.StreamWriter, count: int, rate: float) -> None:
        begun, sent = time.monotonic(), 0
        while sent < count:
            due = min(count, int((time.monotonic() - begun) * rate) + 1)
            if due > sent:
                writer.write(TOKEN * (due - sent))
                sent = due
                await writer.drain()
            await asyncio.sleep(max(0.0, begun + sent / rate - time.monotonic()))

    @staticmethod
    def _json(writer: asyncio.StreamWriter, value: object) -> None:
        body = json.dumps(value).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
        writer.write(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)


async def main(port: int, rate: float | None) -> None:
    server = await asyncio.start_server(Server(rate).handle, "127.0.0.1", port, limit=1 << 20)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else None))
