"""Bad input gets one clear line on standard error, exit code 2, and leaves nothing behind."""

import socket
from pathlib import Path

import pytest

from swarm_ft.client.demo_input import DemoInput
from tests.cli.conftest import RunHere, error_lines

INSECURE = "--insecure"
DEAD_PEER = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.fixture
def place(tmp_path: Path, sample: DemoInput, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to work in, with a good model, good text, and what may be wrong with them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "model").symlink_to(sample.model_dir)
    (tmp_path / "good.txt").symlink_to(sample.train_file)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "blank.txt").write_text(" \n\n\t\n")
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "latin1.txt").write_bytes("Übermut".encode("latin-1"))
    (tmp_path / "no-data").mkdir()
    (tmp_path / "no-data" / "README.md").write_text("no data here")
    (tmp_path / "no-config").mkdir()
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": ')
    (tmp_path / "no-weights").mkdir()
    config = (tmp_path / "model" / "config.json").read_text()
    (tmp_path / "no-weights" / "config.json").write_text(config)
    (tmp_path / "not-a.db").write_bytes(b"this is no database " * 99)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("do not touch")
    (tmp_path / "no-peers").touch()
    return tmp_path


def tree(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def refused(run_here: RunHere, place: Path, *arguments: object) -> str:
    """The one line of a command that was refused, and that changed nothing.

    A peer prints what this machine lends before it calls anybody.
    """
    before = tree(place)
    result = run_here(*arguments)
    assert result.code == 2, result.err
    lends = arguments[0] == "serve-stage" and result.out.startswith("This machine lends at most ")
    assert result.out.count("\n") == lends
    (line,) = error_lines(result.err)
    assert line.startswith("swarm-ft: ")
    assert tree(place) == before
    return line


JOB = ("--model", "model", "--dataset", "good.txt")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "./missing", "--dataset", "good.txt"), ("./missing", "no such directory")),
        (("--model", "no-config", "--dataset", "good.txt"), ("no-config", "config.json")),
        (("--model", "broken", "--dataset", "good.txt"), ("broken", "config.json", "unreadable")),
        (("--model", "no-weights", "--dataset", "good.txt"), ("no-weights", "safetensors")),
        (("--model", "bert", "--dataset", "good.txt"), ("bert", "model.safetensors")),
        (("--model", "good.txt", "--dataset", "good.txt"), ("good.txt", "directory")),
        (("--model", "model", "--dataset", "missing.txt"), ("missing.txt", "no such file")),
        (("--model", "model", "--dataset", "empty.txt"), ("empty.txt", "empty")),
        (("--model", "model", "--dataset", "blank.txt"), ("blank.txt", "empty")),
        (("--model", "model", "--dataset", "short.txt"), ("128 tokens", "--seq-length")),
        (("--model", "model", "--dataset", "latin1.txt"), ("latin1.txt", "UTF-8")),
        (("--model", "model", "--dataset", "no-data"), ("no-data", "found none", ".txt")),
        ((*JOB, "--eval-dataset", "missing.txt"), ("missing.txt", "no such file")),
        ((*JOB, "--fw", "zip"), ("zip", "such as none, fp16, q8, aq4")),
        ((*JOB, "--fw", "q"), ("codec 'q'", "a number of bits")),
        ((*JOB, "--fw", "aq9"), ("aq9", "1 to 8")),
        ((*JOB, "--fw", "q4+ef"), ("q4+ef", "for gradients")),
        ((*JOB, "--bw", "q16"), ("q16", "1 to 8")),
        ((*JOB, "--bw", "aq4"), ("aq4", "forward only", "q4+ef21")),
        ((*JOB, "--key", "aq4"), ("aq4", "key frame", "q4")),
        ((*JOB, "--key", "zip"), ("zip", "such as")),
        ((*JOB, "--fill", "zip"), ("zip", "such as")),
        ((*JOB, "--fill", "q2"), ("--fill", "q2", "aq2")),
        ((*JOB, "--fill-microbatches", "0"), ("--fill-microbatches", "0")),
        ((*JOB, "--dp", "top10"), ("top10", "fp16", "q1 to q8")),
        ((*JOB, "--dp", "q9"), ("q9", "1 to 8")),
        ((*JOB, "--buffer-bits", "5"), ("--buffer-bits", "5", "16", "8", "4")),
        ((*JOB, "--batch-size", "6", "--micro-batch-size", "4"), ("6", "not divisible", "4")),
        ((*JOB, "--batch-size", "0"), ("--batch-size", "0")),
        ((*JOB, "--steps", "many"), ("--steps", "many")),
        ((*JOB, "--epochs", "0"), ("--epochs", "0")),
        ((*JOB, "--lr", "nan"), ("--lr", "nan")),
        ((*JOB, "--lr-schedule", "square"), ("--lr-schedule", "cosine")),
        ((*JOB, "--seed", "-1"), ("--seed", "-1")),
        ((*JOB, "--seq-length", "1"), ("--seq-length", "1")),
        ((*JOB, "--seq-length", "257"), ("--seq-length 257", "256 positions")),
        ((*JOB, "--tied-embeddings", "sync"), ("--tied-embeddings sync", "untied")),
        ((*JOB, "--json", "missing/report.json"), ("--json", "missing")),
        ((*JOB, "--trace", "missing/trace.json"), ("--trace", "no directory", "missing")),
        ((*JOB, "--trace", "full"), ("--trace full", "is a directory")),
        ((*JOB, "--out", "full"), ("full", "thesis.txt", "another directory")),
        ((*JOB, "--out", "empty.txt"), ("empty.txt", "directory")),
        ((*JOB, "--early-stopping-patience", "2"), ("--early-stopping-patience", "--eval-steps")),
        ((*JOB, "--early-stopping-patience", "-1"), ("--early-stopping-patience", "-1")),
        (
            (*JOB, "--early-stopping-threshold", "0.1"),
            ("--early-stopping-threshold", "--early-stopping-patience"),
        ),
        ((*JOB, "--load-best-model-at-end"), ("--load-best-model-at-end", "--eval-steps")),
        (
            (*JOB, "--load-best-model-at-end", "--eval-steps", "4", "--save-steps", "6"),
            ("--save-steps 4 or a multiple", "got 6"),
        ),
        (
            (*JOB, "--load-best-model-at-end", "--eval-strategy", "epoch", "--save-steps", "6"),
            ("--save-strategy epoch", "got steps"),
        ),
        ((*JOB, "--metric-for-best-model", "f1"), ("--metric-for-best-model", "loss", "'f1'")),
        ((*JOB, "--save-total-limit", "0"), ("--save-total-limit", "0")),
        ((*JOB, "--frobnicate"), ("--frobnicate",)),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, tuple) else None,
)
def test_a_job_that_cannot_be_done_is_refused(
    run_here: RunHere, place: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    line = refused(run_here, place, "demo", *arguments)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--stages", "7"), ("--stages: expected at most 6", "got 7")),
        (("--stages", "0"), ("--stages", "0")),
        (("--seq-length", "1000"), ("--seq-length 1000", "256 positions")),
        (("--batch-size", "7"), ("7", "not divisible", "2")),
        (("--dataset", "empty.txt"), ("empty.txt",)),
        (("--model", "./missing"), ("./missing",)),
        (("--fw", "zip", "--out", "deep/in/the/tree"), ("zip",)),
        (("--stages", "7", "--out", "deep/in/the/tree"), ("--stages: ", "got 7")),
    ],
)
def test_a_demo_of_its_own_input_that_is_refused_leaves_no_input(
    run_here: RunHere, place: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    line = refused(run_here, place, "demo", *arguments)
    assert all(word in line for word in words), line


def test_a_refused_demo_keeps_what_an_earlier_one_left(run_here: RunHere, place: Path) -> None:
    log = place / "swarm-ft-output-demo" / "logs" / "coordinator.log"
    log.parent.mkdir(parents=True)
    log.write_text("kept")
    assert run_here("demo", "--stages", "7").code == 2
    assert log.read_text() == "kept"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--fw", "zip"), "zip"),
        (("--bw", "aq4"), "aq4"),
        (("--batch-size", "6", "--micro-batch-size", "4"), "not divisible"),
        (("--out", "full"), "thesis.txt"),
        (("--json", "missing/report.json"), "--json"),
        (("--trace", "missing/trace.json"), "--trace"),
        (("--stages", "3"), "--stages"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_client_train_checks_its_options_before_it_looks_for_a_swarm(
    run_here: RunHere, place: Path, arguments: tuple[str, ...], word: str
) -> None:
    way = (INSECURE, "--initial-peers", DEAD_PEER)
    line = refused(run_here, place, "client", "train", *JOB, *way, *arguments)
    assert word in line


def test_client_attach_checks_where_it_writes_before_it_looks_for_a_swarm(
    run_here: RunHere, place: Path
) -> None:
    way = (INSECURE, "--initial-peers", DEAD_PEER)
    line = refused(run_here, place, "client", "attach", *way, "--trace", "missing/trace.json")
    assert "--trace missing/trace.json: there is no directory" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("hi", "--prompt-file", "good.txt"), "--prompt-file: expected a file or PROMPT, got both"),
        (("--prompt-file", "missing.txt"), "missing.txt"),
        (("--prompt-file", "latin1.txt"), "UTF-8"),
        (("hi", "--max-new-tokens", "0"), "--max-new-tokens: expected 1 to 32768, got 0"),
        (("hi", "--temperature", "0"), "--temperature"),
        (("hi", "--temperature", "nan"), "--temperature"),
        (("hi", "--top-p", "1.1"), "--top-p"),
        (("hi", "--top-k", "-1"), "--top-k"),
        (("hi", "--seed", "-1"), "--seed"),
    ],
)
def test_client_generate_checks_what_is_asked_before_it_looks_for_a_swarm(
    run_here: RunHere, place: Path, arguments: tuple[str, ...], words: str
) -> None:
    way = (INSECURE, "--initial-peers", DEAD_PEER)
    assert words in refused(run_here, place, "client", "generate", *arguments, *way)


