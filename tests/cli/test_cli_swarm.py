"""Commands as processes that find each other in a real DHT: what their users see, come what may."""

import json
import re
import shlex
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
from transformers import AutoConfig, AutoTokenizer

from swarm_ft.cli.main import run
from swarm_ft.cli.status_text import NO_PEERS
from swarm_ft.client.demo_input import DemoInput, write_demo_input
from swarm_ft.stage.hub_cache import NEWEST
from tests.cli.conftest import RunHere, Shell, Spawned, error_lines, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.xdist_group("swarm")]

SEQ_LENGTH, BATCH_SIZE, NUM_STEPS = 32, 4, 80
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Train(Protocol):
    """See `train`."""

    def __call__(self, name: str, steps: int = ..., model: str = ...) -> tuple[object, ...]: ...


@dataclass
class Swarm:
    """A DHT node, a coordinator and three peers, idle between the tests.

    Attributes:
        dht: how the coordinator finds the DHT.
        port: of the coordinator, which invitations name before it is there.
        peer_way: how peers join.
        client_way: how clients do.
    """

    shell: Shell
    dht: tuple[str, str]
    port: int
    peer_way: str
    client_way: tuple[str, str]
    coordinator: Spawned = field(init=False)
    peers: list[Spawned] = field(default_factory=list)

    @property
    def journal(self) -> tuple[str, Path]:
        return ("--journal", self.shell.cwd / "journal.db")

    def start_coordinator(self) -> None:
        self.coordinator = self.shell.up(
            "coordinator", "--port", self.port, *self.journal, *self.dht
        )

    def add_peer(self, *options: object) -> Spawned:
        return self.shell.spawn("serve-stage", self.peer_way, *options)


def _in_file(shell: Shell, invitation: str) -> str:
    path = shell.cwd / "client invitation.txt"
    path.write_text(invitation)
    return f"@{path}"


@pytest.fixture(scope="module")
def swarm(module_shell: Shell) -> Swarm:
    shell, port = module_shell, free_port()
    journal = ("--journal", shell.cwd / "journal.db")
    assert shell.spawn("init", *journal).ends() == 0
    place = ("--address", f"127.0.0.1:{port}", "--uses", 100, *journal)
    made = Swarm(
        shell,
        dht=("--initial-peers", shell.up("dht").first_words()["addresses"][0]),
        port=port,
        peer_way=shell.invited(*place),
        client_way=("--invite", _in_file(shell, shell.invited("--role", "client", *place))),
    )
    made.start_coordinator()
    made.peers = [made.add_peer("--json") for _ in range(3)]
    for peer in made.peers:
        assert peer.first_words()["layers"] == "auto"
    return made


@pytest.fixture(scope="module")
def text(module_shell: Shell, sample: DemoInput) -> Path:
    """A short file of text; its number of samples is `num_samples(...)`."""
    file = module_shell.cwd / "text.txt"
    with open(sample.train_file, encoding="utf-8") as whole:
        file.write_text(whole.read(1500), encoding="utf-8")
    return file


def num_samples(text: Path, model_dir: str) -> int:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return len(tokenizer(text.read_text(), add_special_tokens=False).input_ids) // SEQ_LENGTH


def job_options(text: Path, steps: int) -> tuple[object, ...]:
    return (
        *("--dataset", text, "--eval-dataset", text, "--steps", steps),
        *("--batch-size", BATCH_SIZE, "--seq-length", SEQ_LENGTH, "--lr", "1e-2"),
    )


@pytest.fixture
def train(swarm: Swarm, sample: DemoInput, text: Path) -> Train:
    """`train("name", steps)`: the arguments of a job whose result and report get that name."""

    def arguments(
        name: str, steps: int = NUM_STEPS, model: str = sample.model_dir
    ) -> tuple[object, ...]:
        return (
            *("client", "train", "--model", model, *job_options(text, steps)),
            *("--out", swarm.shell.cwd / name, "--json", swarm.shell.cwd / f"{name}.json"),
            *swarm.client_way,
        )

    return arguments


@pytest.fixture(scope="module")
def quiet_report(swarm: Swarm, sample: DemoInput, text: Path) -> dict[str, Any]:
    """Return the report of a run without disturbance."""
    out = swarm.shell.cwd / "quiet"
    arguments = ("client", "train", "--model", sample.model_dir, *job_options(text, NUM_STEPS))
    more = ("--out", out, "--json", f"{out}.json", *swarm.client_way)
    assert run([str(argument) for argument in (*arguments, *more)]) == 0
    report: dict[str, Any] = json.loads((swarm.shell.cwd / "quiet.json").read_text())
    return report


