"""A job opens what the owner of a peer allows, and its client learns nothing of the rest."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarm_ft.errors import (
    BadInput,
    BadModel,
    BadOption,
    ModelDiffers,
    ModelNotAllowed,
    ModelUnavailable,
)
from swarm_ft.protocol.spec.run_spec import ModelSpec, RunSpec
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.model_access import (
    UNAVAILABLE,
    ModelAccess,
    named_directories,
    refusal_of,
)
from swarm_ft.stage.names import is_hub_id
from swarm_ft.stage.source import Source
from tests.specs import train_spec
from tests.unit.stage.conftest import MakeModel

Places = dict[str, Path]


@pytest.fixture
def places(make_model: MakeModel, tmp_path: Path) -> Places:
    """`named` is a directory that the owner names; `private` is beside it."""
    named, private = tmp_path / "named", tmp_path / "private"
    for root in (named, private):
        shutil.copytree(make_model("llama"), root / "llama")
    (named / "empty").mkdir()
    (named / "torn").mkdir()
    (named / "torn" / "config.json").write_text("{")
    (named / "link-out").symlink_to(private / "llama", target_is_directory=True)
    (named / "link-in").symlink_to(named / "llama", target_is_directory=True)
    shutil.copytree(make_model("llama"), named / "weights-elsewhere")
    (named / "weights-elsewhere" / "model.safetensors").unlink()
    (named / "weights-elsewhere" / "model.safetensors").symlink_to(
        private / "llama" / "model.safetensors"
    )
    return {"named": named, "private": private}


@pytest.fixture
def model(make_model: MakeModel) -> ModelSpec:
    return open_checkpoint(str(make_model("llama"))).describe()


def run_of(model: ModelSpec, reference: str | Path) -> RunSpec:
    return RunSpec(model=replace(model, reference=str(reference)), train=train_spec())


def access_to(*named: Path, **options: Any) -> ModelAccess:
    return ModelAccess(directories=named_directories(named), **options)


ALLOWED: dict[str, Callable[[Places], str | Path]] = {
    "absolute": lambda at: at["named"] / "llama",
    "relative": lambda _: "llama",
    "dots": lambda _: "./llama",
    "a link that stays inside": lambda at: at["named"] / "link-in",
}


@pytest.mark.parametrize("reference", ALLOWED.values(), ids=ALLOWED)
def test_a_directory_below_a_named_one_is_opened(
    places: Places, model: ModelSpec, reference: Callable[[Places], str | Path]
) -> None:
    access = access_to(places["named"])
    checkpoint = access.open(run_of(model, reference(places)))
    assert checkpoint.describe().block_digests == model.block_digests


def test_a_named_directory_may_be_the_model_itself_or_a_link(
    places: Places, model: ModelSpec, tmp_path: Path
) -> None:
    (tmp_path / "alias").symlink_to(places["named"], target_is_directory=True)
    for named, reference in (
        (places["named"] / "llama", places["named"] / "llama"),
        (tmp_path / "alias", tmp_path / "alias" / "llama"),
        (tmp_path / "alias", places["named"] / "llama"),
    ):
        assert access_to(named).open(run_of(model, reference)).config.num_hidden_layers == 4


FORBIDDEN: dict[str, Callable[[Places], str | Path]] = {
    "missing": lambda at: at["named"] / "nothing",
    "missing, relative": lambda _: "no/such/thing",
    "without config": lambda at: at["named"] / "empty",
    "unreadable": lambda at: at["named"] / "torn",
    "a file": lambda at: at["named"] / "llama" / "config.json",
    "outside": lambda at: at["private"] / "llama",
    "outside by dots": lambda at: f"{at['named']}/../private/llama",
    "outside by dots, relative": lambda _: "../private/llama",
    "a link that leads out": lambda at: at["named"] / "link-out",
    "weights that lie outside": lambda at: at["named"] / "weights-elsewhere",
    "of the system": lambda _: "/etc",
    "a home": lambda _: "~/llama",
    "another machine": lambda _: "//host/share/llama",
}


@pytest.mark.parametrize("reference", FORBIDDEN.values(), ids=FORBIDDEN)
def test_whatever_keeps_a_model_from_being_opened_a_client_hears_the_same(
    places: Places, model: ModelSpec, reference: Callable[[Places], str | Path]
) -> None:
    text = reference(places)
    with pytest.raises(ModelUnavailable) as caught:
        access_to(places["named"]).open(run_of(model, text))
    assert caught.value.message == UNAVAILABLE
    assert caught.value.private


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every path that this process opens, lists or stats."""
    paths: list[str] = []

    def noted(module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            paths.append(os.fsdecode(path) if isinstance(path, str | bytes | Path) else "")
            return real(path, *args, **kwargs)

        monkeypatch.setattr(module, name, call)

    for name in ("stat", "lstat", "readlink", "open", "scandir", "listdir", "access"):
        noted(os, name)
    noted(io, "open")
    return paths


@pytest.mark.parametrize("name", ["outside", "outside by dots", "outside by dots, relative"])
def test_no_path_outside_the_named_directories_is_looked_at(
    places: Places, model: ModelSpec, name: str, looked_at: list[str]
) -> None:
    access = access_to(places["named"])
    spec = run_of(model, FORBIDDEN[name](places))
    looked_at.clear()
    with pytest.raises(ModelUnavailable):
        access.open(spec)
    assert not [path for path in looked_at if "private" in path]
    access.open(run_of(model, "llama"))
    assert [path for path in looked_at if path.endswith("config.json")]  # it does watch


def test_a_relative_reference_is_not_looked_for_in_the_working_directory(
    places: Places, model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(places["private"])
    with pytest.raises(ModelUnavailable):
        access_to(places["named"] / "empty").open(run_of(model, "llama"))
    with pytest.raises(ModelUnavailable):
        ModelAccess().open(run_of(model, "llama"))


def test_another_model_below_a_named_directory_differs_without_a_detail(
    places: Places, make_model: MakeModel
) -> None:
    other = open_checkpoint(str(make_model("gpt2-tied"))).describe()
    with pytest.raises(ModelDiffers) as caught:
        access_to(places["named"]).open(run_of(other, "llama"))
    assert caught.value.message == "the model differs in its config"
    assert "48" not in caught.value.message
    assert str(places["named"]) in caught.value.private


def test_a_model_that_stands_in_is_opened_whatever_a_job_names(
    places: Places, model: ModelSpec
) -> None:
    access = access_to(own=str(places["private"] / "llama"))
    assert access.open(run_of(model, "/anything")).describe().block_digests == model.block_digests


# ---- the hub


def test_only_hub_ids_reach_the_hub(places: Places, model: ModelSpec) -> None:
    requests: list[str] = []

    def hub(model: ModelSpec) -> Source:
        requests.append(model.reference)
        return Source(reference=str(places["private"] / "llama"))

    access = access_to(places["named"], hub=hub)
    for reference in ("org/llama", "gpt2"):
        access.open(run_of(model, reference))
    for reference in ("org/../llama", "/org/llama", "a/b/c", "org/", "", "org--x/y", "org/x y"):
        with pytest.raises(ModelUnavailable):
            access.open(run_of(model, reference))
    assert requests == ["org/llama", "gpt2"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", True),
        ("gpt2", True),
        ("Org-1/name.v2_x", True),
        ("org/.name", False),
        ("-org/name", False),
        ("org/name.git", False),
        ("org/na..me", False),
        ("org/n\N{LATIN SMALL LETTER A WITH DIAERESIS}me", False),
        ("a" * 97, False),
        ("datasets/org/name", False),
        ("https://hub/org/name", False),
        ("org/name\n", False),
        (".", False),
    ],
)
def test_hub_ids(text: str, expected: bool) -> None:
    assert is_hub_id(text) is expected


def test_a_list_of_allowed_models(places: Places, model: ModelSpec) -> None:
    def hub(_model: ModelSpec) -> Source:
        return Source(reference=str(places["private"] / "llama"))

    access = access_to(places["named"], hub=hub, allowed=("org/llama", "good/*", "gpt2"))
    for reference in ("org/llama", "good/anything", "gpt2"):
        access.open(run_of(model, reference))
    for reference in ("org/other", "goodness/x", "good", "evil/good", "opt"):
        with pytest.raises(ModelNotAllowed, match="does not allow this model") as caught:
            access.open(run_of(model, reference))
        assert caught.value.private
    access.open(run_of(model, places["named"] / "llama"))  # directories are named, not listed


def test_a_list_of_allowed_models_tells_nothing_of_directories(
    places: Places, model: ModelSpec
) -> None:
    """A relative path may look like a hub id, and exist or not: the error is the same."""
    shutil.copytree(places["named"] / "torn", places["named"] / "org" / "torn")
    access = access_to(places["named"], allowed=("good/*",))
    messages = set()
    for reference in ("org/torn", "org/nothing"):
        with pytest.raises(BadModel) as caught:
            access.open(run_of(model, reference))
        messages.add((caught.value.code, caught.value.message))
    assert messages == {("model-not-allowed", "this peer does not allow this model")}


@pytest.mark.parametrize("text", ["", "*", "org/", "org/na*", "*/name", "org/name/more", "or g/*"])
def test_a_wrong_entry_of_the_list_is_refused(text: str) -> None:
    with pytest.raises(BadOption, match="--allow-models: expected ORG/NAME"):
        ModelAccess(allowed=(text,))


def test_a_named_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"--models .*nothing: expected a directory"):
        named_directories([tmp_path / "nothing"])


@pytest.mark.parametrize(
    "error", [BadModel("model '/home/ada/x': no"), BadOption("seq-length 9: /x has 8 positions")]
)
def test_a_client_hears_no_detail_of_an_error_while_loading(error: BadInput) -> None:
    refusal = refusal_of(error)
    assert (refusal.code, refusal.message) == ("model-unavailable", UNAVAILABLE)
    assert refusal.private == error.message
