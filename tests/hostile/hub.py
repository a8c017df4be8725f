"""A hub of models on this machine, with a model that is far larger than a job claims."""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WHOLE, CUT = "acme/whole", "acme/cut"
"""Repositories: with one file of weights, and with an index of two."""
TOKEN = "hf_token_of_a_volunteer"
"""That the peers' owner is logged in with."""
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE_BYTES = 8 << 30
"""Of each file of weights."""
PIECE, PAUSE_S = 1 << 20, 0.05
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@dataclass
class Hub:
    """A hub that records its requests.

    Attributes:
        address: its URL.
        weight_bytes: how many bytes of weights it sent.
        tokens: what requests had in `Authorization`.
        requests: method and path of each.
    """

    address: str = ""
    weight_bytes: int = 0
    tokens: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def environment(self, home: Path) -> dict[str, str]:
        """Return the environment with which a volunteer's software uses this hub."""
        return {
            "HF_ENDPOINT": self.address,
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }


@contextmanager
def serving_hub(model: Path) -> Iterator[Hub]:
    """Answer as long as the context lasts.

    Args:
        model: the honest model's directory; the repositories have its config.
    """
    hub = Hub()
    config = (model / "config.json").read_bytes()
    server = HubServer(hub, config)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def safetensors_start() -> bytes:
    """The header of a file with one large tensor."""
    tensor = {"dtype": "F32", "shape": [LARGE_BYTES // 4], "data_offsets": [0, LARGE_BYTES]}
    header = json.dumps({"transformer.wte.weight": tensor}).encode()
    return len(header).to_bytes(8, "little") + header


def index() -> bytes:
    """Return the index that assigns tensors to the two files."""
    files = dict(zip(("transformer.wte.weight", "transformer.wpe.weight"), SHARDS, strict=True))
    total = {"total_size": 2 * LARGE_BYTES}
    return json.dumps({"metadata": total, "weight_map": files}).encode()


class HubServer(ThreadingHTTPServer):
    """The server of one hub."""

    daemon_threads = True

    def __init__(self, hub: Hub, config: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub = hub
        self.small = {"config.json": config, INDEX: index()}
        self.files = {
            WHOLE: {"config.json", "model.safetensors"},
            CUT: {"config.json", INDEX, *SHARDS},
        }


class Handler(BaseHTTPRequestHandler):
    """Answers as huggingface.co does, as far as its client needs it."""

    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_HEAD(self) -> None:
        """Answer without a body."""
        self._answer(has_body=False)

    def do_GET(self) -> None:
        """Answer."""
        self._answer(has_body=True)

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _answer(self, *, has_body: bool) -> None:
        hub = self.server.hub
        hub.requests.append(f"{self.command} {self.path}")
        if "Authorization" in self.headers:
            hub.tokens.append(self.headers["Authorization"])
        repository, _, rest = self.path.strip("/").partition("/resolve/")
        name = rest.partition("/")[2].partition("?")[0]
        if repository.startswith("api/models/"):
            about = self._about("/".join(repository.split("/")[2:4]))
            self._send(about, has_body=has_body)
        elif name not in self.server.files.get(repository, ()):
            self._send(b"", has_body=has_body)
        elif name in self.server.small:
            self._send(self.server.small[name], has_body=has_body)
        else:
            self._send_weights(has_body=has_body)

    def _about(self, repository: str) -> bytes:
        """Return the hub API's answer about a repository; empty if there is none."""
        names = self.server.files.get(repository)
        if names is None:
            return b""
        small = self.server.small
        siblings = [
            {"rfilename": name, "size": len(small[name]) if name in small else LARGE_BYTES}
            for name in sorted(names)
        ]
        about = {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings}
        return json.dumps(about).encode()

    def _begin(self, status: int, length: int, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{zlib.crc32(self.path.encode()):040x}"')
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def _send(self, data: bytes, *, has_body: bool) -> None:
        if data:
            self._begin(200, len(data))
        else:
            self._begin(404, 0, X_Error_Code="EntryNotFound")
        if has_body:
            self.wfile.write(data)

    def _send_weights(self, *, has_body: bool) -> None:
        size = len(safetensors_start()) + LARGE_BYTES
        first, last, status, headers = 0, size - 1, 200, {"Accept_Ranges": "bytes"}
        requested = self.headers.get("Range", "")
        if requested.startswith("bytes="):
            low, _, high = requested.removeprefix("bytes=").partition("-")
            first, last, status = int(low or 0), min(int(high or last), last), 206
            headers["Content_Range"] = f"bytes {first}-{last}/{size}"
        self._begin(status, last - first + 1, **headers)
        self.close_connection = True
        if has_body:
            with suppress(OSError):
                self._pour(first, last + 1)

    def _pour(self, first: int, stop: int) -> None:
        start = safetensors_start()
        while first < stop:
            piece = start[first : first + PIECE] or bytes(min(PIECE, stop - first))
            self.wfile.write(piece[: stop - first])
            first += len(piece)
            self.server.hub.weight_bytes += len(piece)
            time.sleep(PAUSE_S)
