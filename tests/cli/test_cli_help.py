"""`--help` is instant, and the options are those that were promised."""

import json
import resource
import subprocess
import sys

import click
import pytest

from swarm_ft.api.listen_options import ListenOptions
from swarm_ft.cli.help_groups import GROUPS, OTHERS, RARE, name_of
from swarm_ft.cli.main import cli
from tests.cli.conftest import RunHere

COMMANDS = (
    (),
    ("demo",),
    ("serve-stage",),
    ("peer",),
    ("peer", "pause"),
    ("doctor",),
    ("plan",),
    ("backup",),
    ("relay",),
    ("client",),
    ("client", "preview"),
    ("client", "train"),
    ("client", "attach"),
    ("client", "generate"),
    ("client", "cancel"),
    ("coordinator",),
    ("dht",),
    ("status",),
    ("top",),
    ("events",),
    ("losses",),
    ("replay",),
    ("bench",),
    ("bench", "codec"),
    ("sample",),
)
HEAVY = {"torch", "grpc", "hivemind", "transformers", "safetensors", "sqlite3", "rich", "numpy"}
HEAVY |= {
    "datasets",
    "pyarrow",
    "pandas",
    "jinja2",
    "peft",
    "accelerate",
    "aiohttp",
    "prometheus_client",
}
HELP_CPU_S = 0.5
INITIAL_PEER = "/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"

