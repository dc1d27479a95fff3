"""A client that disconnects in the middle of a request."""

import asyncio
import json


class DisconnectingClient:
    """An ASGI call whose client disconnects when `disconnect` is set."""

    def __init__(self, path, body):
        self.disconnect, self.sent = asyncio.Event(), []
        versions = {"asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1"}
        self.scope = {"type": "http", "method": "POST", "scheme": "http", **versions}
        self.scope |= {"path": path, "raw_path": path.encode(), "query_string": b""}
        self.scope |= {"headers": [(b"content-type", b"application/json")], "root_path": ""}
        self.scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}
        self._body = json.dumps(body).encode()

    async def receive(self):
        if self._body:
            body, self._body = self._body, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self.disconnect.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)
