"""Settings of specdec generate: a choice of the other stages' own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from specdec.command.stages import load_command
from specdec.errors import UsageError
from specdec.methods import METHODS
from specdec.options import (
    Contradiction,
    add_options,
    get_flags,
    like,
    name_flag,
    option_group,
    refuse_contradictions,
    setting,
)

MODELS = option_group("Models")
ENGINE = option_group("Engine", rare=True)
KEPT_ENGINES = option_group("Kept engines")

# The methods' folders of drafters, and settings of the methods that need no drafter.
DRAFTER_FOLDERS = tuple(method.folder for method in METHODS.values() if method.folder)
DRAFTS = tuple(m.options["draft"] for m in METHODS.values() if m.source == "target")


def _like(stage: str, name: str, help: str | None = None, **details: Any) -> Any:
    """Declare a field as another stage has it, for that stage. details: keywords of `like`."""
    return like(load_command(stage).settings_class, name, help, stage=stage, **details)


DrafterFolders = dataclasses.make_dataclass(
    "DrafterFolders",
    [(name, "str | None", _like("convert", name)) for name in DRAFTER_FOLDERS],
    frozen=True,
    kw_only=True,
)


@add_options(DrafterFolders, *DRAFTS)
@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """One field is one flag; most are convert's, build's or run's, and mean the same here."""

    texts: list[str] = setting([], metavar="TEXT", is_argument=True, help="One or several prompts.")
    input_file: Path | None = _like("run", "input_file", group="Text")
    model_dir: str | None = _like("convert", "model_dir")
    speculative_decoding_mode: str | None = _like("convert", "speculative_decoding_mode")
    lora_dir: Path | None = _like("convert", "lora_dir")
    draft_model_dir: str | None = MODELS(
        folder="model", metavar="SMALL",
        help="A small model that drafts for the target: a folder or Hub id.",
    )  # fmt: skip
    tokenizer_dir: str | None = MODELS(
        metavar="DIR", help="Folder or Hub id of the tokenizer; --model-dir if not given."
    )
    dtype: str = _like("convert", "dtype", group="Engine", rare=True)
    dequantize: bool = _like("convert", "dequantize", group="Engine", rare=True)
    redrafter_num_beams: int | None = _like("convert", "redrafter_num_beams")
    redrafter_draft_len_per_beam: int | None = _like("convert", "redrafter_draft_len_per_beam")
    quantization: str | None = _like("build", "quantization", group="Engine", rare=True)
    drafter_weights: str = _like("build", "drafter_weights", group="Engine", rare=True)
    max_batch_size: int = _like("build", "max_batch_size", group="Engine", rare=True)
    max_seq_len: int | None = ENGINE(
        minimum=2, metavar="N",
        help="Longest prompt plus output in tokens; the model's limit, at most 4096, if not given.",
    )  # fmt: skip
    backend: str = _like("build", "backend", group="Engine", rare=True)
    draft_len: str | None = _like("run", "draft_len")
    draft_tree_tokens: int | None = _like("run", "draft_tree_tokens")
    draft_vocabulary: str = _like("run", "draft_vocabulary")
    eagle_choices: str | None = _like("run", "eagle_choices")
    draft_budget: str | None = _like("run", "draft_budget")
    max_output_len: int = _like("run", "max_output_len")
    temperature: str | None = _like("run", "temperature")
    top_k: int = _like("run", "top_k")
    top_p: float = _like("run", "top_p")
    random_seed: int = _like("run", "random_seed")
    stop_words: list[str] = _like("run", "stop_words")
    apply_chat_template: bool | None = _like(
        "run", "apply_chat_template",
        "Put each text into the model's chat template, as a user's turn; if not given, where the"
        " model has one.", group="Text",
    )  # fmt: skip
    chat_template: str | None = _like("run", "chat_template", group="Text", rare=True)
    no_speculation: bool = _like("run", "no_speculation")
    device: str = _like("run", "device", group="Engine", rare=True)
    streaming: bool = _like("run", "streaming", group="Text")
    show_drafts: bool = _like("run", "show_drafts", group="Text")
    json: bool = _like("run", "json")
    no_cache: bool = KEPT_ENGINES(
        False, help="Keep no engine: build in a temporary folder, and remove it."
    )
    force: bool = setting(
        False, help="Convert and build again, even if the engine is in the cache."
    )
    clear_cache: bool = KEPT_ENGINES(
        False, help="Remove every engine that this command has kept, and exit."
    )

    def list_stage(self, stage: str) -> dict[str, Any]:
        """Return the settings that are those of one stage, by name."""
        names = [f.name for f in dataclasses.fields(self) if f.metadata.get("stage") == stage]
        if stage == "run":
            names += [name for kind in DRAFTS for name in get_flags(kind)]
        return {name: getattr(self, name) for name in names}