READING = {
    "--data-format",
    "--subset",
    "--text-column",
    "--label-column",
    "--column",
    "--template",
    "--remove-columns",
    "--column-names",
    "--delimiter",
    "--field",
    "--quotes",
    "--no-quotes",
    "--separator",
    "--packing",
    "--no-packing",
    "--packing-strategy",
    "--truncation",
    "--completion-only-loss",
    "--no-completion-only-loss",
    "--assistant-only-loss",
    "--no-assistant-only-loss",
}
OUTPUTS = {
    "--out",
    "--json",
    "--trace",
    "--report-to",
    "--logging-dir",
    "--push-to-hub",
    "--hub-private-repo",
    "--no-hub-private-repo",
}
JOB = (
    READING
    | OUTPUTS
    | {
        "--model",
        "--dataset",
        "--split",
        "--probabilities",
        "--stopping-strategy",
        "--max-samples",
        "--eval-dataset",
        "--eval-split",
        "--eval-size",
        "--max-eval-samples",
        "--eval-strategy",
        "--eval-steps",
        "--eval-compression",
        "--epochs",
        "--steps",
        "--task",
        "--labels",
        "--batch-size",
        "--micro-batch-size",
        "--seq-length",
        "--lr",
        "--lr-schedule",
        "--warmup-steps",
        "--warmup-ratio",
        "--evals-per-epoch",
        "--saves-per-epoch",
        "--weight-decay",
        "--clip-grad-norm",
        "--optim",
        "--gradient-checkpointing",
        "--no-gradient-checkpointing",
        "--seed",
        "--shuffle",
        "--no-shuffle",
        "--dropout",
        "--no-dropout",
        "--adapter",
        "--lora-r",
        "--lora-alpha",
        "--lora-dropout",
        "--target-modules",
        "--lora-target-modules",
        "--merge",
        "--no-merge",
        "--base-dtype",
        "--dtype",
        "--load-in-8bit",
        "--no-load-in-8bit",
        "--load-in-4bit",
        "--no-load-in-4bit",
        "--train-layers",
        "--tied-embeddings",
        "--quality",
        "--fw",
        "--forward-codec",
        "--bw",
        "--backward-codec",
        "--key",
        "--key-codec",
        "--dp",
        "--replica-codec",
        "--fill",
        "--first-codec",
        "--fill-microbatches",
        "--drain",
        "--last-codec",
        "--drain-microbatches",
        "--frozen",
        "--frozen-codec",
        "--router-aux-loss-coef",
        "--buffer-bits",
        "--save-steps",
        "--save-strategy",
        "--save-total-limit",
        "--early-stopping-patience",
        "--early-stopping-threshold",
        "--metric-for-best-model",
        "--load-best-model-at-end",
        "--no-load-best-model-at-end",
        "--private-ends",
        "--share-with",
        "--resume",
        "--priority",
        "--out",
        "--json",
        "--trace",
    }
)
OF_DATA = {"--dataset", "--split", "--max-samples", "--eval-dataset", "--eval-split"}
OF_DATA |= {
    "--probabilities",
    "--stopping-strategy",
    "--eval-size",
    "--warmup-ratio",
    "--evals-per-epoch",
    "--saves-per-epoch",
}
OF_DATA |= {"--max-eval-samples", "--resume", "--priority", "--out", "--trace"}
DHT = {"--initial-peers", "--dht-prefix", "--log-level"}
SWARM = DHT | {"--invite", "--insecure"}
LOOKING = SWARM | {"--coordinator"}
KEYS = {"--journal", "--json", "--log-level"}
LISTENING = {"--host", "--port", "--announce"}
BUFFERS = {"--buffer-memory", "--buffer-disk", "--buffer-dir", "--buffer-days"}
OPTIONS = {
    ("demo",): JOB | BUFFERS | {"--stages", "--replicas", "--log-level", "--help-all"},
    ("client", "train"): JOB | SWARM | {"--detach", "--print-config", "--help-all"},
    ("client", "preview"): JOB
    | SWARM
    | {"--detach", "--print-config", "--show", "--json", "--help-all"},
    ("client", "attach"): SWARM | OUTPUTS | {"--run", "--model"},
    ("client", "generate"): SWARM
    | {"--prompt-file", "--run", "--model", "--json", "--chat", "--max-new-tokens", "--do-sample"}
    | {"--no-do-sample", "--temperature", "--top-k", "--top-p", "--seed"},
    ("client", "cancel"): SWARM | {"--run"},
    ("plan",): SWARM
    | (JOB - READING - OF_DATA - OUTPUTS)
    | {"--num-samples", "--num-eval-samples", "--json", "--help-all"},
    ("serve-stage",): DHT
    | LISTENING
    | BUFFERS
    | {
        "--insecure",
        "--layers",
        "--device",
        "--dtype",
        "--model",
        "--models",
        "--allow-models",
        "--model-disk",
        "--memory",
        "--threads",
        "--watts",
        "--name",
        "--peer-id",
        "--snapshots",
        "--encrypt-at-rest",
        "--json",
    }
    | {"--hours", "--pause-when", "--upload-mbps", "--download-mbps", "--monthly-gb"}
    | {"--leave-timeout", "--log-format", "--keep-disk", "--max-stages"},
    ("peer", "pause"): {"--buffer-dir", "--json"},
    ("peer", "resume"): {"--buffer-dir", "--json"},
    ("peer", "drain"): {"--buffer-dir", "--json"},
    ("peer", "status"): {"--buffer-dir", "--json"},
    ("init",): KEYS,
    ("invite",): KEYS
    | {
        "--role",
        "--sees-tokens",
        "--layers",
        "--weight",
        "--uses",
        "--note",
        "--expires",
        "--address",
        "--open",
    },
    ("relay",): LISTENING
    | {"--max-links", "--max-mbps", "--max-link-mbps", "--json", "--log-level", "--log-format"},
    ("keys", "list"): KEYS,
    ("doctor",): {"--json", "--log-level"},
    ("keys", "revoke"): KEYS - {"--json"},
    ("keys", "rotate"): KEYS | {"--authority"},
    ("coordinator",): DHT
    | LISTENING
    | {"--insecure", "--journal", "--queue-hours", "--snapshots", "--open", "--json"}
    | {"--encrypt-at-rest", "--relay", "--no-relay", "--page", "--no-page", "--metrics"}
    | {"--max-queued-per-client", "--max-job-size", "--max-data-per-client", "--max-data"}
    | {"--result-hours", "--recording-size", "--log-format", "--keepers", "--moves"}
    | {"--no-moves"},
    ("dht",): {
        "--initial-peers",
        "--host-maddrs",
        "--announce-maddrs",
        "--identity-path",
        "--write-addresses",
        "--json",
        "--log-level",
        "--log-format",
    },
    ("status",): LOOKING | {"--json", "--watch", "--verbose"},
    ("top",): LOOKING | {"--once", "--run"},
    ("events",): LOOKING | {"--json", "--follow", "--since", "--run"},
    ("losses",): LOOKING | {"--json", "--csv", "--follow", "--run"},
    ("replay",): {"--at", "--at-time", "--run", "--what-if", "--trace", "--page", "--json"}
    | {"--encrypt-at-rest", "--log-level"},
    ("bench", "codec"): {"--codecs", "--shapes", "--repeats", "--reference", "--json"},
    ("sample",): {"--seed", "--json"},
}


def cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def command_of(words: tuple[str, ...]) -> click.Command:
    command: click.Command | None = cli
    context = click.Context(cli)
    for word in words:
        assert isinstance(command, click.Group)
        command = command.get_command(context, word)
    assert command is not None
    return command


def option_of(words: tuple[str, ...], name: str) -> click.Option:
    options = [p for p in command_of(words).params if isinstance(p, click.Option)]
    return next(p for p in options if name in (*p.opts, *p.secondary_opts))


def choices_of(words: tuple[str, ...], name: str) -> list[str]:
    kind = option_of(words, name).type
    assert isinstance(kind, click.Choice)
    return list(kind.choices)


@pytest.mark.parametrize("words", OPTIONS, ids=" ".join)
def test_a_command_has_the_options_it_is_known_for_and_no_others(words: tuple[str, ...]) -> None:
    options = [p for p in command_of(words).params if isinstance(p, click.Option)]
    assert {name for p in options for name in (*p.opts, *p.secondary_opts)} == OPTIONS[words]
    assert all(option.help for option in options), "every option says what it is for"


def test_options_may_be_written_with_underscores(run_here: RunHere) -> None:
    for option in ("--lora-r", "--lora_r"):
        answer = run_here("plan", "--model", "nowhere", option, "0")
        assert answer.code == 2
        assert "--lora-r: expected 1 to" in answer.err


@pytest.mark.parametrize("words", [("client", "train"), ("plan",), ("demo",)], ids=" ".join)
def test_help_of_a_job_has_groups_and_help_all_has_the_codecs(
    run_here: RunHere, words: tuple[str, ...]
) -> None:
    short, whole = (run_here(*words, flag) for flag in ("--help", "--help-all"))
    assert (short.code, whole.code) == (0, 0)
    titles = [line for line in short.out.splitlines() if line in {f"{one}:" for one in GROUPS}]
    assert titles == [f"{one}:" for one in GROUPS]
    assert OTHERS not in whole.out, "each option has a group"
    assert "\n  --fw, " in short.out
    assert "--help-all shows" in short.out
    for flag in ("--fill,", "--drain,", "--buffer-bits "):
        assert (f"\n  {flag}" in short.out, f"\n  {flag}" in whole.out) == (False, True)
    options = [p for p in command_of(words).params if isinstance(p, click.Option)]
    shown = [name for p in options for name in p.opts if f"{name}" in whole.out]
    assert set(shown) == {name for p in options for name in p.opts}


@pytest.mark.parametrize("words", [(), ("client",), ("peer",), ("keys",), ("bench",)], ids=str)
def test_lists_of_commands_have_whole_sentences(run_here: RunHere, words: tuple[str, ...]) -> None:
    title = "Commands:" if words else "Start:"
    listed = run_here(*words, "--help").out.partition(title)[2].partition("Examples:")[0]
    assert listed
    assert "..." not in listed


def test_commands_are_listed_in_groups_each_once_and_in_one_line(run_here: RunHere) -> None:
    listed = run_here("--help").out.partition("\nStart:\n")[2].partition("Examples:")[0]
    lines = [line for line in f"Start:\n{listed}".splitlines() if line.strip()]
    titles = [line for line in lines if not line.startswith(" ")]
    assert titles == ["Start:", "Take part:", "Train:", "Watch:", "Run a swarm:", "Tools:"]
    names = [line.split()[0] for line in lines if line.startswith("  ")]
    assert isinstance(cli, click.Group)
    assert names == cli.list_commands(click.Context(cli))
    assert len(set(names)) == len(names)


