"""Report of a match as lines of text and as an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specdec.errors import SpecDecError, count, cut_middle, make_printable

MAX_LINE = 1000  # most characters of a line: names and values out of files may be of any length


def format_report(report: Mapping[str, Any]) -> str:
    """Return a report as lines of text."""
    target, candidates = report["target"], report["candidates"]
    fitting_entries = [entry for entry in candidates if entry["fits"]]
    other_entries = [entry for entry in candidates if not entry["fits"]]
    lines = [f"{target['name']}: {target['architecture']}, {_join_numbers(target)}"]
    lines += [f"warning: {warning}" for warning in report["warnings"]]
    lines.append(f"fit: {len(fitting_entries)} of {len(candidates)}")
    lines += [line for entry in fitting_entries for line in _format_entry(entry)]
    if other_entries:
        lines.append(f"do not fit: {len(other_entries)}")
        lines += [line for entry in other_entries for line in _format_entry(entry)]
    return "\n".join(make_printable(cut_middle(line, MAX_LINE)) for line in lines)


def _format_entry(entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a candidate: its kind and numbers, then what comes of them."""
    facts = ", ".join(filter(None, [entry["title"], _join_numbers(entry["numbers"])]))
    source = f" ({entry['source']})" if entry["source"] != "folder" else ""
    yield f"  {entry['name']}{source}" + (f": {facts}" if facts else "")
    if entry["base_models"]:
        other = "" if entry["names_target"] else ", by its name another model"
        yield f"    made for {', '.join(entry['base_models'])}{other}"
    if (acceptance := entry["acceptance"]) is not None:
        yield f"    promises {_join_promise(acceptance)}"
    for reason in entry["reasons"]:
        yield f"    no: {reason['fact']}"
    for warning in entry["warnings"]:
        yield f"    warning: {warning}"
    if entry["draft_vocabulary"] == "shared":
        yield f"    another vocabulary: {entry['shared_tokens']:,} tokens are in both, and drafted"
    if entry["command"] is not None:
        yield f"    {entry['command']}"


def _join_numbers(numbers: Mapping[str, Any]) -> str:
    """Return the numbers that are there as text."""
    forms = {
        "num_parameters": "{:,} parameters", "hidden_size": "hidden size {}",
        "num_layers": "layers {}", "num_heads": "heads {}", "feature_layers": "reads layers {}",
        "vocab_size": "vocabulary {}", "draft_vocab_size": "drafts {} tokens",
        "max_positions": "positions {}", "dtype": "{}", "quantization": "{}",
    }  # fmt: skip
    values = {name: numbers.get(name) for name in forms}
    return ", ".join(
        forms[name].format(value) for name, value in values.items() if value is not None
    )


def _join_promise(acceptance: Mapping[str, Any]) -> str:
    """Return what a drafter's acceptance.json promises as text."""
    rates = acceptance["tokens_per_step"].items()
    sizes = ", ".join(f"{tokens:.2f} with {size} drafted" for size, tokens in rates)
    prompts = acceptance["about"].get("num_prompts")
    source = f" of {prompts} prompts" if prompts is not None else ""
    return f"{sizes} tokens a step, counted in {acceptance['num_drafts']:,} drafts{source}"


def find_error(report: Mapping[str, Any]) -> SpecDecError | None:
    """Return the error for a target that no candidate fits."""
    if report["num_fitting"]:
        return None
    name, candidates = report["target"]["name"], report["candidates"]
    fact = f"none of {count(len(candidates), 'candidate')} drafts for {name}"
    if not candidates:
        fact = f"no drafter for {name} was found: neither --among nor the Hub's cache has any"
    return SpecDecError(
        fact,
        "give folders of drafters with --among; without a drafter, specdec generate"
        " --suffix-max-tokens 8 drafts from the text itself, and specdec-train makes a drafter",
    )
