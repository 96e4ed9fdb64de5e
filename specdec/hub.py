"""What the Hugging Face Hub says of a model that it does not give, in our words."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from specdec.errors import SpecDecError

# What the library raises -> what to say and to do about it, the most special first.
REFUSALS = (
    ("GatedRepoError", "access to that model is restricted",
     "accept its terms on the Hub, and set HF_TOKEN to a token that may read it"),
    ("RepositoryNotFoundError", "there is no such model, or a private one",
     "check the spelling; for a private model set HF_TOKEN"),
    ("RevisionNotFoundError", "that model has no branch main", "download it and give its folder"),
    ("OfflineModeIsEnabled", "nothing was asked: HF_HUB_OFFLINE is set, and no copy is cached",
     "unset HF_HUB_OFFLINE, or download the model and give its folder"),
)  # fmt: skip


def explain(hub_id: str, flag: str, error: Exception) -> SpecDecError:
    """Return the error for a model that the Hub does not give, from what its library raised."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    for name, fact, remedy in REFUSALS:
        if name in kinds:
            return SpecDecError(
                f"{flag} {hub_id} is not a local folder, and at the Hub {fact}", remedy
            )
    return SpecDecError(
        f"{flag} {hub_id} is not a local folder, and the Hub gave {summarize_answer(error)}",
        "check the spelling and the network and run it again, which goes on where it stopped;"
        " or download the model and give its folder",
    )


def summarize_answer(error: Exception) -> str:
    """Return kind and text of what the Hub's library raised, in one line of bounded length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def fetch_files(hub_id: str, flag: str, names: Sequence[str]) -> Path:
    """Fetch some files of a model, those that it has, or find them cached; return their folder."""
    from huggingface_hub import snapshot_download

    # Only the environment's token: one that lies about in a home folder is not ours to send.
    token = os.environ.get("HF_TOKEN") or False
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(names), token=token))
    except Exception as error:  # noqa: BLE001 - the hub's client raises anything
        raise explain(hub_id, flag, error) from None


def find_cached(hub_id: str) -> bool:
    """Whether the Hub's cache on this machine holds any file of a model."""
    import huggingface_hub

    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    return any(
        isinstance(huggingface_hub.try_to_load_from_cache(hub_id, name), str) for name in names
    )