@pytest.mark.parametrize(
    "command",
    [
        ("serve-stage", "--layers", "0-1"),
        ("client", "train", *JOB),
        ("client", "attach"),
        ("client", "generate", "hi"),
        ("client", "cancel"),
        ("status",),
        ("events",),
        ("losses",),
    ],
    ids=" ".join,
)
def test_a_command_that_needs_a_swarm_says_so(
    run_here: RunHere, place: Path, command: tuple[str, ...]
) -> None:
    line = refused(run_here, place, *command)
    assert "expected an invitation, got none" in line
    assert "@FILE" in line
    assert "swarm-ft invite" in line
    assert "--initial-peers" in line


PLAINTEXT = [
    ("serve-stage", INSECURE, "--layers", "0-1"),
    ("client", "train", INSECURE, *JOB),
    ("client", "attach", INSECURE),
    ("client", "cancel", INSECURE),
    ("status", INSECURE),
    ("events", INSECURE),
    ("losses", INSECURE),
    ("coordinator", INSECURE),
]


@pytest.mark.parametrize("command", [*PLAINTEXT, ("dht",)], ids=" ".join)
@pytest.mark.parametrize(
    ("peers", "words"),
    [
        ("nonsense", ("'nonsense'",)),
        ("/ip4/127.0.0.1/tcp/9", ("/p2p/",)),
        ("@missing", ("@missing", "No such file")),
        ("@no-peers", ("@no-peers", "empty")),
        (DEAD_PEER, ("cannot join the DHT", DEAD_PEER)),
    ],
    ids=["malformed", "without an id", "missing file", "empty file", "dead"],
)
def test_addresses_that_lead_nowhere_are_refused(
    run_here: RunHere, place: Path, command: tuple[str, ...], peers: str, words: tuple[str, ...]
) -> None:
    line = refused(run_here, place, *command, "--initial-peers", peers)
    assert all(word in line for word in words), line