def submitted(client: Spawned) -> str:
    """The id of the run that a `client train` submitted."""
    line = client.wait_for("err", "watching run-")
    found = re.search(r"run-[0-9a-f]+", line)
    assert found is not None
    return found[0]


def assert_no_traceback(*processes: Spawned) -> None:
    for process in processes:
        assert "Traceback" not in "\n".join(process.err)


def test_peers_that_leave_the_choice_of_layers_train_together(
    quiet_report: dict[str, Any], sample: DemoInput, text: Path
) -> None:
    assert quiet_report["steps"] == NUM_STEPS
    assert quiet_report["losses"][-1] < 0.8 * quiet_report["losses"][0]
    assert set(quiet_report["bytes"]) == {"1", "2"}


def test_a_second_visit_of_a_sample_sends_a_delta(
    quiet_report: dict[str, Any], sample: DemoInput, text: Path
) -> None:
    distinct = num_samples(text, sample.model_dir)
    assert 0 < distinct < NUM_STEPS
    for boundary in quiet_report["bytes"].values():
        assert boundary["key_frames"] == distinct
        assert boundary["key_frames"] + boundary["delta_frames"] == quiet_report["samples"]


def test_what_happened_and_how_it_learnt_can_be_seen(
    swarm: Swarm, quiet_report: dict[str, Any], run_here: RunHere
) -> None:
    run_id, look = quiet_report["run_id"], ("--json", *swarm.client_way)
    events = [
        json.loads(line) for line in run_here("losses", "--run", run_id, *look).out.splitlines()
    ]
    steps = [one for one in events if "loss" in one]
    assert [one["loss"] for one in steps] == quiet_report["losses"]
    assert [one["step"] for one in steps] == list(range(NUM_STEPS))
    assert [one["step"] for one in events if "eval_loss" in one] == [0, NUM_STEPS]
    rows = run_here("losses", "--run", run_id, "--csv", *swarm.client_way).out.splitlines()
    assert rows[0].startswith("step,loss,learning_rate,grad_norm,seconds,eval_loss")
    assert len(rows) == 1 + NUM_STEPS + 2
    happened = run_here("events", "--run", run_id, *look).out.splitlines()
    kinds = [json.loads(line)["kind"] for line in happened]
    assert kinds[0] == "submitted"
    assert kinds[-1] == "collected"
    assert {"loading", "training", "evaluated", "exporting", "finished"} <= set(kinds)
    status = json.loads(run_here("status", *look).out)
    assert all(peer["device"] == "cpu" and peer["version"] for peer in status["peers"])
    assert all(peer["given"]["steps"] >= NUM_STEPS for peer in status["peers"])
    (run,) = [run for run in status["runs"] if run["run"] == run_id]
    assert run["last_step"]["loss"] == quiet_report["losses"][-1]
    assert run["bytes_saved"] > 0
    drawn = run_here("top", "--once", "--run", run_id, *swarm.client_way).out
    assert f"{run_id}  collected  step {NUM_STEPS}/{NUM_STEPS}  100%  █" in drawn
    assert "\nevents\n" in drawn
    following = swarm.shell.spawn("events", "--follow", "--since", 0, *look)
    following.wait_for("out", "collected")
    assert following.interrupted() == 0
    unknown = run_here("losses", "--run", "run-of-nobody", *swarm.client_way)
    assert (unknown.code, "expected one of your runs" in unknown.err) == (1, True)


def test_a_killed_coordinator_and_a_client_that_left_change_nothing(
    swarm: Swarm, train: Train, quiet_report: dict[str, Any], run_here: RunHere
) -> None:
    trace = swarm.shell.cwd / "trace.json"
    client = swarm.shell.spawn(*train("detached"), "--trace", trace)
    client.wait_for("err", f"step {NUM_STEPS // 10}/{NUM_STEPS}")
    swarm.coordinator.signal(signal.SIGKILL)
    client.wait_for("err", "waiting for the coordinator")
    assert client.interrupted() == 0
    assert_no_traceback(client)
    assert json.loads(trace.read_text()), "a client that leaves closes its trace"
    swarm.start_coordinator()
    assert "detached; the run goes on" in client.out[0]
    command = shlex.split(client.out[1])
    assert command[0] == "swarm-ft"
    out = swarm.shell.cwd / "attached"
    result = run_here(*command[1:], "--out", out, "--json", f"{out}.json", "--trace", trace)
    assert result.code == 0, result.err
    json.loads(trace.read_text())
    report = json.loads((swarm.shell.cwd / "attached.json").read_text())
    assert report["losses"] == pytest.approx(quiet_report["losses"], rel=1e-6)
    assert report["steps"] == NUM_STEPS
    assert report["eval"] == pytest.approx(quiet_report["eval"], rel=1e-6)
    again = run_here(*command[1:])
    assert again.code == 1
    assert "fetched already" in again.err


