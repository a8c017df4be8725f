"""The quality study on a tiny model: runs, rates, resumption, tables; the published quantiser."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.quality.boundary import Cuts, channel_of
from benchmarks.quality.configs import GROUPS, Config, configs_of, parse_config
from benchmarks.quality.former import parse_former
from benchmarks.quality.published import parse_published
from benchmarks.quality.table import print_tables, read_records
from swarm_ft.codec.spec import Direction, parse_dp_spec, parse_key_spec

ROOT = Path(__file__).parents[3]
TINY = (
    "layers=2 width=32 heads=2 vocabulary=300 tokens=16 cuts=1 pretrain_epochs=1 train_samples=16"
)
HEADER = 12 * 8 / (16 * 32)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    words = ["the", "a", "cat", "dog", "saw", "liked", "old", "young", "that", "and"]
    chance = random.Random(0)
    lines = [" ".join(chance.choices(words, k=12)) for _ in range(60)]
    (folder / "wikitext2-valid.txt").write_text("\n".join(lines))
    for part in ("train", "dev"):
        rows = [f"x\t1\t\t{' '.join(chance.choices(words[2:], k=9))}." for _ in range(40)]
        (folder / f"cola-{part}.tsv").write_text("\n".join(rows) + "\n")
    return folder


def study(*options: str, module: str = "benchmarks.quality") -> str:
    # In a process of its own, as it sets torch to one thread and to deterministic operations.
    command = [sys.executable, "-m", module, *options]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


CONFIGS = "none,none/pubq4@fp16@none,aq4/pubq2,aq4/pubq2#4"
REDUCED = ",".join(f"none/none/{dp}" for dp in ("none", "q4", "q8"))


@pytest.fixture(scope="module")
def results(texts: Path) -> Path:
    """Return the study's results file for all of these."""
    out = texts / "results.jsonl"
    options = [f"--set={setting}" for setting in TINY.split()]
    options += ["--data", str(texts), "--cache", str(texts), "--out", str(out), "--seeds", "0"]
    options += ["--rates", "2e-3,0.002"]  # the same twice: the second is found to be done
    study(*options, "--epochs", "2", "--configs", f"{CONFIGS},{REDUCED}")
    return out


