"""Options from files: a job's own, and the user's defaults."""

from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import RunHere


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "swarm-ft.toml"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text("base_model: a\ndataset: b\nlearning_rate: 1e-3\neval_strategy: no\n")
    return path


def test_options_override_the_file_which_overrides_the_users_defaults(
    run_here: RunHere, config: Path, job: Path
) -> None:
    config.write_text("[client.train]\nlr = 1e-5\nepochs = 7\nlora-r = 4\nquotes = false\n")
    shown = run_here("client", "train", job, "--epochs", "2", "--print-config")
    assert shown.code == 0
    found = yaml.safe_load(shown.out)
    assert (found["learning_rate"], found["num_epochs"], found["lora_r"]) == (1e-3, 2, 4)
    assert (found["quotes"], found["eval_strategy"]) == (False, "no")
    job.write_text(shown.out)
    assert run_here("client", "train", job, "--print-config").out == shown.out


def test_an_option_that_is_given_several_times_may_be_one_text_or_a_list(
    run_here: RunHere, config: Path, job: Path
) -> None:
    config.write_text('[client.train]\ndataset = "notes.txt"\nmodel = "a"\n')
    by_default = run_here("client", "train", "--print-config")
    assert yaml.safe_load(by_default.out)["datasets"] == [{"path": "notes.txt"}]
    job.write_text("base_model: a\ndatasets: [{path: b}, {path: c}]\ncolumn: [text=x, id=y]\n")
    of_file = run_here("client", "train", job, "--print-config")
    found = yaml.safe_load(of_file.out)
    assert (found["datasets"], found["column"]) == (
        [{"path": "b"}, {"path": "c"}],
        ["text=x", "id=y"],
    )
    words = ("--dataset", "d", "--dataset", "e")
    printed = run_here("client", "train", job, *words, "--print-config")
    assert yaml.safe_load(printed.out)["datasets"] == [{"path": "d"}, {"path": "e"}]


def test_a_job_may_say_its_way_in(run_here: RunHere, job: Path) -> None:
    job.write_text(f"{job.read_text()}invite: swarm1nonsense\n")
    done = run_here("client", "train", job)
    assert (done.code, "invitation:" in done.err) == (2, True)


def test_a_key_that_there_is_not_is_named_with_the_nearest(run_here: RunHere, job: Path) -> None:
    job.write_text(f"{job.read_text()}epoch: 3\n")
    done = run_here("client", "train", job)
    assert done.code == 2
    assert done.err == (f"swarm-ft: {job}: epoch: no such key; did you mean 'epochs'?\n")


def test_defaults_are_for_every_command(run_here: RunHere, config: Path) -> None:
    config.write_text("[bench.codec]\ncodecs = 'zebra'\n[serve_stage]\nlayers = 'none'\n")
    assert "zebra" in run_here("bench", "codec").err
    assert (
        "layers 'none'"
        in run_here(
            "serve-stage", "--insecure", "--initial-peers", "/ip4/127.0.0.1/tcp/1/p2p/Q"
        ).err
    )


def test_a_preview_has_the_defaults_of_its_job(run_here: RunHere, config: Path, job: Path) -> None:
    config.write_text(
        "[client.train]\nseq-length = 99\nlora-r = 4\ninvite = '@nowhere'\njson = 'report.json'\n"
        "[client.preview]\nlora-r = 5\nshow = 1\n"
    )
    shown = yaml.safe_load(run_here("client", "preview", job, "--print-config").out)
    assert (shown["sequence_len"], shown["lora_r"]) == (99, 5)


def test_notes_of_a_job_are_on_standard_error(run_here: RunHere, job: Path) -> None:
    job.write_text(f"{job.read_text()}logging_steps: 1\n")
    shown = run_here("client", "train", job, "--print-config")
    assert f"{job}: logging_steps: no effect on the result here" in shown.err
    words = "not set, and with a default that differs from axolotl's: num_epochs (1 there, 3 here)"
    assert words in shown.err
    assert yaml.safe_load(shown.out)["base_model"] == "a"


def test_an_invitation_may_lie_there(run_here: RunHere, config: Path) -> None:
    config.write_text('[serve-stage]\ninvite = "swarm1nonsense"\n')
    done = run_here("serve-stage")
    assert (done.code, "invitation:" in done.err) == (2, True)


WRONG = {
    "[client.train]\nepoch = 3\n": "[client.train]: epoch: there is no such option; did you mean",
    "[clinet]\n": "[clinet]: there is no such command; did you mean 'client'?",
    "[client\n": "not TOML",
    "client = 3\n": "client.train: expected a section of options",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_defaults_are_told_in_one_line(run_here: RunHere, config: Path, text: str) -> None:
    config.write_text(text)
    done = run_here("client", "train", "--model", "a", "--dataset", "b", "--print-config")
    assert (done.code, done.out) == (2, "")
    assert f"{config}: " in done.err
    assert WRONG[text] in done.err
    assert done.err.count("\n") == 1
