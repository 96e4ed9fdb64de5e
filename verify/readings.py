"""Reference tokenization of texts: tokenizer.json by package tokenizers, without transformers.

An engine with a wrong tokenizer writes the text that the model writes after the same wrong
tokens, so that a comparison of tokens alone cannot find the fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.decode.settings import DecodeSettings
from specdec.errors import shorten
from specdec.files.text_reading import find_difference, list_texts
from specdec.text.encoding import encode_prompt
from specdec.text.pretrained_tokenizer import apply_keys, find_files
from specdec.text.prompts import Prompt

from .greedy import Text


def open_reference(model_dir: str, tokenizer: Any) -> Any:
    """Load a model's tokenizer.json by package tokenizers; None where the model has none.

    tokenizer: the model's, by transformers; it has the tokens that other files add.
    """
    from tokenizers import Tokenizer

    files = None if tokenizer is None else find_files(model_dir)
    if files is None or files.path is None:
        return None
    backend: Any = Tokenizer.from_file(str(files.path))
    added_tokens = [token for _, token in sorted(tokenizer.added_tokens_decoder.items())]
    backend.add_tokens(
        [token for token in added_tokens if backend.token_to_id(token.content) is None]
    )
    apply_keys(backend, files, tokenizer.bos_token, tokenizer.eos_token)
    return backend


def find_wrong_readings(
    reference: Any, tokenizer: Any, engine_tokenizer: Any, prompts: Sequence[Prompt],
    texts: Sequence[Text],
) -> list[str]:  # fmt: skip
    """List the texts that an engine tokenizes differently: prompts, and a fixed set.

    reference: of `open_reference`. tokenizer: the model's, by transformers.
    """
    if reference is None:
        return []

    def read(text: str) -> list[int]:
        return list(engine_tokenizer(text, verbose=False)["input_ids"])

    def read_reference(text: str) -> list[int]:
        return list(reference.encode(text).ids)

    special = tokenizer.all_special_tokens
    difference = find_difference(read, read_reference, list_texts(special))
    facts = [] if difference is None else [difference.describe("to the engine", "to the model")]
    for text in texts:
        prompt = prompts[text.prompt]
        if prompt.token_ids is not None or any(name in str(prompt.messages) for name in special):
            continue  # names of special tokens in messages are text to the engine, by design
        prompt_text, _ = encode_prompt(prompt, DecodeSettings(), tokenizer)
        ids = reference.encode(prompt_text, add_special_tokens=prompt.messages is None).ids
        if ids != text.input_ids:
            facts.append(f"prompt {text.prompt} is {shorten(text.input_ids)} to the engine")
            facts[-1] += f", {shorten(ids)} to the model"
        engine_text = engine_tokenizer.decode(text.output_ids, clean_up_tokenization_spaces=False)
        model_text = reference.decode(text.output_ids, skip_special_tokens=False)
        if engine_text != model_text:
            facts.append(
                f"tokens after prompt {text.prompt} are {shorten(engine_text)} to the engine"
            )
            facts[-1] += f", {shorten(model_text)} to the model"
    return facts