@pytest.mark.slow
def test_runs_each_config_once_and_prints_a_table(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none, late, aq4, coarse, *reduced = map(json.loads, results.read_text().splitlines())
    assert len(reduced) == 3
    assert none["bits_fw"] == none["bits_bw"] == 32 + HEADER
    assert none["epochs"][1]["ppl"] < none["start"]["ppl"]
    assert late["epochs"][0] == none["epochs"][0]  # the same bits, run after run
    assert late["epochs"][1]["ppl"] != none["epochs"][1]["ppl"]
    assert late["epochs"][1]["bits_bw"] == 4 + 16 / 16  # a float16 for each channel of 16 tokens
    first, second = aq4["epochs"]
    assert 16 < first["bits_fw"] < 16.5
    assert 4 < second["bits_fw"] < 6
    assert first["bits_bw"] == second["bits_bw"] == 2 + 16 / 16
    assert not aq4["diverged"]
    assert coarse["epochs"][0] == first  # of first visits, which no buffer precedes
    assert coarse["epochs"][1]["loss"] != second["loss"]
    assert coarse["epochs"][1]["ppl"] == pytest.approx(second["ppl"], rel=0.01)
    print_tables(read_records(results), None, None)
    table = capsys.readouterr().out
    assert "| `aq4/pubq2@fp16` | 2 | 1 |" in table
    assert "| `aq4/pubq2@fp16#4` | 2 | 1 |" in table


@pytest.mark.slow
def test_replicas_train_as_one_peer_does_but_for_what_their_codec_loses(results: Path) -> None:
    alone, _late, _aq4, _coarse, exact, *coarse = map(json.loads, results.read_text().splitlines())
    assert exact["bits_dp"] == pytest.approx(32, rel=0.01)
    for mine, theirs in zip(exact["epochs"], alone["epochs"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["ppl"] == pytest.approx(theirs["ppl"], rel=1e-4)
    for found, bits in zip(coarse, (4, 8), strict=True):
        assert bits < found["bits_dp"] < bits + 0.2
        assert found["epochs"][-1]["ppl"] != alone["epochs"][-1]["ppl"]
        assert found["epochs"][-1]["ppl"] == pytest.approx(alone["epochs"][-1]["ppl"], rel=0.2)


@pytest.mark.slow
def test_a_codecs_steps_are_compared_with_exact_ones(texts: Path) -> None:
    options = [f"--set={setting}" for setting in TINY.split()]
    options += ["--data", str(texts), "--cache", str(texts), "--dps", "fp16,q4"]
    table = study(*options, module="benchmarks.quality.updates")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == ["fp16", "q4"]
    (fine, coarse) = ([float(cell) for cell in row[1:]] for row in rows)
    assert fine[0] == pytest.approx(16, rel=0.01)
    assert fine[1] > 0.999
    assert 0.7 < coarse[1] < fine[1]  # a step's cosine with the exact one
    assert fine[2] < coarse[2] < 0.7  # the error of all steps together


@pytest.mark.slow
def test_codecs_of_gradients_are_compared_visit_by_visit(texts: Path) -> None:
    options = [f"--set={setting}" for setting in TINY.split()]
    options += ["--data", str(texts), "--cache", str(texts), "--codecs", "q8t,q2t,q2t+last@q2t"]
    table = study(*options, module="benchmarks.quality.gradients")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[3:]]
    (fine, coarse, last, left) = ([float(cell) for cell in row[1:]] for row in rows)
    assert fine[0] == pytest.approx(8 + 16 / 32 + HEADER, abs=1e-3)  # a bfloat16 a token of 32
    assert max(fine[1:]) < 1e-3 < min(coarse[1:])
    assert last[1] == coarse[1]
    assert last[-1] < coarse[-1]
    assert len(left) == 5
    assert all(0 <= share <= 1 for share in left)


@pytest.mark.slow
def test_what_can_be_known_of_first_visits_is_told_in_three_tables(texts: Path) -> None:
    options = [f"--set={setting}" for setting in TINY.split()]
    options += ["--set=batch=1", "--data", str(texts), "--cache", str(texts)]
    found = study(*options, "--codecs", "q2t,q2t+book", module="benchmarks.quality.first_visits")
    lines = [line for line in found.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    tables = {row[0]: [float(cell) for cell in row[1:]] for row in rows}
    assert len(tables) == len(rows) - 1, "the mean of the token is in two"
    assert tables["nothing"][0] == 1
    assert all(0 < tables[f"{count} centroids"][0] < 1 for count in (64, 256, 1024))
    assert all(0 < tables[f"{count} directions"][0] < 1 for count in (64, 256, 1024))
    assert tables["mean of the target"][0] < tables["mean of all"][0]
    assert tables["`q2t+book`"][0] > tables["`q2t`"][0] + 0.1, "its codebook is counted"
    assert tables["`q2t+book`"][1] != tables["`q2t`"][1]


@pytest.mark.parametrize("group", GROUPS)
def test_every_config_of_a_group_can_be_parsed(group: str) -> None:
    for config in configs_of(GROUPS[group], 6):
        channel_of(config.fw, config.key, Direction.FORWARD)
        channel_of(config.bw, config.first or config.key, Direction.BACKWARD)
        assert parse_former(config.key) or parse_key_spec(config.key)
        assert not config.dp or parse_dp_spec(config.dp)


def test_config_texts() -> None:
    assert parse_config("none:3") == Config("none", "none", epochs=3)
    assert parse_config("aq2+z/q2+z@q4+z@fp16:10") == Config("aq2+z", "q2+z", "q4+z", "fp16", 10)
    assert str(parse_config("aq2/q4")) == "aq2/q4@fp16"
    assert str(parse_config("aq2/q4#4:2")) == "aq2/q4@fp16#4"
    assert parse_config("aq2/q4@q8#8:2") == Config("aq2", "q4", "q8", epochs=2, bits=8)
    assert parse_config("aq2/q4#16") == parse_config("aq2/q4")
    assert str(parse_config("q2/q4@q8")) == "q2/q4"
    both = parse_config("aq3/q6/q4@q8:5")
    assert both == Config("aq3", "q6", "q8", epochs=5, dp="q4")
    assert parse_config("none/none/q4:3") == Config("none", "none", epochs=3, dp="q4")
    assert str(parse_config("none/none/none")) == "none/none/none"
    for text in (
        "aq3/q6/q4@fp16",
        "aq2/q4@q8@none",
        "none/q4@fp16@none",
        "none/top10+ef21@q8",
        "aq4~aq2/q8@fp16",
    ):
        assert str(parse_config(text)) == text
    with pytest.raises(ValueError, match="expected fw"):
        parse_config("aq2")


@pytest.mark.parametrize(("bits", "largest"), [(2, 0.5), (3, 0.75), (4, 0.875)])
def test_published_quantiser_loses_a_step_at_its_largest_value(bits: int, largest: float) -> None:
    codec = parse_published(f"pubq{bits}")
    assert codec is not None
    x = torch.tensor([[-1.0, 1.0], [0.0, -1.0]])
    encoded = codec.encode(x)
    torch.testing.assert_close(codec.decode(encoded), torch.tensor([[-1, largest], [0, -1]]))
    assert len(encoded.to_bytes()) == (4 * bits + 7) // 8 + 2 * 2


def test_published_codes_are_packed_high_bits_first() -> None:
    codes = torch.arange(13.0) % 8 - 4
    codec = parse_published("pubq3")
    assert codec is not None
    encoded = codec.encode(codes[:, None] / 4)
    assert encoded.codes.hex() == "0539770538"


def test_published_delta_builds_on_its_base() -> None:
    codec = parse_published("pubaq4")
    assert codec is not None
    base = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    x = base + 0.01
    y = codec.decode(codec.encode(x, base), base)
    assert (y - x).abs().max() < 0.0025


def test_codecs_compute_alike_where_a_model_computes_in_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)
    visits = [torch.randn(1, 64, 16, generator=generator) for _ in range(2)]
    visits.append(visits[1] + 0.01 * torch.randn(1, 64, 16, generator=generator))
    found = []
    for is_narrow in (False, True):
        cuts = Cuts(parse_config("aqk0.5/none@qk0.5"), 1)
        with torch.autocast("cpu", torch.bfloat16, is_narrow):
            for x in visits:  # from the second on, along a basis
                cuts.begin("train", torch.tensor([0]), torch.tensor([64]))
                sent = cuts.cut(0, x)
        found.append(sent)
    assert torch.equal(*found)
