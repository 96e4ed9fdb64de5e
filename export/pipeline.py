"""Pipeline of an export: describe the checkpoint, check, write aside, rename."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specdec import __version__
from specdec.command.settings import to_plain
from specdec.command.stages import load_command
from specdec.errors import Problems
from specdec.files.acceptance import copy_acceptance
from specdec.files.folders import find_gguf
from specdec.files.manifest import describe_file, write_manifest
from specdec.files.reading import read_json, write_json
from specdec.files.staging import (
    check_output_dir,
    list_local,
    stage_folder,
    tell_full_disk,
)
from specdec.files.tensor_file import write_tensor_file
from specdec.files.unfinished import get_partial
from specdec.gguf.folder import localize
from specdec.methods import METHODS, place_drafter
from specdec.model.config import FLOAT_DTYPES
from specdec.system import logs
from specdec.text.tokenizer import copy_files

from .deploy import describe_deployment, write_deployment
from .lacks import find_writer
from .runtimes import RUNTIMES, make_command
from .settings import ExportSettings
from .source import MODEL_TYPES, TITLES, Contents, Order, Source

logger = logs.get_logger(__name__)

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def export_model(settings: ExportSettings) -> dict[str, Any]:
    """Write the folder and return its description."""
    settings = place_drafter(settings)
    inputs = list_local(settings.checkpoint_dir, settings.model_dir, *settings.drafters.values())
    check_output_dir(settings.output_dir, force=settings.force, inputs=inputs)
    with (
        stage_folder(settings.output_dir, force=settings.force, inputs=inputs) as staged,
        hold_checkpoint(settings) as checkpoint,
    ):
        source, output_path = Source(checkpoint), str(settings.output_dir)
        target = "TARGET" if source.kind == "plain" else settings.model_dir or "BASE"
        order = Order(settings=settings, source=source, target=target, output_path=output_path)
        if settings.checkpoint_dir is not None and settings.model_dir is not None:
            compare_target(source, settings.model_dir).raise_all()
        contents = find_writer(order)(order)
        command = make_command(order)
        if source.kind == "plain":
            add_companions(settings, contents)
        if settings.deploy is not None:
            contents.texts |= write_deployment(order)
        write_folder(staged, order, contents, command)
    if settings.to == "gguf" and source.kind == "plain":
        warn_of_widening(settings, source)
    title = RUNTIMES[settings.to].title
    logger.info("%s: %s for %s", settings.output_dir, TITLES[source.kind], title)
    return {
        "output_dir": str(settings.output_dir),
        "to": settings.to,
        "kind": source.kind,
        "dtype": source.model.dtype,
        "tensors": sorted(contents.tensors),
        "left_out": source.left_out,
        "command": command,
    }


@contextlib.contextmanager
def hold_checkpoint(settings: ExportSettings) -> Iterator[Path]:
    """Yield the checkpoint of the settings, or a temporary one."""
    if settings.checkpoint_dir is not None:
        yield settings.checkpoint_dir
        return
    output_dir = settings.output_dir.resolve()
    # By this name, convert leaves the error of a full disk to this command.
    temporary = get_partial(output_dir.with_name(f"{output_dir.name}.checkpoint"))
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    with contextlib.ExitStack() as stack:
        for _ in range(2):  # Ctrl-C may interrupt the first removal
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        temporary.mkdir()
        folder = temporary / "checkpoint"
        command = load_command("convert")
        options: dict[str, Any] = dict(settings.drafters)
        if METHODS["eagle"].folder in options:
            options["num_eagle_layers"] = 1  # one copy of the drafter
        options["dequantize"] = find_gguf(settings.model_dir or "") is not None
        stack.enter_context(tell_full_disk(settings.output_dir))
        with logs.hush("specdec.convert"):  # its hints name a folder and a runtime of no use here
            command.work(
                command.settings_class(
                    model_dir=settings.model_dir, output_dir=folder, dtype=choose_dtype(settings),
                    **options,
                )
            )  # fmt: skip
        yield folder


def choose_dtype(settings: ExportSettings) -> str:
    """Return the type of the exported weights: the drafter's, where its config.json has one."""
    for folder in settings.drafters.values() if settings.dtype == "auto" else ():
        path = Path(folder) / "config.json"
        config = read_json(path) if path.is_file() else {}
        inner = config.get("transformer_layer_config")
        for section in (config, inner if isinstance(inner, dict) else {}):
            dtype = str(section.get("dtype") or section.get("torch_dtype")).removeprefix("torch.")
            if dtype in FLOAT_DTYPES:
                return dtype
    return settings.dtype


