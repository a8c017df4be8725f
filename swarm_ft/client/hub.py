"""Upload of a result to the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from swarm_ft.client.export import MANIFEST
from swarm_ft.errors import BadOption, RunFailed

_REPO_ID = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")


def check_push(repo_id: str) -> None:
    """Refuse a repository that could not be pushed to at the end of a run. Uses no network.

    Raises:
        BadOption: The name is invalid, or this user is not logged in.
    """
    from huggingface_hub import get_token

    if not _REPO_ID.fullmatch(repo_id) or len(repo_id) > 128:
        raise BadOption(f"--push-to-hub: expected NAME or OWNER/NAME, got {repo_id!a:.80}")
    if get_token() is None:
        raise BadOption("--push-to-hub: this user is not logged in; 'hf auth login', or HF_TOKEN")


def push(directory: Path, repo_id: str, *, is_private: bool) -> str:
    """Upload a result in one commit, creating the repository if needed.

    Returns:
        The URL of the repository.

    Raises:
        RunFailed: The hub refused the upload; the result stays in `directory`.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        repo = api.create_repo(repo_id, private=is_private, exist_ok=True)
        api.upload_folder(
            repo_id=repo.repo_id,
            folder_path=directory,
            commit_message="Fine-tuned by a swarm",
            ignore_patterns=[MANIFEST],
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        why = " ".join(str(error).split())[:300]
        raise RunFailed(
            f"{repo_id}: not uploaded to the hub: {why}; the result is in {directory}"
        ) from None
    return str(repo)