def test_no_group_names_an_option_that_there_is_not() -> None:
    commands = map(command_of, OPTIONS)
    options = {name_of(p) for command in commands for p in command.params}
    grouped = {name for names in GROUPS.values() for name in names.split()}
    assert grouped - options == {"help"}
    assert grouped >= RARE


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (["serve-stag"], "no such command 'serve-stag'; did you mean 'serve-stage'?"),
        (["Serve_Stage"], "no such command 'Serve_Stage'; did you mean 'serve-stage'?"),
        (["client", "tarin"], "no such command 'tarin'; did you mean 'train'?"),
        (["peer", "resum"], "no such command 'resum'; did you mean 'resume'?"),
        (["keys", "revok"], "no such command 'revok'; did you mean 'revoke'?"),
        (["bench", "xyz"], "no such command 'xyz'; expected codec"),
    ],
)
def test_a_mistyped_command_is_suggested(run_here: RunHere, typed: list[str], hint: str) -> None:
    answer = run_here(*typed)
    assert answer.code == 2
    assert hint in answer.err


def test_demo_and_client_train_take_the_same_job() -> None:
    for name in JOB - {"--model", "--dataset"}:
        one, other = (option_of(words, name) for words in (("demo",), ("client", "train")))
        assert (one.default, one.type.name) == (other.default, other.type.name), name


def test_the_defaults_of_a_job() -> None:
    names = ("--fw", "--bw", "--key", "--dp", "--buffer-bits", "--epochs")
    defaults = {name: option_of(("demo",), name).default for name in names}
    codecs = {"--fw": "aq3+z", "--bw": "q3+z", "--key": "q4+z", "--dp": "none"}
    assert defaults == {**codecs, "--buffer-bits": "16", "--epochs": 3}
    assert option_of(("demo",), "--shuffle").default is False
    assert choices_of(("demo",), "--lr-schedule") == [
        "constant",
        "linear",
        "cosine",
    ]
    assert choices_of(("serve-stage",), "--dtype") == ["float32", "bfloat16"]


def test_listeners_stay_on_this_machine_unless_told_otherwise() -> None:
    assert ListenOptions().address == "127.0.0.1"
    assert option_of(("dht",), "--host-maddrs").default == ("/ip4/127.0.0.1/tcp/0",)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_comes_at_once_and_imports_nothing_heavy(words: tuple[str, ...]) -> None:
    script = (
        "import json, sys; from swarm_ft.cli.main import run; "
        f"code = run({[*words, '--help']!r}); "
        "print(json.dumps([code, sorted({m.partition('.')[0] for m in sys.modules})]))"
    )
    began_s = cpu_seconds_of_children()
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    spent_s = cpu_seconds_of_children() - began_s  # however busy the machine is
    *shown, last = done.stdout.splitlines()
    code, modules = json.loads(last)
    assert code == 0
    assert shown[0].startswith("Usage: swarm-ft")
    assert "\b" not in done.stdout
    assert "\\b" not in done.stdout
    assert not HEAVY & set(modules)
    assert spent_s < HELP_CPU_S


def test_examples_stand_in_help_line_by_line(run_here: RunHere) -> None:
    lines = run_here("serve-stage", "--help").out.splitlines()
    start = lines.index("  Examples:")
    assert lines[start + 1].startswith("    swarm-ft serve-stage @invitation.txt")
    assert lines[start + 3].startswith("    swarm-ft serve-stage --insecure --initial-peers")


@pytest.mark.parametrize(("words", "title"), [((), "Start:"), (("client",), "Commands:")], ids=str)
def test_a_group_without_a_command_shows_its_help_and_fails(
    run_here: RunHere, words: tuple[str, ...], title: str
) -> None:
    result = run_here(*words)
    assert result.code == 2
    assert title in result.err


def test_the_version_is_told(run_here: RunHere) -> None:
    assert run_here("--version").out.startswith("swarm-ft, version ")


