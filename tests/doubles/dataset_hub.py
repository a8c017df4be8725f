"""A hub on this machine with one dataset, whose only file is larger than any disk here."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAME = "acme/texts"
FILE, CARD = "data/train.jsonl", "README.md"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROW = json.dumps({"prompt": "Say it again: ", "completion": "it " * 90}).encode() + b"\n"
FILE_BYTES = (8 << 40) // len(ROW) * len(ROW)
CARD_TEXT = f"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: {FILE}
---
""".encode()


@dataclass
class DatasetHub:
    """The hub and its counts.

    Attributes:
        address: the hub's URL.
        sent_bytes: bytes of the file that clients received.
    """

    address: str = ""
    sent_bytes: int = 0

    def environment(self, home: Path) -> dict[str, str]:
        """Return the environment in which Hugging Face's libraries use this hub."""
        return {
            "HF_ENDPOINT": self.address,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }


@contextmanager
def serving_dataset() -> Iterator[DatasetHub]:
    """Serve the dataset as long as the context lasts."""
    hub = DatasetHub()
    server = _Server(hub)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: DatasetHub) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, has_body: bool) -> None:
        path = self.path.partition("?")[0]
        if re.fullmatch(rf"/api/datasets/{NAME}(/revision/\w+)?", path):
            files = [{"rfilename": name} for name in (CARD, FILE)]
            self._send(_json({"id": NAME, "sha": COMMIT, "siblings": files}), has_body=has_body)
        elif re.fullmatch(rf"/api/datasets/{NAME}/tree/\w+/data", path):
            entry = {"type": "file", "path": FILE, "size": FILE_BYTES, "oid": COMMIT}
            self._send(_json([entry]), has_body=has_body)
        elif re.fullmatch(rf"/datasets/{NAME}/resolve/\w+/{CARD}", path):
            self._send(CARD_TEXT, has_body=has_body)
        elif re.fullmatch(rf"/datasets/{NAME}/resolve/\w+/{FILE}", path):
            self._send_file(has_body=has_body)
        else:
            self._begin(404, 0)

    def _begin(self, status: int, length: int, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{COMMIT}"')
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def _send(self, data: bytes, *, has_body: bool) -> None:
        self._begin(200, len(data))
        if has_body:
            self.wfile.write(data)

    def _send_file(self, *, has_body: bool) -> None:
        start, stop, status, headers = 0, FILE_BYTES, 200, {"Accept_Ranges": "bytes"}
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if found is not None:
            start, stop, status = int(found[1]), min(stop, int(found[2] or stop) + 1), 206
            headers["Content_Range"] = f"bytes {start}-{stop - 1}/{FILE_BYTES}"
        self._begin(status, stop - start, **headers)
        if has_body:
            self.close_connection = True
            with suppress(OSError):
                self._send_rows(start, stop)

    def _send_rows(self, start: int, stop: int) -> None:
        block = ROW * 200
        while start < stop:
            piece = block[start % len(ROW) :][: stop - start]
            self.wfile.write(piece)
            start += len(piece)
            self.server.hub.sent_bytes += len(piece)


def _json(found: object) -> bytes:
    return json.dumps(found).encode()
