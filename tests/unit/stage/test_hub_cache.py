"""Models of the hub at a peer, fetched from a server on loopback with the hub's API."""

from __future__ import annotations

import gc
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from swarm_ft.errors import ModelDiffers, ModelUnavailable
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import ModelSpec, RunSpec
from swarm_ft.stage.checkpoint import Checkpoint, open_checkpoint
from swarm_ft.stage.hub_cache import HubCache, bytes_in, most_bytes
from swarm_ft.stage.model_access import UNAVAILABLE, ModelAccess
from tests.specs import train_spec
from tests.unit.stage.conftest import MakeModel

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LARGE = 1 << 40


class Hub:
    """A hub of public repositories, each a folder.

    Attributes:
        folder: of repositories, `ORG/NAME` each.
        requests: the paths of all requested files, below /files.
        headers: of all requests.
        sizes: what it announces in the place of a file's size.
        extra: bytes that it sends behind a file's.
        redirects: whether files come from another place of the same server.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.sizes: dict[str, int] = {}
        self.extra: dict[str, int] = {}
        self.redirects = False
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fetched(self, name: str) -> int:
        return sum(path.startswith("/files/") and path.endswith(name) for path in self.requests)

    def _info(self, name: str) -> dict[str, Any] | None:
        if not (self.folder / name).is_dir():
            return None
        files = [path for path in (self.folder / name).iterdir() if path.is_file()]
        siblings = [
            {"rfilename": one.name, "size": self.sizes.get(one.name, one.stat().st_size)}
            for one in files
        ]
        return {"id": name, "sha": COMMIT, "siblings": siblings, "private": False}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                hub.headers.append({name.lower(): text for name, text in self.headers.items()})
                if path.startswith("/api/models/"):
                    info = hub._info(path.removeprefix("/api/models/"))
                    found = None if info is None else json.dumps(info).encode()
                    headers = {"X-Error-Code": "RepoNotFound"} if info is None else {}
                    self._answer(found, headers)
                elif hub.redirects and not path.startswith("/files/"):
                    self.send_response(302)
                    self.send_header("Location", f"{hub.endpoint}/files{path}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                else:
                    self._file(path)

            def _file(self, path: str) -> None:
                hub.requests.append(f"/files{path.removeprefix('/files')}")
                name, _, rest = path.removeprefix("/files").partition("/resolve/")
                file = hub.folder / name.strip("/") / rest.partition("/")[2]
                if not file.is_file():
                    self._answer(None, {})
                    return
                data = file.read_bytes() + bytes(hub.extra.get(file.name, 0))
                # No length: so it may send more than it announced.
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n0\r\n\r\n")

            def _answer(self, data: bytes | None, headers: dict[str, str]) -> None:
                self.send_response(404 if data is None else 200)
                for name, text in headers.items():
                    self.send_header(name, text)
                self.send_header("Content-Length", str(len(data or b"")))
                self.end_headers()
                self.wfile.write(data or b"")

        return Handler


@pytest.fixture
def hub(tmp_path: Path, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """It has `org/llama`, `org/other` (the same) and `org/sharded`."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("llama", "other"):
        shutil.copytree(make_model("llama"), tmp_path / "hub" / "org" / name)
    model = AutoModelForCausalLM.from_pretrained(make_model("llama"))
    model.save_pretrained(tmp_path / "hub" / "org" / "sharded", max_shard_size="30KB")
    hub = Hub(tmp_path / "hub")
    yield hub
    hub.close()


@pytest.fixture
def model(make_model: MakeModel) -> ModelSpec:
    return open_checkpoint(str(make_model("llama"))).describe()


def opened(hub: Hub, model: ModelSpec, reference: str, cache: HubCache | None = None) -> Checkpoint:
    spec = RunSpec(model=replace(model, reference=reference), train=train_spec())
    cache = cache or HubCache(hub.folder.parent / "cache", LARGE, endpoint=hub.endpoint)
    return ModelAccess(hub=cache).open(spec)