def test_a_plan_says_what_a_job_would_take_and_begins_nothing(
    swarm: Swarm, sample: DemoInput, run_here: RunHere
) -> None:
    command = ("plan", "--model", sample.model_dir, "--seq-length", SEQ_LENGTH, *swarm.client_way)
    look = ("status", "--json", *swarm.client_way)
    before = json.loads(run_here(*look).out)
    planned = json.loads(run_here(*command, "--json").out)
    assert [stage["layers"] for stage in planned["stages"]] == ["0-1", "1-2", "2-3"]
    assert planned["seconds"] > 0
    memory = [stage["memory"] for stage in planned["stages"]]
    assert [of["microbatches"] for of in memory] == [4, 3, 1]
    for of in memory:
        microbatches = of["microbatches"] * of["microbatch"]
        assert of["total"] == of["static"] + microbatches + of["temporaries"]
    # Links are measured one after the other, and may be so still.
    assert "3 of 3 peers did not report their power draw (--watts)" in planned["unknown"]
    words = run_here(*command).out
    assert "; slowest: " in words
    assert re.search(r"4 microbatches of [\d.]+ [KM]iB, temporaries [\d.]+ [KM]iB", words)
    after = json.loads(run_here(*look).out)
    assert (after["runs"], after["next_event"]) == (before["runs"], before["next_event"])


def test_a_run_under_way_can_be_looked_at_joined_only_where_it_fits_and_cancelled(
    swarm: Swarm, train: Train, run_here: RunHere, tmp_path: Path
) -> None:
    client = swarm.shell.spawn(*train("endless", steps=1_000_000))
    run_id = submitted(client)
    client.wait_for("err", "step 1/")
    for layers, words in (("2-9", "outside the model"), ("0-2", "match no stage")):
        idler = swarm.add_peer("--layers", layers, "--json")
        name = idler.first_words()["peer"]
        idler.wait_for("err", "this peer waits for other runs")
        assert words in idler.err[-1]
        peers = json.loads(run_here("status", "--json", *swarm.client_way).out)["peers"]
        assert [words in peer["idle"] for peer in peers if peer["peer"] == name] == [True]
        assert idler.interrupted() == 0
        assert_no_traceback(idler)
    write_demo_input(tmp_path, seed=2, num_layers=3, hidden_size=32, vocab_size=300)
    attach = ("client", "attach", "--model", tmp_path / "model", "--out", tmp_path / "out")
    mismatch = run_here(*attach, *swarm.client_way)
    assert mismatch.code == 2
    assert run_id in mismatch.err.splitlines()[-1]
    shown = json.loads(run_here("status", "--json", *swarm.client_way).out)
    names = {peer.first_words()["peer"] for peer in swarm.peers}
    assert {peer["peer"] for peer in shown["peers"]} == names
    newest = shown["runs"][-1]
    assert (newest["run"], newest["phase"]) == (run_id, "training")
    assert sorted(stage["layers"] for stage in newest["stages"]) == ["0-1", "1-2", "2-3"]
    status = run_here("status", *swarm.client_way).out
    assert re.search(rf"^{run_id} +\d+/[\d,]+ +training, ", status, re.MULTILINE)
    status = run_here("status", "--verbose", *swarm.client_way).out
    assert re.search(rf"^{run_id}  step \d+/\d+  training", status, re.MULTILINE)
    cancelled = run_here("client", "cancel", "--run", run_id, *swarm.client_way)
    assert (cancelled.code, cancelled.out.split()[1]) == (0, "cancelled")
    assert client.ends() == 1
    assert "cancelled" in client.err[-1]
    assert not (swarm.shell.cwd / "endless").exists()


