"""Stages of a recipe: the commands of each job, as lines of bash."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specdec.command.settings import read_sections, require, resolve_settings
from specdec.command.stages import load_command
from specdec.errors import Problems, SpecDecError, UsageError

from .keys import Jobs, read_jobs
from .settings import STAGE_RESOURCES, DataResources, Resources, ServerResources, TrainResources

# Sections of each stage, in the order of their commands; `serve` and `merge` are made apart.
SECTIONS_OF_STAGES: Mapping[str, tuple[str, ...]] = {
    "data": ("data",), "train": ("ngrams", "train"), "engine": ("convert", "build", "verify"),
    "export": ("export",), "audit": ("audit",),
}  # fmt: skip
COMMANDS = {
    "data": "specdec-train data", "ngrams": "specdec-train ngrams", "train": "specdec-train",
    "convert": "specdec-convert", "build": "specdec-build", "verify": "specdec-verify",
    "export": "specdec-export", "audit": "specdec audit", "serve": "specdec-serve",
}  # fmt: skip
OUTPUTS = {
    "data": "output", "ngrams": "output", "train": "output_dir", "convert": "output_dir",
    "build": "output_dir", "export": "output_dir",
}  # fmt: skip
# Sections in the order of their commands.
ORDER = (
    "data", "ngrams", "train", "convert", "build", "verify", "export", "serve", "audit",
)  # fmt: skip
RESUMED = ("data", "train")
# Options that jobs set by themselves, or with which a command writes nothing.
REFUSED = ("force", "resume", "shard", "merge", "sanity", "plan", "dry_run")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ASSIGNMENT = re.compile(r"\w+=")  # of a variable, before a command
RENDEZVOUS_PORT = 29400  # torchrun's own default
MAX_PORT = 65535
DEFAULT_PORT = {"http": 80, "https": 443}


@dataclasses.dataclass(frozen=True)
class Command:
    """Command of a stage; all texts are of bash, quoted.

    mark: name of the files that say that it was begun and done. output: what it writes, if
    anything. line: the command itself.
    """

    mark: str
    output: str
    line: str


@dataclasses.dataclass(frozen=True)
class Server:
    """Server that runs beside a stage's commands, or is the stage.

    line: its command, of bash. port: that of node 0. url: its base, of bash, with `$port`.
    """

    line: str
    port: int
    url: str
    seconds: int


@dataclasses.dataclass(frozen=True)
class Stage:
    """Stage of a recipe, which becomes a job.

    num_shards: tasks with a part of the work each. num_nodes: nodes that work together. marks: of
    all tasks, those of its last command.
    """

    name: str
    commands: Sequence[Command]
    resources: Resources
    marks: Sequence[str] = ()
    server: Server | None = None
    num_shards: int = 1
    num_nodes: int = 1


class Recipe:
    """Recipe whose sections are checked; and the recipes that come before it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_file():
            raise UsageError(
                f"recipe {path} is no file", "write it to a file: jobs carry a copy of it"
            )  # fmt: skip
        self.sections = read_sections(path)
        self.text = path.read_text(encoding="utf-8")
        self.jobs: Jobs = read_jobs(self.sections.get("jobs"), path)
        self.settings = {
            name: _read_section(path, name) for name in self.sections if name in COMMANDS
        }
        self.before = [Path(name) for name in self.jobs.settings.before]
        for name, settings in self.settings.items():
            _check_section(path, name, settings)

    @property
    def unused_sections(self) -> list[str]:
        """Sections of which no job is made."""
        return [name for name in self.sections if name not in COMMANDS and name != "jobs"]

    def make_mark(self, section: str) -> str:
        """Return the mark of a section's command: with a hash of all that its output depends on.

        That are its section, those before it and the recipes before this one; no resources.
        """
        index = ORDER.index(section)
        # The audit is of what is served.
        names = ORDER if section == "audit" else ORDER[: index + 1]
        parts = [read_sections(path) for path in self.before]
        work = [{name: part.get(name) for name in ("convert", "build")} for part in parts]
        work.append({name: self.sections.get(name) for name in names})
        text = json.dumps(work, sort_keys=True, default=str)
        return f"{section}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _read_section(path: Path, name: str) -> Any:
    """Return a section's settings, checked as its command checks them."""
    command = load_command("train" if name in ("data", "ngrams") else name)
    if name in ("data", "ngrams"):
        command = command.subcommands[name]  # type: ignore[assignment]
    return resolve_settings(command.settings_class, name, {}, path)