def refused(
    hub: Hub, model: ModelSpec, reference: str = "org/llama", cache: HubCache | None = None
) -> str:
    """Return the peer's log of a refusal; a client receives none of it."""
    with pytest.raises(ModelUnavailable) as caught:
        opened(hub, model, reference, cache)
    assert caught.value.message == UNAVAILABLE
    return caught.value.private


@pytest.mark.parametrize("redirects", [False, True])
def test_a_public_model_is_fetched_without_the_owners_token(
    hub: Hub, model: ModelSpec, redirects: bool
) -> None:
    hub.redirects = redirects
    checkpoint = opened(hub, model, "org/llama")
    assert checkpoint.load(LayerRange(0, 4), model).keys() >= {"lm_head.weight"}
    assert hub.fetched(WEIGHTS) == 1
    assert len(hub.headers) >= 3
    assert not [one for one in hub.headers if "authorization" in one]
    assert not [one for one in hub.headers if "hf_secret" in str(one)]


def test_of_a_model_in_several_files_a_stage_fetches_its_own(hub: Hub, model: ModelSpec) -> None:
    checkpoint = opened(hub, model, "org/sharded")
    assert not [path for path in hub.requests if path.endswith(".safetensors")]
    checkpoint.load(LayerRange(1, 2), model)
    fetched = [path for path in hub.requests if path.endswith(".safetensors")]
    assert 0 < len(fetched) < len(list((hub.folder / "org" / "sharded").glob("*.safetensors")))


def test_files_that_are_here_are_not_fetched_again(hub: Hub, model: ModelSpec) -> None:
    for _ in range(2):
        opened(hub, model, "org/llama").load(LayerRange(0, 1), model)
    assert hub.fetched(WEIGHTS) == 1


def test_a_run_goes_on_while_the_hub_does_not_answer(hub: Hub, model: ModelSpec) -> None:
    opened(hub, model, "org/llama")
    hub.server.RequestHandlerClass.do_GET = lambda self: self.send_error(503)  # type: ignore[attr-defined]
    opened(hub, model, "org/llama").load(LayerRange(0, 1), model)
    assert "the hub did not answer" in refused(hub, model, "org/other")


def test_a_repository_that_is_not_public_is_not_available(hub: Hub, model: ModelSpec) -> None:
    assert "no public repository" in refused(hub, model, "org/private")


def test_another_models_weights_are_not_fetched(hub: Hub, make_model: MakeModel) -> None:
    other = open_checkpoint(str(make_model("gpt2-tied"))).describe()
    with pytest.raises(ModelDiffers, match="differs in its config"):
        opened(hub, other, "org/llama")
    assert hub.fetched(WEIGHTS) == 0


# ---- sizes


def test_a_model_larger_than_its_job_says_is_refused_before_a_byte_of_weights(
    hub: Hub, model: ModelSpec
) -> None:
    hub.sizes[WEIGHTS] = most_bytes(model) + 1
    assert f"expected {most_bytes(model)} at most" in refused(hub, model)
    assert hub.fetched(WEIGHTS) == 0


def test_an_index_that_tells_of_more_than_the_job_is_refused(hub: Hub, model: ModelSpec) -> None:
    path = hub.folder / "org" / "sharded" / INDEX
    index = json.loads(path.read_text())
    index["metadata"]["total_size"] = most_bytes(model) + 1
    path.write_text(json.dumps(index))
    assert "at most, by what the job says" in refused(hub, model, "org/sharded")
    assert not [path for path in hub.requests if path.endswith(".safetensors")]


def test_shards_that_are_larger_than_the_index_tells_are_refused(
    hub: Hub, model: ModelSpec
) -> None:
    shard = min((hub.folder / "org" / "sharded").glob("*.safetensors")).name
    hub.sizes[shard] = most_bytes(model) + 1
    assert "at most, by what the job says" in refused(hub, model, "org/sharded")