def test_commands_about_runs_that_are_not_there_fail_in_one_line(
    swarm: Swarm, quiet_report: dict[str, Any], run_here: RunHere
) -> None:
    for command in ("attach", "cancel"):
        result = run_here("client", command, "--run", "run-none", *swarm.client_way)
        assert result.code == 1
        (line,) = error_lines(result.err)
        assert "run-none" in line
        assert quiet_report["run_id"] in line, "it names those there are"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "./missing"), ("./missing", "no such directory")),
        (("--dataset", "missing.txt"), ("missing.txt", "no such file")),
        (("--seq-length", "257"), ("--seq-length 257", "256 positions")),
        (("--tied-embeddings", "sync"), ("--tied-embeddings sync", "untied")),
    ],
    ids=str,
)
def test_a_job_that_cannot_be_done_is_not_submitted(
    swarm: Swarm,
    train: Train,
    run_here: RunHere,
    arguments: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    result = run_here(*train("refused"), *arguments)
    assert result.code == 2
    (line,) = error_lines(result.err)
    assert all(word in line for word in words)
    assert not (swarm.shell.cwd / "refused").exists()


def test_a_port_in_use_is_refused(swarm: Swarm, run_here: RunHere) -> None:
    port = swarm.coordinator.first_words()["endpoint"].rpartition(":")[2]
    for command in (("coordinator", "--insecure"), ("serve-stage", swarm.peer_way)):
        result = run_here(*command, "--port", port, *swarm.dht)
        assert result.code == 2
        assert f":{port}: the port is taken" in result.err.splitlines()[-1]


def test_a_journal_in_use_is_refused(swarm: Swarm, run_here: RunHere) -> None:
    result = run_here("coordinator", *swarm.journal, *swarm.dht)
    assert result.code == 2
    (line,) = error_lines(result.err)
    assert "another coordinator" in line


def untied_lines(swarm: Swarm) -> list[str]:
    return [line for peer in swarm.peers for line in peer.err if "embeddings-untied" in line]


@pytest.mark.parametrize("choice", ["untie", "sync"])
def test_tied_embeddings_are_untied_or_kept_tied(
    swarm: Swarm,
    train: Train,
    run_here: RunHere,
    tmp_path_factory: pytest.TempPathFactory,
    choice: str,
) -> None:
    tied = write_demo_input(
        tmp_path_factory.mktemp("tied"),
        seed=1,
        num_layers=3,
        hidden_size=32,
        vocab_size=300,
        tied_embeddings=True,
    )
    name, lines_before = f"tied-{choice}", len(untied_lines(swarm))
    result = run_here(*train(name, steps=12, model=tied.model_dir), *("--tied-embeddings", choice))
    assert result.code == 0, result.err
    exported = AutoConfig.from_pretrained(swarm.shell.cwd / name)
    assert exported.tie_word_embeddings is (choice == "sync")
    assert ("trains them separately" in result.err) is (choice == "untie")
    assert (len(untied_lines(swarm)) > lines_before) is (choice == "untie")
    report = json.loads((swarm.shell.cwd / f"{name}.json").read_text())
    assert report["eval"]["loss"] < report["eval_before"]["loss"]


def test_a_hub_id_is_found_in_the_cache_of_the_client_and_in_those_of_the_peers(
    swarm: Swarm, train: Train, sample: DemoInput
) -> None:
    cached = swarm.shell.cwd / "hf" / "hub" / "models--tiny--gpt2"
    shutil.copytree(sample.model_dir, cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    sizes = {path.name: path.stat().st_size for path in Path(sample.model_dir).iterdir()}
    homes = list((swarm.shell.cwd / "cache" / "swarm-ft" / "peers").iterdir())
    assert homes
    for home in homes:
        fetched = home / "models" / "tiny--gpt2"
        shutil.copytree(sample.model_dir, fetched / COMMIT)
        (fetched / NEWEST).write_text(json.dumps({"commit": COMMIT, "sizes": sizes}))
    client = swarm.shell.spawn(*train("from-hub", steps=8, model="tiny/gpt2"))
    assert client.ends() == 0, client.err
    assert (swarm.shell.cwd / "from-hub" / "model.safetensors.index.json").exists()


def test_a_coordinator_alone_is_a_swarm_that_others_join_by_the_announced_name(
    shell: Shell, run_here: RunHere
) -> None:
    listening = ("--host", "0.0.0.0", "--announce", "localhost")
    assert shell.spawn("init").ends() == 0
    port = free_port()
    word = shell.invited("--role", "client", "--address", f"localhost:{port}")
    words = shell.up("coordinator", *listening, "--port", port).first_words()
    assert words["endpoint"] == f"localhost:{port}"
    (address,) = words["addresses"]
    assert address.startswith("/dns/localhost/tcp/")
    result = run_here("status", "--verbose", "--invite", word)
    assert result.code == 0
    first, second = result.out.splitlines()
    assert first == NO_PEERS
    assert second.startswith("relay of the coordinator at localhost:")


@pytest.mark.variant
def test_without_keys_a_stage_waits_for_the_right_peer_and_everybody_leaves_cleanly(
    shell: Shell, sample: DemoInput, text: Path
) -> None:
    address = (dht := shell.up("dht")).first_words()["addresses"][0]
    join = ("--insecure", "--initial-peers", address, "--dht-prefix", "careful")
    job = ("client", "train", "--model", sample.model_dir, *job_options(text, 20), *join)
    coordinator = shell.spawn("coordinator", "--keepers", 0, *join)
    first = shell.spawn("serve-stage", "--layers", "0-1", *join)
    second = shell.spawn("serve-stage", "--layers", "1-2", "--leave-timeout", 1, *join)
    client = shell.spawn(*job)
    client.wait_for("err", "waiting: layers 2-3")
    endless = shell.spawn(*job, "--steps", "1000000", "--out", "second")  # is queued

    other = write_demo_input(
        shell.cwd / "other", seed=2, num_layers=3, hidden_size=32, vocab_size=300
    )
    wrong = shell.spawn("serve-stage", "--layers", "2-3", "--model", other.model_dir, *join)
    words = wrong.wait_for("err", "this peer waits for other runs")
    assert "the model differs in its" in words
    assert "digest" not in words
    assert other.model_dir not in words

    shutil.copytree(sample.model_dir, shell.cwd / "copy")
    right = shell.spawn("serve-stage", "--layers", "2-3", "--model", shell.cwd / "copy", *join)
    assert client.ends() == 0, client.err

    endless.wait_for("err", "step 1/")
    assert second.interrupted() == 0
    assert any("no peer can take over, and no snapshots are kept" in line for line in second.err)
    coordinator.wait_for("err", "waiting: layers 1-2")
    endless.wait_for("err", "waiting: layers 1-2")
    for process in (endless, first, right, wrong, coordinator, dht):
        assert process.interrupted() == 0, process.err
    assert_no_traceback(second, first, right, wrong, coordinator, dht, client, endless)
    assert shell.all_gone(), shell.alive()


def test_a_result_that_nobody_fetched_outlives_one_ctrl_c_but_not_two(
    swarm: Swarm, train: Train
) -> None:
    client = swarm.shell.spawn(*train("never-fetched", steps=NUM_STEPS))
    run_id = submitted(client)
    assert client.interrupted() == 0
    swarm.coordinator.wait_for("err", f"run {run_id}: finished")
    peer = swarm.peers.pop()
    peer.signal(signal.SIGINT)
    peer.wait_for("err", "its client has not fetched the result of layers")
    assert peer.interrupted() == 130
    assert set(json.loads(peer.out[-1])) == {"gave"}, "the farewell is the last line"
    assert peer.err[-1] == "leaving at once"
    assert_no_traceback(peer)


@pytest.mark.variant
def test_a_job_in_a_file_trains_and_says_what_came_of_it(
    swarm: Swarm, sample: DemoInput, text: Path
) -> None:
    job, out = swarm.shell.cwd / "job.yaml", swarm.shell.cwd / "by-file"
    job.write_text(
        f"""
base_model: {sample.model_dir}
datasets: [{{path: {text}, type: completion}}]
sequence_len: {SEQ_LENGTH}
micro_batch_size: 2
gradient_accumulation_steps: 2
max_steps: 80
learning_rate: 1e-2
report_to: [csv]
output_dir: {out}
invite: "{swarm.client_way[1]}"
"""
    )
    client = swarm.shell.spawn("client", "train", job, "--steps", 3)
    assert client.ends() == 0, client.err
    (metrics,) = out.with_name("by-file-runs").glob("run-*/metrics.csv")
    assert [line.split(",")[0] for line in metrics.read_text().split()] == [
        *("step", "0", "1", "2", "3", "3")
    ]
    card = (out / "README.md").read_text()
    assert "| steps | 3 of 4 samples |" in card
    assert AutoConfig.from_pretrained(out).model_type == "gpt2"