def _check_section(path: Path, name: str, settings: Any) -> None:
    """Raise UsageError for settings with which a section makes no job."""
    for key in REFUSED:
        if getattr(settings, key, None):
            raise UsageError(
                f"recipe {path}: {key} in section {name}, of which a job is made",
                "leave it out: jobs go on by themselves, and jobs.data.shards says how many shards",
            )
    if name in OUTPUTS:
        try:
            require(settings, OUTPUTS[name])
        except UsageError as error:
            raise UsageError(
                f"recipe {path}: section {name}: {error.message}", error.hint
            ) from None


def list_stages(recipe: Recipe) -> list[Stage]:
    """Return a recipe's stages in the order of their jobs."""
    stages = [stage for name in STAGE_RESOURCES if (stage := _make_stage(recipe, name)) is not None]
    if not stages:
        raise SpecDecError(
            f"recipe {recipe.path} has no section that a job is made of",
            f"write one of {', '.join(COMMANDS)}",
        )
    names = [stage.name for stage in stages]
    for name in recipe.jobs.named_stages:
        if name not in names:
            raise UsageError(
                f"recipe {recipe.path}: jobs.{name}, and no such job: {_explain_stage(name)}",
                f"leave it out; the jobs are {', '.join(names)}",
            )
    _check_outputs(recipe, stages)
    return stages


def _check_outputs(recipe: Recipe, stages: Sequence[Stage]) -> None:
    """Raise UsageError where two commands would write one output."""
    writers: dict[str, str] = {}
    for stage in stages:
        for command in stage.commands:
            label = f"{command.line.partition(' --config')[0]} of job {stage.name}"
            output = os.path.normpath(command.output)
            if command.output not in ("", "''") and output in writers:
                raise UsageError(
                    f"recipe {recipe.path}: {writers[output]} and {label} both write {output}",
                    "give each its own output",
                )
            writers[output] = label


def _explain_stage(name: str) -> str:
    """Return what a stage comes of, for a recipe without it."""
    if name == "prepare":
        return "it runs the recipes of jobs.before"
    if name == "merge":
        return "it needs jobs.data.shards of 2 or more"
    sections = SECTIONS_OF_STAGES.get(name, (name,))
    return f"it runs the sections {', '.join(sections)}"


def _make_stage(recipe: Recipe, name: str) -> Stage | None:
    makers = {"prepare": _prepare, "data": _make_data, "merge": _merge, "train": _train,
              "audit": _audit, "serve": _serve}  # fmt: skip
    if name in makers:
        return makers[name](recipe)
    return _finish(recipe, name, list(_list_commands(recipe, SECTIONS_OF_STAGES[name])))


def _finish(recipe: Recipe, name: str, commands: Sequence[Command], **facts: Any) -> Stage | None:
    """Return a stage of one task; None without commands."""
    if not commands:
        return None
    return Stage(
        name, commands, recipe.jobs.stages[name], marks=(commands[-1].mark,), **facts
    )  # fmt: skip


def _list_commands(
    recipe: Recipe, sections: Sequence[str], file_name: str = "recipe.yaml", prefix: str = ""
) -> Iterator[Command]:
    """Yield the commands of those of the sections that a recipe has."""
    for section in sections:
        if section in recipe.settings:
            output = getattr(recipe.settings[section], OUTPUTS.get(section, ""), "")
            yield Command(
                mark=prefix + recipe.make_mark(section), output=shlex.quote(str(output)),
                line=_name_command(section, file_name),
            )  # fmt: skip


