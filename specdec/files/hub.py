"""Answers of the Hugging Face Hub for a model that it does not give, in our words."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from specdec.errors import SpecDecError
from specdec.files.folders import suggest_folder

# The library's error -> the message and its remedy, the most special first.
REFUSALS = (
    ("GatedRepoError", "access to that model is restricted",
     "accept its terms on the Hub, and set HF_TOKEN to a token that may read it"),
    ("RepositoryNotFoundError", "there is no such model, or a private one",
     "check the spelling; for a private model set HF_TOKEN"),
    ("RevisionNotFoundError", "that model has no branch main", "download it and give its folder"),
    ("OfflineModeIsEnabled", "nothing was asked: HF_HUB_OFFLINE is set, and no copy is cached",
     "unset HF_HUB_OFFLINE, or download the model and give its folder"),
)  # fmt: skip


# Facts by the names of exceptions' classes, the first that one has.
FAILURES = {
    "OfflineModeIsEnabled": "was not asked: HF_HUB_OFFLINE is set",
    "gaierror": "cannot be reached: there is no network, or none that knows its name",
    "TimeoutError": "did not answer in time",
    "SSLError": "cannot be reached: its certificate is not trusted here",
    "ConnectionError": "cannot be reached",
    "TransportError": "cannot be reached",
    "LocalEntryNotFoundError": "cannot be reached",
}


def explain(hub_id: str, flag: str, error: Exception) -> SpecDecError:
    """Return the error for a model that the Hub does not give, from what its library raised."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    near = suggest_folder(Path(hub_id))
    absence = f"{flag} {hub_id} is not a local folder{near}"
    for name, fact, remedy in REFUSALS:
        if name in kinds:
            return SpecDecError(f"{absence}, and at the Hub {fact}", remedy)
    return SpecDecError(
        f"{absence}, and the Hugging Face Hub {describe_answer(error)}",
        "check the spelling and the network and run it again, which goes on where it stopped;"
        " or download the model and give its folder",
    )


def describe_answer(error: BaseException) -> str:
    """Say what the Hub did, from what its library raised, with either HTTP client that it has had.

    Only what is no answer of a server and no failure of the network is told in the library's words.
    """
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    for link in chain:
        if status := getattr(getattr(link, "response", None), "status_code", None):
            return f"answered with status {status}"
    return _describe_failure(chain) or (
        f"gave {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    )


def _describe_failure(chain: Sequence[BaseException]) -> str | None:
    """Say why a request had no answer, from an exception and its causes; None for others."""
    kinds = {kind.__name__ for link in chain for kind in type(link).__mro__}
    if any(kind.endswith("Timeout") for kind in kinds):
        kinds.add("TimeoutError")
    # urllib3 1 calls a refused connection a time-out, too: the system's own error comes first.
    errors = [link for link in chain if isinstance(link, ConnectionError)]
    if errors and errors[-1].errno and not kinds & {"OfflineModeIsEnabled", "gaierror"}:
        return f"cannot be reached: {os.strerror(errors[-1].errno).lower()}"
    return next((fact for kind, fact in FAILURES.items() if kind in kinds), None)


def fetch_files(hub_id: str, flag: str, names: Sequence[str]) -> Path:
    """Fetch some files of a model, those that it has, or find them cached; return their folder."""
    from huggingface_hub import snapshot_download

    # Only the environment's token: one that lies about in a home folder is not ours to send.
    token = os.environ.get("HF_TOKEN") or False
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(names), token=token))
    except Exception as error:  # noqa: BLE001 - the hub's client raises anything
        raise explain(hub_id, flag, error) from None


def list_cached(cache_dir: Path | None = None) -> tuple[list[tuple[str, Path]], list[str]]:
    """List the models in a cache of the Hub: ids and folders of main, else of the newest revision.

    Returns what is wrong with its other entries, too. Nothing is asked of the Hub.

    cache_dir: the user's if not given.
    """
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        cache = scan_cache_dir(cache_dir or Path(constants.HF_HUB_CACHE))
    except CacheNotFound:
        return [], []
    except ValueError as error:  # a file in the place of the cache
        return [], [" ".join(str(error).split())]
    models = []
    for repo in sorted(cache.repos, key=lambda repo: repo.repo_id):
        revisions = sorted(repo.revisions, key=lambda r: ("main" in r.refs, r.last_modified))
        if repo.repo_type == "model" and revisions:
            models.append((repo.repo_id, Path(revisions[-1].snapshot_path)))
    return models, [" ".join(str(warning).split()) for warning in cache.warnings]


def find_cached(hub_id: str) -> bool:
    """Return whether the Hub's cache on this machine holds any file of a model."""
    import huggingface_hub

    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    return any(
        isinstance(huggingface_hub.try_to_load_from_cache(hub_id, name), str) for name in names
    )
