"""Check that two models give token ids the same meaning."""

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
USE_OF_FAMILY = "use a draft model of the target's family, as `specdec match` finds them"


@dataclasses.dataclass(frozen=True)
class ModelTokens:
    """Tokens of an engine's model: their number, and the vocabulary that its manifest records."""

    folder: Path
    vocab_size: int
    manifest_vocabulary: dict[str, Any] | None


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
    manifests = target.manifest_vocabulary, draft.manifest_vocabulary
    if manifests[0] is not None and manifests[1] is not None:
        if not has_same_tokens(manifests[0], manifests[1]):
            num_target, num_draft = manifests[0]["num_tokens"], manifests[1]["num_tokens"]
            difference = (
                f"{target.folder} was made with one of {num_target} tokens, {draft.folder} with"
                f" one of {num_draft}"
            )
            if num_target == num_draft:
                difference = (
                    f"those of {target.folder} and {draft.folder} are both of {num_target} tokens,"
                    " some of which have other ids"
                )
            raise SpecDecError(
                f"the tokenizers differ: {difference}",
                f"{USE_OF_FAMILY}, or let it draft the tokens that both"
                " have: --draft-vocabulary shared (with --draft-tokenizer-dir DRAFT, except in"
                " specdec generate)",
            )
        return
    if sizes[0] != sizes[1]:
        raise SpecDecError(
            f"the target's vocab_size is {sizes[0]}, the draft model's {sizes[1]}, and whether"
            " only padding differs is not known",
            f"{USE_OF_FAMILY}; engines of folders that hold tokenizers tell"
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
        folder_without = target.folder if tokenizer is None else draft.folder
        flag = "--tokenizer-dir" if tokenizer is None else "--draft-tokenizer-dir"
        raise SpecDecError(
            f"--draft-vocabulary shared needs both tokenizers, and {folder_without} holds none",
            f"give {flag}, or build that engine with --tokenizer-dir",
        )
    manifests = target.manifest_vocabulary, draft.manifest_vocabulary
    if manifests[0] and manifests[1] and has_same_tokens(manifests[0], manifests[1]):
        logger.warning(
            "both models have the same %d tokens: --draft-vocabulary shared is not needed",
            manifests[0]["num_tokens"],
        )
    return tokenizer, load_engine_tokenizer(
        draft.folder, draft_tokenizer_dir, "--draft-tokenizer-dir"
    )[1]


def compare_tokenizers(target: Any, draft: Any) -> None:
    """Raise SpecDecError that names the first tokens that differ."""
    target_ids, draft_ids = target.get_vocab(), draft.get_vocab()
    different = sorted(
        (
            token
            for token in target_ids.keys() | draft_ids.keys()
            if target_ids.get(token) != draft_ids.get(token)
        ),
        key=lambda token: (
            min(target_ids.get(token, 1 << 62), draft_ids.get(token, 1 << 62)),
            token,
        ),
    )
    if not different:
        return
    examples = ", ".join(
        f"{token!r} is {_describe(target_ids.get(token))} and {_describe(draft_ids.get(token))}"
        for token in different[:MAX_SHOWN]
    )
    raise SpecDecError(
        f"the tokenizers differ in {len(different)} tokens (target {len(target_ids)}, draft"
        f" {len(draft_ids)}): {examples}",
        f"{USE_OF_FAMILY}, or add --draft-vocabulary shared: it then"
        " drafts the tokens that both have",
    )


def _describe(token_id: int | None) -> str:
    return "absent" if token_id is None else str(token_id)