@pytest.mark.parametrize("file", ["../private.safetensors", "/etc/passwd", "missing.safetensors"])
def test_an_index_that_names_other_files_is_refused(hub: Hub, model: ModelSpec, file: str) -> None:
    path = hub.folder / "org" / "sharded" / INDEX
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = file
    path.write_text(json.dumps(index))
    assert "which does not exist" in refused(hub, model, "org/sharded")


def test_a_large_config_is_not_fetched(hub: Hub, model: ModelSpec) -> None:
    hub.sizes["config.json"] = 1 << 30
    assert "config.json has 1073741824 bytes" in refused(hub, model)
    assert hub.fetched("config.json") == 0


def test_a_file_longer_than_announced_is_cut_off(hub: Hub, model: ModelSpec) -> None:
    hub.extra[WEIGHTS] = 64 << 20
    counted: list[int] = []
    cache = HubCache(
        hub.folder.parent / "cache", LARGE, endpoint=hub.endpoint, on_bytes=counted.append
    )
    assert "more than the" in refused(hub, model, cache=cache)
    announced = (hub.folder / "org" / "llama" / WEIGHTS).stat().st_size
    assert sum(counted) <= announced + (1 << 16)
    assert not list((hub.folder.parent / "cache").rglob("*.partial"))
    assert not list((hub.folder.parent / "cache").rglob(WEIGHTS))


def test_a_file_shorter_than_announced_is_refused(hub: Hub, model: ModelSpec) -> None:
    size = (hub.folder / "org" / "llama" / WEIGHTS).stat().st_size
    hub.sizes[WEIGHTS] = size + 1
    assert "Consistency check failed" in refused(hub, model)
    assert not list((hub.folder.parent / "cache").rglob(WEIGHTS))


# ---- what the owner lends


def test_bytes_are_counted_and_the_months_rest_is_kept(hub: Hub, model: ModelSpec) -> None:
    counted: list[int] = []
    folder, left = hub.folder.parent / "cache", 1e9
    cache = HubCache(
        folder,
        LARGE,
        endpoint=hub.endpoint,
        on_bytes=counted.append,
        left_bytes=lambda: left - sum(counted),
    )
    opened(hub, model, "org/llama", cache)
    whole = sum(
        (hub.folder / "org" / "llama" / name).stat().st_size for name in ("config.json", WEIGHTS)
    )
    assert sum(counted) == whole
    left = sum(counted) + 100_000
    assert "exceed what is left of --monthly-gb" in refused(hub, model, "org/other", cache)
    assert hub.fetched(f"org/other/resolve/{COMMIT}/{WEIGHTS}") == 0


def test_models_that_no_run_uses_make_room(hub: Hub, model: ModelSpec, tmp_path: Path) -> None:
    shutil.copytree(hub.folder / "org" / "llama", hub.folder / "org" / "third")
    weights = (hub.folder / "org" / "llama" / WEIGHTS).stat().st_size
    cache = HubCache(tmp_path / "cache", int(2.5 * weights), endpoint=hub.endpoint)
    in_use = opened(hub, model, "org/llama", cache)
    opened(hub, model, "org/other", cache)
    opened(hub, model, "org/third", cache)
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {"org--llama", "org--third"}
    assert bytes_in(tmp_path / "cache") <= 2.5 * weights
    in_use.load(LayerRange(0, 1), model)

    again = opened(hub, model, "org/third", cache)
    assert "do not fit into --model-disk" in refused(hub, model, "org/other", cache)
    del in_use
    gc.collect()
    opened(hub, model, "org/other", cache)
    again.load(LayerRange(0, 1), model)


def test_without_a_budget_nothing_is_fetched(hub: Hub, model: ModelSpec, tmp_path: Path) -> None:
    cache = HubCache(tmp_path / "cache", 0, endpoint=hub.endpoint)
    assert "do not fit into --model-disk" in refused(hub, model, cache=cache)
    assert not [path for path in hub.requests if path.startswith("/files")]