# ---- plaintext: on request, and on this machine


def test_a_journal_without_its_keys_is_no_new_swarm(run_here: RunHere, place: Path) -> None:
    for name in ("swarm-ft-coordinator.db", "runs.db"):
        (place / name).touch()
    line = refused(run_here, place, "coordinator")
    assert "expected the keys of the swarm" in line
    assert "'swarm-ft init'" in line
    assert "--insecure" in line
    named = refused(run_here, place, "coordinator", "--journal", "runs.db")
    assert "'swarm-ft init --journal runs.db'" in named


def test_a_coordinator_with_keys_uses_them(run_here: RunHere, place: Path) -> None:
    assert run_here("init").code == 0
    assert "swarm without keys, got keys in" in refused(run_here, place, "coordinator", INSECURE)


@pytest.mark.parametrize("command", PLAINTEXT[:-1], ids=" ".join)
def test_plaintext_is_not_what_comes_of_forgetting(
    run_here: RunHere, place: Path, command: tuple[str, ...]
) -> None:
    words = [word for word in command if word != INSECURE]
    line = refused(run_here, place, *words, "--initial-peers", DEAD_PEER)
    assert "expected an invitation" in line
    assert "--insecure" in line


@pytest.mark.parametrize("command", PLAINTEXT, ids=" ".join)
@pytest.mark.parametrize(
    "peer",
    [
        "/ip4/203.0.113.7/tcp/9/p2p/x",
        "/ip4/10.0.0.7/tcp/9/p2p/x",
        "/ip4/0.0.0.0/tcp/9/p2p/x",
        "/ip6/2001:db8::1/tcp/9/p2p/x",
        "/dns/localhost/tcp/9/p2p/x",
        "/p2p/x",
    ],
)
def test_plaintext_does_not_leave_this_machine(
    run_here: RunHere, place: Path, command: tuple[str, ...], peer: str
) -> None:
    line = refused(run_here, place, *command, "--initial-peers", peer)
    assert peer in line
    assert "on this machine" in line