def _name_command(section: str, file_name: str = "recipe.yaml") -> str:
    """Return the command of a section, which reads the copy of the recipe beside the jobs."""
    line = f'{COMMANDS[section]} --config "$jobs"/{shlex.quote(file_name)}'
    return f"{line} --resume" if section in RESUMED else line


def _prepare(recipe: Recipe) -> Stage | None:
    commands: list[Command] = []
    for number, path in enumerate(recipe.before):
        before = Recipe(path)
        if before.before:
            raise UsageError(
                f"jobs.before: {path} has jobs.before itself: {', '.join(map(str, before.before))}",
                f"list all of them in jobs.before of {recipe.path}, in their order",
            )
        found = list(
            _list_commands(before, ("convert", "build"), name_copy(number), f"before-{number}.")
        )
        if not found:
            raise UsageError(
                f"jobs.before: {path} has neither a section convert nor build", "leave it out"
            )
        commands += found
    return _finish(recipe, "prepare", commands)


def name_copy(number: int) -> str:
    """Return the name that a recipe of `jobs.before` has beside the jobs."""
    return f"before-{number}.yaml"


def _make_data(recipe: Recipe) -> Stage | None:
    if "data" not in recipe.settings:
        return None
    settings, resources = recipe.settings["data"], recipe.jobs.stages["data"]
    assert isinstance(resources, DataResources)
    (command,) = _list_commands(recipe, ("data",))
    count, server = resources.shards, None
    if resources.server is not None:
        urls = settings.base_url
        if len(urls) != 1 or settings.engine_dir is not None:
            raise UsageError(
                f"jobs.data.server, and section data names {len(urls)} servers"
                f"{' and an engine' if settings.engine_dir is not None else ''}",
                "give base_url one address at which the server answers, and no engine_dir",
            )
        server = _make_server(resources, urls[0], "data.base_url")
        if server.port + count > MAX_PORT + 1:
            raise UsageError(
                f"data.base_url has port {server.port}, and {count} shards have one each up to"
                f" {server.port + count - 1}", f"give a port of at most {MAX_PORT + 1 - count}",
            )  # fmt: skip
        if count > 1 and not re.search(r"\$\{?port\b", server.line):
            raise UsageError(
                f"jobs.data.server without $port, and {count} shards, of which a node may have two",
                "write --port $port in the server's command",
            )
        command = dataclasses.replace(command, line=f'{command.line} --base-url "$url"')
    if count > 1:
        command = Command(
            mark=f'{command.mark}."$index"-of-{count}',
            output=_name_shard(settings.output, '"$index"', count),
            line=f'{command.line} --shard "$index"/{count}',
        )  # fmt: skip
    marks = [command.mark.replace('"$index"', str(number)) for number in range(count)]
    return Stage("data", [command], resources, marks=marks, server=server, num_shards=count)


def _name_shard(output: Path, index: str, count: int) -> str:
    """Return the file of a shard, as specdec-train names it, quoted for bash."""
    stem = shlex.quote(str(output.with_suffix("")))
    return f"{stem}.{index}-of-{count}{shlex.quote(output.suffix)}"


def _merge(recipe: Recipe) -> Stage | None:
    resources = recipe.jobs.stages["data"]
    assert isinstance(resources, DataResources)
    if "data" not in recipe.settings or resources.shards == 1:
        return None
    output, count = recipe.settings["data"].output, resources.shards
    files = " ".join(_name_shard(output, str(number), count) for number in range(count))
    quoted = shlex.quote(str(output))
    line = f"specdec-train data --merge {files} --output {quoted}"
    return _finish(recipe, "merge", [Command(f"{recipe.make_mark('data')}.merge", quoted, line)])


