"""A small HTTP server whose responses a test decides, in a thread."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def answering(respond):
    """Run a server; yields its URL.

    `respond(path, body of JSON or None, headers)` returns (status, headers, body); a list
    as body is sent as chunks of an event stream.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self._send(None)

        def do_POST(self):
            length = int(self.headers.get("content-length", 0))
            self._send(json.loads(self.rfile.read(length)))

        def _send(self, body):
            status, headers, content = respond(self.path, body, self.headers)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if isinstance(content, list):
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for part in (*content, ""):
                    data = part.encode()
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                    self.wfile.flush()
                return
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
