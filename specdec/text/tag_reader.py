"""Reading of a call's arguments that are texts between tags, as Qwen3-Coder and GLM write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .answer_reader import AnswerReader, Reading
from .call_arguments import SchemaReader, read_argument
from .call_formats import MAX_NAME, TagForm, ToolFormat


class TagReader(AnswerReader):
    """Reader of arguments between tags."""

    def __init__(self, tools: ToolFormat | None, schemas: Mapping[str, Any]) -> None:
        """schemas: of the arguments, by the names of the tools."""
        self._schemas = schemas
        super().__init__(tools)

    def _read_tags(self, form: ToolFormat, tags: TagForm, name: str, position: int) -> Reading[int]:
        """Read arguments that are texts between tags; return the end of the last one."""
        prefix, schema, keys = "{", self._schemas.get(name), list[str]()
        while True:
            position = yield from self._skip(position)
            if not (yield from self._has(position, tags.key_begin)):
                break
            key_start = position + len(tags.key_begin)
            key_end = yield from self._find(tags.key_end, key_start)
            start = yield from self._find(tags.value_begin, key_end + len(tags.key_end))
            if key_end < 0 or start < 0:
                return self._cut_function(prefix)
            key = self._text[key_start:key_end].strip()
            keys.append(key)
            start += len(tags.value_begin)
            end, position = yield from self._find_value_end(form, tags, start, schema, keys)
            if end < 0:
                return self._cut_function(prefix)
            value = read_argument(tags.clean(self._text[start:end]), key, schema)
            self._add_arguments(f"{prefix}{json.dumps(key)}: {value}")
            prefix = ", "
        if (yield from self._is_cut_between(form, tags, position, has_arguments=bool(keys))):
            return self._cut_function(prefix)
        self._add_arguments("{}" if prefix == "{" else "}")
        return position

    def _is_cut_between(
        self, form: ToolFormat, tags: TagForm, position: int, *, has_arguments: bool
    ) -> Reading[bool]:
        """Return whether the text ends between two arguments, where a limit or half a tag does it.

        Models leave out the end of a call that has arguments at times.
        """
        closing = form.call_end or form.end
        if has_arguments and position == len(self._text) and not self._is_cut:
            return False
        if (yield from self._has(position, closing)):
            return False
        return any(tag.startswith(self._text[position:]) for tag in (tags.key_begin, closing))

    def _find_value_end(
        self, form: ToolFormat, tags: TagForm, start: int, schema: Any, keys: Sequence[str]
    ) -> Reading[tuple[int, int]]:
        """Find where an argument's text ends, and where what follows begins; -1 for no end.

        Models leave out the tag after it at times: then the tag of another argument of the tool
        ends it, or the call's end. keys: of the arguments so far, with this one.
        """
        marks = _list_ends(form, tags, has_text=SchemaReader(schema).allows_text(keys[-1]))
        position = start
        while True:
            end, mark = self._find_first(marks, position)
            if mark == tags.value_end:
                return end, end + len(mark)
            if not mark:
                if self._is_over:
                    return -1, -1
                position = max(position, len(self._text) - max(map(len, marks)) + 1)
                yield
                continue
            position = (yield from self._skip(end)) if mark == "\n" else end
            if (yield from self._begins_tag(form, tags, position, schema, keys)):
                text = self._text[start:position].rstrip(" \t")
                return start + len(text), position
            position = max(position, end + 1)

    def _begins_tag(
        self, form: ToolFormat, tags: TagForm, position: int, schema: Any, keys: Sequence[str]
    ) -> Reading[bool]:
        """Return whether a tag at a position ends the argument before it."""
        if (yield from self._has(position, tags.key_begin)):
            key_start = position + len(tags.key_begin)
            limit = key_start + MAX_NAME
            while (key_end := self._text.find(tags.key_end, key_start, limit)) < 0:
                if self._is_over or len(self._text) >= limit:
                    return False
                yield
            key = self._text[key_start:key_end].strip()
            return key not in keys and SchemaReader(schema).names_property(key)
        return (yield from self._ends_call(form, position))

    def _ends_call(self, form: ToolFormat, position: int) -> Reading[bool]:
        """Return whether the end of a call and of all calls, or of the text, is at a position."""
        has_end = False
        for end in filter(None, (form.call_end, form.end)):
            if (yield from self._has(position, end)):
                if has_end:
                    return True
                has_end, position = True, (yield from self._skip(position + len(end)))
        return has_end and position == len(self._text) and not self._is_cut

    def _cut_function(self, prefix: str) -> int:
        """End a call whose arguments the text's end cuts off; return that end.

        prefix: the marker with which the next argument would begin.
        """
        self._add_arguments(prefix if prefix == "{" else "")
        self.is_call_cut = True
        return len(self._text)


def _list_ends(form: ToolFormat, tags: TagForm, *, has_text: bool) -> list[str]:
    """List what may end an argument: its tag, and a line or, of what is no text, another tag."""
    others = ["\n"] if has_text else ["\n", tags.key_begin, form.call_end or form.end]
    return [tags.value_end, *filter(None, others)]
