"""Upload of a finished drafter to the Hugging Face Hub, with the token of the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError
from specdec.files.hub import describe_answer
from specdec.system.logs import get_logger

TOKEN_NAME = "HF_TOKEN"
# The manifest has paths of this machine; the model card has the hashes and settings.
PRIVATE_FILES = ("manifest.json",)

logger = get_logger(__name__)


def open_hub(hub_id: str) -> Any:
    """Create a repository of the Hub, and return a client that may write to it.

    Raises SpecDecError before hours of training where the token may not write.
    """
    import huggingface_hub

    token = os.environ.get(TOKEN_NAME)
    if not token:
        raise SpecDecError(
            f"--push-to-hub {hub_id}: {TOKEN_NAME} is not set",
            f"set {TOKEN_NAME} to a token that may write there",
        )
    client = huggingface_hub.HfApi(token=token)
    try:
        client.create_repo(repo_id=hub_id, private=True, exist_ok=True)
    except Exception as error:  # noqa: BLE001 - the library raises its HTTP client's errors
        raise _refuse(hub_id, "it cannot be written to", error) from None
    return client


def push_folder(client: Any, hub_id: str, folder: Path) -> str:
    """Upload a drafter's folder; return the address of the commit."""
    try:
        commit = client.upload_folder(
            repo_id=hub_id,
            folder_path=folder,
            commit_message="Drafter trained by specdec-train",
            ignore_patterns=list(PRIVATE_FILES),
        )
    except Exception as error:  # noqa: BLE001 - as above
        raise _refuse(hub_id, f"the upload failed; {folder} is complete", error) from None
    logger.info("uploaded to %s", commit)
    return str(commit)


def _refuse(hub_id: str, fact: str, error: Exception) -> SpecDecError:
    return SpecDecError(
        f"--push-to-hub {hub_id}: {fact}: the Hub {describe_answer(error)}",
        f"check the id, {TOKEN_NAME} and the network; an existing folder can be uploaded with"
        f" `hf upload {hub_id} FOLDER .`",
    )