@pytest.mark.parametrize("command", ["status", "events", "losses", "top"])
def test_looking_at_a_swarm_loads_nothing_heavy(command: str) -> None:
    code = (
        "import sys; from swarm_ft.cli.main import run; "
        f"run(['{command}', '--insecure', '--coordinator', '127.0.0.1:1']); "
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "grpc" in loaded, "it did try"
    assert not loaded & (HEAVY - {"grpc", "rich"})


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (("serve-stage", "--hours", "25-7"), "--hours 25-7: expected START-STOP of a day"),
        (("serve-stage", "--layers", "7"), "layers '7': expected START-STOP"),
        (("serve-stage", "--device", "gpu"), "--device 'gpu': expected auto, cpu, cuda"),
        (("serve-stage", "--allow-models", "a b"), "--allow-models: expected ORG/NAME"),
        (("serve-stage", "--pause-when", "asleep"), "'asleep' is not one of"),
        (("serve-stage", "--keep-disk", "much"), "expected a size such as 2GiB"),
        (("serve-stage", "--models", "/nowhere"), "--models /nowhere: expected a directory, got a"),
        (("client", "train", "--model", "./nowhere", "--dataset", "a.txt"), "no such directory"),
        (("client", "train", "--model", "gpt2", "--dataset", "nowhere.txt"), "no such file"),
        (("client", "preview", "--model", "gpt2", "--dataset", "./nowhere"), "no such file"),
        (("plan", "--model", "./nowhere"), "no such directory"),
    ],
)
def test_what_was_typed_is_checked_before_torch_is_imported(
    typed: tuple[str, ...], words: str
) -> None:
    way = () if "preview" in typed else ("--insecure", "--initial-peers", INITIAL_PEER)
    code = (
        "import sys; from swarm_ft.cli.main import run; "
        f"print(run({[*typed, *way]!r})); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    result, modules = done.stdout.splitlines()
    assert result == "2"
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not {"torch", "transformers", "hivemind"} & set(modules.split())


@pytest.mark.thorough
def test_a_peer_without_a_run_imports_what_it_uses() -> None:
    code = (
        "import sys; from swarm_ft.cli.running import load; "
        "from swarm_ft.cli.serve_stage import PEER_MODULES; load(*PEER_MODULES); "
        "import swarm_ft.api.peer_process; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert {"torch", "swarm_ft.peer.node", "hivemind.dht.node"} <= modules
    of_clients = {"datasets", "pandas", "pyarrow", "sklearn", "peft", "accelerate", "jinja2"}
    of_runs = {"transformers", "scipy", "numba", "torch._dynamo", "hivemind.optim"}
    assert not modules & (of_clients | of_runs)


@pytest.mark.thorough
def test_a_command_imports_no_scipy_with_a_run_either() -> None:
    code = (
        "import sys, importlib; from swarm_ft.cli import main; "
        "sys.argv = ['swarm-ft', '--version']; "
        "main.sys.exit = lambda code: None; main.main(); "
        "importlib.import_module('swarm_ft.stage.engine'); "
        "importlib.import_module('transformers.models.gpt2.modeling_gpt2'); "
        "import swarm_ft.discovery.hivemind_parts, numba; "
        "print(*(name for name, found in sys.modules.items() if found is not None))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert {"transformers.modeling_utils", "numba"} <= modules
    assert {"scipy", "sklearn"} & modules in (set(), {"scipy", "sklearn"})


def test_the_first_line_comes_before_the_libraries() -> None:
    code = (
        "import sys, click; from swarm_ft.cli import running; "
        "running.click.echo = lambda words, err: print(words, 'torch' in sys.modules); "
        "running.load = lambda *modules: sys.exit(); "
        "from swarm_ft.cli.main import run; "
        f"run(['serve-stage', '--insecure', '--initial-peers', '{INITIAL_PEER}'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "starting the peer; libraries take some seconds to load False\n"


@pytest.mark.thorough
def test_libraries_that_were_loaded_end_without_a_word() -> None:
    """Triton's bindings once reported leaks of frozen objects on standard error at the exit."""
    code = "from swarm_ft.cli.running import load; load('swarm_ft.stage.engine')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