def _train(recipe: Recipe) -> Stage | None:
    commands = list(_list_commands(recipe, SECTIONS_OF_STAGES["train"]))
    resources = recipe.jobs.stages["train"]
    assert isinstance(resources, TrainResources)
    nodes, processes = resources.nodes, resources.processes or max(1, resources.gpus)
    server = None
    if "train" in recipe.settings:
        if resources.server is not None:
            url = recipe.settings["train"].hidden_states_from
            if url is None or "://" not in url or nodes > 1:
                raise UsageError(
                    f"jobs.train.server on {nodes} nodes, and train.hidden_states_from is {url}",
                    "such a server gives hidden states to a training on its own node:"
                    " give hidden_states_from its URL, and jobs.train.nodes 1",
                )
            server = _make_server(resources, url, "train.hidden_states_from")
        launcher = _name_launcher(recipe, nodes, processes)
        if launcher:
            line = commands[-1].line.replace("specdec-train", '"$(command -v specdec-train)"', 1)
            commands[-1] = dataclasses.replace(commands[-1], line=f"{launcher} {line}")
    elif nodes > 1:
        raise UsageError(f"jobs.train.nodes is {nodes} without a section train", "leave it out")
    return _finish(recipe, "train", commands, server=server, num_nodes=nodes)


def _name_launcher(recipe: Recipe, nodes: int, processes: int) -> str:
    """Return torchrun's part of the training's command; an empty text for one process."""
    if nodes == 1:
        flags = f"torchrun --standalone --nproc-per-node {processes}"
        return flags if processes > 1 else ""
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {processes} --rdzv-backend c10d"
        f' --rdzv-endpoint "$SPECDEC_HEAD:{RENDEZVOUS_PORT}"'
        f" --rdzv-id {recipe.jobs.name}-{recipe.make_mark('train')}"
        f" --max-restarts {recipe.jobs.stages['train'].retries}"
    )


def _make_server(resources: ServerResources, base_url: str, label: str) -> Server:
    """Return the server of `jobs.STAGE.server`, which answers at a URL of the recipe."""
    assert resources.server is not None
    line = resources.server.strip()
    _check_line(line)
    return Server(line, *_split_url(base_url, label), seconds=resources.server_wait)