LACK, REMEDY = " without --draft-model-dir", "give the draft model, or leave it out"
CONTRADICTIONS: tuple[Contradiction, ...] = (
    (lambda s: s.texts and s.input_file is not None,
     "prompts and --input-file are both given", "leave one of them out"),
    (lambda s: s.no_cache and s.force,
     "--force has no effect with --no-cache", "leave one of them out"),
    (lambda s: s.draft_model_dir is None and s.draft_vocabulary != "same",
     "--draft-vocabulary" + LACK, REMEDY),
    (lambda s: s.draft_model_dir is None and s.draft_tree_tokens is not None,
     "--draft-tree-tokens" + LACK, REMEDY),
    (lambda s: s.draft_model_dir is None and s.draft_len not in (None, "auto"),
     "--draft-len {draft_len}" + LACK,
     "give the draft model, or 'auto', which adapts the length of any drafts"),
    (lambda s: s.texts and s.max_seq_len is not None and s.max_output_len >= s.max_seq_len,
     "--max-output-len {max_output_len} leaves a prompt no room in --max-seq-len {max_seq_len}",
     "lower the first, or raise the second"),
)  # fmt: skip


def check_settings(settings: GenerateSettings) -> None:
    """Raise UsageError for what is missing or has no effect, before anything is converted."""
    flags = get_flags(GenerateSettings)
    typed_names = [n for n, (_, default) in flags.items() if getattr(settings, n) != default]
    if settings.clear_cache:
        if other_flags := [name for name in typed_names if name != "clear_cache"]:
            raise UsageError(
                f"--clear-cache does nothing else, and {_join(other_flags)} was given too",
                "clear the cache first, then generate",
            )
        return
    if settings.model_dir is None:
        raise UsageError(
            "missing --model-dir", "give the target: a Hugging Face folder, a Hub id or a GGUF file"
        )
    if not settings.texts and settings.input_file is None:
        lists = [name for name in typed_names if flags[name][0].kind == "list"]
        raise UsageError("no prompt was given", _advise_prompt(lists))
    check_drafters(typed_names)
    refuse_contradictions(settings, CONTRADICTIONS)


def check_drafters(typed_names: list[str]) -> None:
    """Raise UsageError for drafters that exclude one another, and for drafts without one."""
    ways = [[name] for name in (*DRAFTER_FOLDERS, "draft_model_dir", "speculative_decoding_mode")]
    ways += [list(get_flags(kind)) for kind in DRAFTS]
    typed_ways = [[name for name in way if name in typed_names] for way in ways]
    drafters = [names[0] for names in typed_ways if names]
    if len(drafters) > 1:
        raise UsageError(f"{_join(drafters)} exclude one another", "give one of them")


def _advise_prompt(lists: list[str]) -> str:
    if lists:
        return f"put the prompts before {_join(lists)}, which takes every word after it"
    return 'write prompts after the options, such as "def main():", or give --input-file'


def _join(names: list[str]) -> str:
    words = ["TEXT" if name == "texts" else name_flag(name) for name in names]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
