"""Single tokens as clients see them: their bytes and texts."""

from __future__ import annotations

from typing import Any

from specdec.files.vocabulary import list_byte_letters, read_piece


class TokenTable:
    """Table of the bytes of a tokenizer's tokens, which are written in one of two ways."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids) | set(
            getattr(tokenizer, "added_tokens_decoder", {})
        )
        backend = getattr(tokenizer, "backend_tokenizer", None)
        is_byte_level = backend is not None and "ByteLevel" in str(backend.decoder)
        self._letters = list_byte_letters() if is_byte_level else None

    def get_bytes(self, token: int) -> bytes:
        """Return a token's UTF-8 bytes, which may be half a character."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if token in self._special:
            return str(piece).encode()
        return read_piece(piece, self._letters)

    def get_text(self, token: int) -> str:
        """Return a token's text; bytes that are no character are escaped, as OpenAI does."""
        data = self.get_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
