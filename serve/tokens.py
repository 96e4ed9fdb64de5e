"""Single tokens as clients see them: their bytes, and what text those are."""

from __future__ import annotations

from typing import Any

from specdec.files.vocabulary import list_byte_letters, read_piece


class TokenTable:
    """The bytes of each token of a tokenizer, by the two ways in which they are written."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids) | set(
            getattr(tokenizer, "added_tokens_decoder", {})
        )
        backend = getattr(tokenizer, "backend_tokenizer", None)
        is_byte_level = backend is not None and "ByteLevel" in str(backend.decoder)
        self._letters = list_byte_letters() if is_byte_level else None

    def get_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that a token stands for; perhaps a part of a character."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if token in self._special:
            return str(piece).encode()
        return read_piece(piece, self._letters)

    def get_text(self, token: int) -> str:
        """The bytes as text; those that are no character are escaped, as OpenAI does."""
        found = self.get_bytes(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)