@pytest.mark.parametrize("command", [PLAINTEXT[0], PLAINTEXT[-1]], ids=" ".join)
@pytest.mark.parametrize(
    "listening",
    [
        ("--host", "203.0.113.9"),
        ("--host", "10.0.0.9"),
        ("--host", "localhost"),
        ("--host", "0.0.0.0", "--announce", "127.0.0.1"),
        ("--announce", "two.lan"),
        ("--announce", "10.0.0.9:7000"),
    ],
    ids=" ".join,
)
def test_plaintext_listens_on_this_machine_alone(
    run_here: RunHere, place: Path, command: tuple[str, ...], listening: tuple[str, ...]
) -> None:
    line = refused(run_here, place, *command, "--initial-peers", DEAD_PEER, *listening)
    assert "stay on this machine" in line


@pytest.mark.parametrize("command", ["status", "events", "losses"])
@pytest.mark.parametrize(
    ("address", "code", "words"),
    [
        ("nonsense", 2, "expected HOST:PORT"),
        ("10.0.0.9:7000", 2, "stay on this machine"),
        ("127.0.0.1:1", 1, "127.0.0.1:1"),
    ],
)
def test_an_address_of_a_coordinator_is_one_of_this_machine_that_answers(
    run_here: RunHere, command: str, address: str, code: int, words: str
) -> None:
    answer = run_here(command, INSECURE, "--coordinator", address)
    assert answer.code == code
    assert words in answer.err


def test_losses_are_written_one_way(run_here: RunHere, place: Path) -> None:
    way = (INSECURE, "--coordinator", "127.0.0.1:1")
    assert "expected one of the two" in refused(run_here, place, "losses", *way, "--csv", "--json")


def test_an_invitation_is_for_encrypted_links(run_here: RunHere, place: Path) -> None:
    assert run_here("init").code == 0
    word = run_here("invite", "--address", "127.0.0.1:1").out.strip()
    for command in (("serve-stage", word), ("status", "--invite", word)):
        assert "encrypted" in refused(run_here, place, *command, INSECURE)


@pytest.mark.parametrize("layers", ["2", "a-b", "3-3", "5-2", "0-99999", "-1-2", "everything"])
def test_layers_that_do_not_parse_are_refused(run_here: RunHere, place: Path, layers: str) -> None:
    way = (INSECURE, "--initial-peers", DEAD_PEER)
    line = refused(run_here, place, "serve-stage", f"--layers={layers}", *way)
    assert "12-24" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--host", "0.0.0.0"), ("--host 0.0.0.0", "--announce")),
        (("--host", "::"), ("--host ::", "--announce")),
        (("--announce", "two words"), ("two words", "HOST:PORT")),
        (("--announce", "here:99999"), ("here:99999", "HOST:PORT")),
        (("--port", "99999"), ("--port", "99999")),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("command", ["coordinator", "serve-stage"])