def _check_line(line: str) -> None:
    """Raise UsageError for a server's line that is not one command, of which one is executed."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError as error:
        raise UsageError(f"the server's command is {line!r}: {error}", "close it") from None
    operators = [word for word in words if set(word) <= {*"&|;"}]
    if "\n" in line.replace("\\\n", "") or operators or not words or ASSIGNMENT.match(words[0]):
        raise UsageError(
            f"the server's command is {line!r}, which is not one command",
            "put what comes before it into jobs.setup, and variables into jobs.env",
        )


def _split_url(base_url: str, label: str) -> tuple[int, str]:
    """Return the port of a URL on this machine, and the URL of bash with `$port`."""
    parsed = urlsplit(base_url)
    try:
        port = parsed.port or DEFAULT_PORT.get(parsed.scheme)
    except ValueError:
        port = None
    if parsed.hostname not in LOOPBACK or port is None:
        raise UsageError(
            f"{label} is {base_url!r}, and its server is started on the job's own node",
            "give its address there, such as http://127.0.0.1:8000/v1",
        )
    path = shlex.quote(parsed.path.rstrip("/")) if parsed.path.rstrip("/") else ""
    return port, f"{parsed.scheme}://127.0.0.1:$port{path}"


def _audit(recipe: Recipe) -> Stage | None:
    if "audit" not in recipe.settings:
        return None
    settings = recipe.settings["audit"]
    require(settings, "base_url", "model")
    commands = list(_list_commands(recipe, ("audit",)))
    served = _find_server(recipe)
    if served is None:  # one that runs elsewhere is audited
        return _finish(recipe, "audit", commands)
    port, url = _split_url(settings.base_url, "audit.base_url")
    if port != served.port:
        raise UsageError(
            f"audit.base_url has port {port}, and the server that is audited {served.port}",
            f"give audit.base_url http://127.0.0.1:{served.port}/v1",
        )
    if "serve" in recipe.settings:
        _check_served_name(recipe)
    return _finish(recipe, "audit", commands, server=dataclasses.replace(served, url=url))


def _check_served_name(recipe: Recipe) -> None:
    """Raise UsageError where the audit asks for another model than the one that is served."""
    serve, model = recipe.settings["serve"], recipe.settings["audit"].model
    folder = Path(serve.model_dir) if serve.model_dir else serve.engine_dir.resolve()
    served_name = serve.served_model_name or folder.name.removesuffix(".gguf")
    if model != served_name:
        raise UsageError(
            f"audit.model is {model!r}, and the model is served as {served_name!r}",
            f"give audit.model {served_name}, or serve.served_model_name {model}",
        )


def _find_server(recipe: Recipe) -> Server | None:
    """Return the server that the recipe ends with, ours or another command; None for none."""
    resources = recipe.jobs.stages["serve"]
    assert isinstance(resources, ServerResources)
    has_section = "serve" in recipe.settings
    if has_section and resources.server is not None:
        raise UsageError(
            "jobs.serve.server and a section serve are both given",
            "one server is started: keep one",
        )
    if has_section:
        serve = recipe.settings["serve"]
        if serve.model_dir is None:
            require(serve, "engine_dir")
        if serve.port == 0:
            raise UsageError("serve.port is 0, which clients cannot know", "give it a number")
        line = f'{_name_command("serve")} --port "$port"'
        return Server(line, serve.port, "", resources.server_wait)
    if resources.server is not None:
        if "audit" not in recipe.settings:
            raise UsageError(
                "jobs.serve.server without a section audit", "give audit.base_url and audit.model:"
                " the address and the model's name at the server",
            )  # fmt: skip
        return _make_server(resources, recipe.settings["audit"].base_url, "audit.base_url")
    return None


def _serve(recipe: Recipe) -> Stage | None:
    server = _find_server(recipe)
    if server is None:
        return None
    resources = recipe.jobs.stages["serve"]
    num_shards = getattr(resources, "replicas", 1)
    session_dir = getattr(recipe.settings.get("serve"), "session_dir", None)
    if num_shards > 1 and session_dir is not None:
        raise UsageError(
            f"jobs.serve.replicas is {num_shards}, and serve.session_dir is {session_dir}, which"
            " one server alone may use", "leave one of them out",
        )  # fmt: skip
    return Stage("serve", [], resources, server=server, num_shards=num_shards)


def list_missing(scheduler: str, recipe: Recipe, stages: Sequence[Stage]) -> Problems:
    """List what a scheduler needs and a recipe lacks."""
    if scheduler == "slurm":
        return Problems()
    serve = recipe.settings.get("serve")
    host = None if serve is None else serve.host
    is_sky = scheduler == "skypilot"
    no_image = [stage.name for stage in stages if not is_sky and stage.resources.image is None]
    no_type = [
        stage.name for stage in stages
        if is_sky and stage.resources.gpus and stage.resources.gpu_type is None
    ]  # fmt: skip
    return Problems.from_table(
        (
            recipe.jobs.settings.storage is None,
            f"jobs.storage is missing, which --to {scheduler} needs: the stages meet on its files",
            "give a bucket such as s3://NAME, or a volume's name" if is_sky
            else "give the name of a PersistentVolumeClaim that several nodes may write",
        ),
        (
            not recipe.jobs.find_workdir(scheduler).is_absolute(),
            f"jobs.workdir is {recipe.jobs.settings.workdir}, where the storage is to be mounted",
            "give a path that begins with /",
        ),
        (
            no_image, f"jobs.image is missing for {', '.join(no_image)}",
            "give an image that has specdec",
        ),
        (
            no_type, f"jobs.gpu_type is missing for {', '.join(no_type)}",
            "give SkyPilot's name, as H100",
        ),
        (
            host in LOOPBACK,
            f"serve.host is {host}, at which nothing outside of its node reaches the server",
            "give serve.host 0.0.0.0, and the server's key by jobs.secrets: [SPECDEC_API_KEY]",
        ),
    )  # fmt: skip
