"""Texts and their tokens: prompts, chats, tokenizers, grammars, vocabularies."""