def test_listeners_that_nobody_could_reach_are_refused(
    run_here: RunHere, place: Path, command: str, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    line = refused(run_here, place, command, INSECURE, "--initial-peers", DEAD_PEER, *arguments)
    assert all(word in line for word in words), line


def test_a_coordinator_cannot_listen_on_a_port_in_use_or_on_another_machine(
    run_here: RunHere, place: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(run_here, place, "coordinator", INSECURE, "--port", port)
    assert f"127.0.0.1:{port}" in line
    assert "taken" in line
    assert run_here("init").code == 0
    line = refused(run_here, place, "coordinator", "--host", "203.0.113.9")
    assert "203.0.113.9" in line


@pytest.mark.parametrize("journal", ["not-a.db", "missing/journal.db", "no-data"])
def test_a_journal_that_cannot_be_used_is_refused(
    run_here: RunHere, place: Path, journal: str
) -> None:
    line = refused(run_here, place, "coordinator", INSECURE, "--journal", journal)
    assert f"--journal {journal}" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "abacus"), ("--device 'abacus'", "cuda:N")),
        (("--model", "./missing"), ("./missing", "no such directory")),
        (("--memory", "0"), ("--memory",)),
        (("--memory", "500"), ("--memory", "no unit", "500GiB or 500MiB")),
        (("--memory", "900TiB"), ("--memory", "this machine", "900 TiB")),
        (("--buffer-memory", "900TiB"), ("--buffer-memory", "this machine", "900 TiB")),
        (("--buffer-disk", "5"), ("--buffer-disk", "no unit", "5GiB or 5MiB")),
        (("--buffer-disk", "90000TiB"), ("--buffer-disk", "the disk of", "90000 TiB")),
        (("--keep-disk", "90000TiB"), ("--keep-disk", "the disk of", "90000 TiB")),
        (("--model-disk", "90000TiB"), ("--model-disk", "the disk of", "90000 TiB")),
        (("--threads", "9999"), ("--threads", "cores", "9999")),
        (("--threads", "0"), ("--threads",)),
        (("--peer-id", "two words"), ("two words",)),
        (("--peer-id", "x" * 65), ("--peer-id", "64", "65")),
        (("--dtype", "int8"), ("--dtype", "bfloat16")),
        (("--buffer-memory", "much"), ("--buffer-memory", "2GiB", "'much'")),
        (("--buffer-disk", "-1"), ("--buffer-disk", "500MB")),
        (("--buffer-dir", "/dev/null/buffers"), ("--buffer-dir", "--buffer-disk 0")),
    ],
    ids=str,
)
def test_a_peer_that_cannot_serve_is_refused(
    run_here: RunHere, place: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    way = (INSECURE, "--initial-peers", DEAD_PEER)
    line = refused(run_here, place, "serve-stage", *way, *arguments)
    assert all(word in line for word in words), line


def test_a_gpu_that_is_not_there_is_refused(
    run_here: RunHere, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    way = (INSECURE, "--initial-peers", DEAD_PEER)
    line = refused(run_here, place, "serve-stage", *way, "--device", "cuda")
    assert "--device 'cuda'" in line
    assert "cpu" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--host-maddrs", "nonsense"), ("'nonsense'",)),
        (("--announce-maddrs", "nonsense"), ("'nonsense'",)),
        (("--identity-path", "missing/key"), ("missing/key",)),
        (("--identity-path", "good.txt"), ("good.txt", "private key")),
        (("--write-addresses", "missing/addresses"), ("--write-addresses", "missing")),
    ],
    ids=" ".join,
)
def test_a_dht_node_that_cannot_start_is_refused(
    run_here: RunHere, place: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    line = refused(run_here, place, "dht", *arguments)
    assert all(word in line for word in words), line


def test_a_dht_node_cannot_listen_on_a_port_in_use(run_here: RunHere, place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        maddr = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        line = refused(run_here, place, "dht", "--host-maddrs", maddr)
    assert "in use" in line


def test_a_command_that_there_is_not_is_refused(run_here: RunHere, place: Path) -> None:
    assert "frobnicate" in refused(run_here, place, "frobnicate")


def test_a_file_that_the_system_refuses_is_told_in_one_line(run_here: RunHere, place: Path) -> None:
    result = run_here("sample", "good.txt/below-a-file")
    assert result.code == 1
    (line,) = error_lines(result.err)
    assert "good.txt/below-a-file" in line


def test_an_offline_hub_id_is_told_in_one_line(
    run_here: RunHere, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    line = refused(run_here, place, "demo", "--model", "nobody/nothing", "--dataset", "good.txt")
    assert "nobody/nothing" in line
