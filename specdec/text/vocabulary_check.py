"""Whether two models speak of the same tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError
from specdec.files.vocabulary import has_same_tokens
from specdec.system import logs
from specdec.text.tokenizer import find_tokenizer, load_engine_tokenizer

logger = logs.get_logger(__name__)
MAX_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class ModelTokens:
    """What is known of an engine's tokens: how many, and what its manifest records of them."""

    folder: Path
    vocab_size: int
    recorded: dict[str, Any] | None


def check_vocabularies(
    target: ModelTokens, draft: ModelTokens, tokenizer: Any, draft_tokenizer_dir: str | None
) -> None:
    """Raise SpecDecError where token ids of one model mean something else to the other.

    Models of one tokenizer often differ in padding: that is no difference. What a token means is
    known from the tokenizers, or from the vocabularies that the engines' manifests record.
    """
    if draft_tokenizer_dir is not None:
        if tokenizer is None:
            raise SpecDecError(
                "--draft-tokenizer-dir is compared with --tokenizer-dir, which is not given",
                "give both",
            )
        flag = "--draft-tokenizer-dir"
        compare_tokenizers(
            tokenizer, load_engine_tokenizer(draft.folder, draft_tokenizer_dir, flag)[1]
        )
        return
    sizes = target.vocab_size, draft.vocab_size
    known = target.recorded, draft.recorded
    if known[0] is not None and known[1] is not None:
        if not has_same_tokens(known[0], known[1]):
            ours, theirs = known[0]["num_tokens"], known[1]["num_tokens"]
            how = (
                f"{target.folder} was made with one of {ours} tokens, {draft.folder} with one of"
                f" {theirs}"
            )
            if ours == theirs:
                how = (
                    f"those of {target.folder} and {draft.folder} are both of {ours} tokens, some"
                    " of which have other ids"
                )
            raise SpecDecError(
                f"the tokenizers differ: {how}",
                "use a draft model of the target's family, or let it draft the tokens that both"
                " have: --draft-vocabulary shared (with --draft-tokenizer-dir DRAFT, except in"
                " specdec generate)",
            )
        return
    if sizes[0] != sizes[1]:
        raise SpecDecError(
            f"the target's vocab_size is {sizes[0]}, the draft model's {sizes[1]}, and whether"
            " only padding differs is not known",
            "use a draft model of the target's family; engines of folders that hold tokenizers tell"
            " by themselves, for others give specdec-run --tokenizer-dir and --draft-tokenizer-dir",
        )
    logger.warning(
        "whether both models have one tokenizer is not known: their manifests record none;"
        " --draft-tokenizer-dir compares them"
    )


def load_pair(
    target: ModelTokens, draft: ModelTokens, tokenizer: Any, draft_tokenizer_dir: str | None
) -> tuple[Any, Any]:
    """Return the tokenizers of two models whose tokens differ.

    tokenizer: the target's, where it is known. draft_tokenizer_dir: None is the folder that the
    draft model's engine holds.
    """
    folder = find_tokenizer(draft.folder, draft_tokenizer_dir)
    if tokenizer is None or folder is None:
        lacking = target.folder if tokenizer is None else draft.folder
        flag = "--tokenizer-dir" if tokenizer is None else "--draft-tokenizer-dir"
        raise SpecDecError(
            f"--draft-vocabulary shared needs both tokenizers, and {lacking} holds none",
            f"give {flag}, or build that engine with --tokenizer-dir",
        )
    known = target.recorded, draft.recorded
    if known[0] and known[1] and has_same_tokens(known[0], known[1]):
        logger.warning(
            "both models have the same %d tokens: --draft-vocabulary shared is not needed",
            known[0]["num_tokens"],
        )
    return tokenizer, load_engine_tokenizer(
        draft.folder, draft_tokenizer_dir, "--draft-tokenizer-dir"
    )[1]


def compare_tokenizers(target: Any, draft: Any) -> None:
    """Raise SpecDecError that names the first tokens that differ."""
    ours, theirs = target.get_vocab(), draft.get_vocab()
    different = sorted(
        (token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)),
        key=lambda token: (min(ours.get(token, 1 << 62), theirs.get(token, 1 << 62)), token),
    )
    if not different:
        return
    shown = ", ".join(
        f"{token!r} is {_describe(ours.get(token))} and {_describe(theirs.get(token))}"
        for token in different[:MAX_SHOWN]
    )
    raise SpecDecError(
        f"the tokenizers differ in {len(different)} tokens (target {len(ours)}, draft"
        f" {len(theirs)}): {shown}",
        "use a draft model of the target's family, or add --draft-vocabulary shared: it then"
        " drafts the tokens that both have",
    )


def _describe(token_id: int | None) -> str:
    return "absent" if token_id is None else str(token_id)