def compare_target(source: Source, model_dir: str) -> Problems:
    """List the facts in which a target's config.json is not of the checkpoint's target.

    Keys under other names, and a target on the Hub, are not compared.
    """
    problems, path = Problems(), Path(localize(model_dir)) / "config.json"
    facts = read_target_facts(read_json(path) if path.is_file() else {})
    if facts.get("vocab_size", 0) < source.model.vocab_size:  # a merged adapter may enlarge it
        facts.pop("vocab_size", None)
    for name, value in facts.items():
        if value != (expected := getattr(source.model, name)):
            problems.add(
                f"--model-dir {model_dir} has {name} {value}, the target of {source.folder} has"
                f" {expected}",
                "give the target that the checkpoint was converted from",
            )
    return problems


def read_target_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a target's sizes, and its architecture where no other computes alike."""
    text_config = config.get("text_config")
    sizes = text_config if isinstance(text_config, dict) else config
    facts = {name: sizes.get(name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    facts = {name: value for name, value in facts.items() if type(value) is int}
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    if names[:1] and names[0] in MODEL_TYPES:
        facts["architecture"] = names[0]
    return facts


def add_companions(settings: ExportSettings, contents: Contents) -> None:
    """Add the ids of special tokens, which a checkpoint lacks."""
    path = Path(localize(settings.model_dir or "")) / "config.json"
    if settings.model_dir is None or not path.is_file():
        logger.warning("no tokenizer goes along: give the model's own folder as --model-dir")
        return
    config = read_json(path)
    contents.config |= {name: config[name] for name in SPECIAL_IDS if name in config}


def warn_of_widening(settings: ExportSettings, source: Source) -> None:
    """Tell that a GGUF file was written anew, which llama.cpp reads as it is."""
    if settings.model_dir is not None and (path := find_gguf(settings.model_dir)) is not None:
        logger.warning(
            "%s is a file for llama.cpp already: here its weights were widened to %s, and those are"
            " written, as %s, which take more memory and time than blocks of four bits; give"
            " llama-server the file itself",
            path, source.model.dtype, settings.gguf_type or source.model.dtype,
        )  # fmt: skip


def write_folder(staged: Path, order: Order, contents: Contents, command: str) -> None:
    """Write weights, config.json, texts, README.md and the manifest."""
    source, settings = order.source, order.settings
    hashes = {}
    if contents.weights_name.endswith(".safetensors"):
        infos = {name: source.get_info(rows) for name, rows in contents.tensors.items()}
        path = staged / contents.weights_name
        hashes[path.name] = write_tensor_file(
            path, infos, lambda name: source.read(contents.tensors[name]), {"format": "pt"}
        )
        write_json(staged / "config.json", contents.config)
        if (source.kind == "plain" or contents.files) and settings.model_dir is not None:
            copy_files(Path(localize(settings.model_dir)), staged)
    else:
        from .gguf import write_file

        write_file(staged / contents.weights_name, order, contents)
    for name, path in contents.files.items():
        shutil.copyfile(path, staged / name)
    for name, text in contents.texts.items():
        (staged / name).write_text(text, encoding="utf-8")
    if settings.to == "hf" and source.kind != "plain":
        copy_acceptance(source.folder, staged)
    readme = describe_folder(order, contents, command)
    (staged / "README.md").write_text(readme, encoding="utf-8")
    write_manifest(
        staged, kind="export", settings=to_plain(settings),
        sources=list_sources(settings, source), hashes=hashes, left_out=source.left_out,
    )  # fmt: skip


def list_sources(settings: ExportSettings, source: Source) -> list[dict[str, Any]]:
    """Return what a checkpoint was made from, if it tells, and its files, unless it is temporary.

    The target's files come first, by which a conversion sees whether the drafter belongs to it.
    """
    manifest = source.folder / "manifest.json"
    sources: list[dict[str, Any]] = read_json(manifest)["sources"] if manifest.is_file() else []
    if settings.checkpoint_dir is None:
        return sources
    return [
        *sources, describe_file(source.folder / "config.json"), describe_file(source.file.path)
    ]  # fmt: skip


def describe_folder(order: Order, contents: Contents, command: str) -> str:
    """Return README.md: the folder's contents and use, and the tensors left out, with reasons."""
    source, runtime = order.source, RUNTIMES[order.settings.to]
    title = TITLES[source.kind].removeprefix("an ").removeprefix("a ")
    lines = [
        f"# {title[0].upper()}{title[1:]} for {runtime.title}",
        "",
        f"Written by specdec {__version__} from {source.model.dtype} weights"
        + (f", for the target `{order.target}`." if source.kind != "plain" else "."),
        "",
        "```",
        command,
        "```",
        "",
        f"{len(contents.tensors)} tensors in `{contents.weights_name}`.",
    ]
    lines += [f"`{name}` is not among them: it {why}." for name, why in source.left_out.items()]
    if order.settings.deploy is not None:
        lines += describe_deployment(order)
    return "\n".join(lines) + "\n"
