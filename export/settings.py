"""Options of specdec-export."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.command.settings import require
from specdec.errors import UsageError
from specdec.methods import METHODS
from specdec.options import (
    Contradiction,
    add_options,
    like,
    name_flag,
    option_group,
    refuse_contradictions,
    setting,
)

MODELS = option_group("Models")
FORMAT = option_group("Format")
USE = option_group("Use")
DEPLOYMENT = option_group("Deployment")

RUNTIME_NAMES = ("vllm", "speculators", "sglang", "gguf", "trtllm-pytorch", "edge-llm", "hf")
FOLDERS = tuple(method.folder for method in METHODS.values() if method.folder)

# specdec-convert's options of drafters, all of which can be exported.
DrafterFolders = dataclasses.make_dataclass(
    "DrafterFolders",
    [
        (
            method.folder,
            "str | None",
            like(method.options["convert"], method.folder),
        )
        for method in METHODS.values()
        if method.folder
    ],
    frozen=True,
    kw_only=True,
)


@add_options(DrafterFolders)
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Options of specdec-export: each field is a flag."""

    checkpoint_dir: Path | None = MODELS(
        metavar="CKPT", help="A checkpoint of specdec-convert, instead of a drafter."
    )
    model_dir: str | None = MODELS(
        metavar="BASE",
        help="The drafter's target, a Hugging Face folder or Hub id; without a drafter, the model"
        " to export.",
    )
    to: str = FORMAT(
        required=True, choices=RUNTIME_NAMES, help="The runtime whose format is written."
    )
    output_dir: Path = FORMAT(required=True, help="Folder to write.")
    dtype: str = FORMAT(
        "auto", choices=("auto", "float16", "bfloat16", "float32"),
        help="Type of the weights; auto keeps the drafter's, or the target's if config.json tells"
        " none.",
    )  # fmt: skip
    gguf_type: str | None = FORMAT(
        choices=("F32", "F16", "BF16", "Q8_0"),
        help="Type of the matrices in a GGUF file; theirs if not given.",
    )
    num_draft_tokens: int | None = USE(
        minimum=1, metavar="N",
        help="Draft tokens a step in the commands and files written; 3 if not given, or as many as"
        " there are Medusa heads.",
    )  # fmt: skip
    trtllm_version: str = FORMAT(
        "1.2", choices=("1.2", "1.3"), help="With --to trtllm-pytorch: whose key names."
    )
    deploy: str | None = DEPLOYMENT(
        choices=("k8s", "dynamo", "llm-d"),
        help="With --to vllm: add the manifests that serve the folder there, and a job that audits"
        " the server.",
    )
    audit_image: str | None = DEPLOYMENT(
        metavar="IMAGE", help="With --deploy: the job's container image, which has specdec."
    )
    image: str | None = DEPLOYMENT(
        metavar="IMAGE", help="With --deploy: the replicas' container image, not its default."
    )
    storage: str = DEPLOYMENT(
        "models", metavar="CLAIM", help="With --deploy: the claim of the volume with the models."
    )
    replicas: int = DEPLOYMENT(2, minimum=1, metavar="N", help="With --deploy: servers.")
    gpus: int = DEPLOYMENT(1, minimum=1, metavar="N", help="With --deploy: GPUs of a server.")
    force: bool = setting(False, help="Replace the output folder.")
    json: bool = setting(False, help="Print what was written as one JSON object.")

    @property
    def drafters(self) -> dict[str, str]:
        """Folders of drafters in the settings, by option."""
        folders = {name: getattr(self, name) for name in FOLDERS}
        return {name: folder for name, folder in folders.items() if folder is not None}


CONTRADICTIONS: tuple[Contradiction, ...] = (
    (
        lambda s: s.checkpoint_dir is None and s.model_dir is None,
        "missing --model-dir", "give the drafter's target, or --checkpoint-dir",
    ),
    (
        lambda s: s.checkpoint_dir is not None and s.dtype != "auto",
        "--dtype has no effect with --checkpoint-dir: its weights keep their type",
        "leave it out, or convert the checkpoint again with it",
    ),
    (
        lambda s: s.gguf_type is not None and s.to != "gguf",
        "--gguf-type has no effect without --to gguf", "leave it out",
    ),
    (
        lambda s: s.trtllm_version != "1.2" and s.to != "trtllm-pytorch",
        "--trtllm-version has no effect without --to trtllm-pytorch", "leave it out",
    ),
    (
        lambda s: s.deploy is not None and s.to != "vllm",
        "--deploy writes manifests of vLLM", "give --to vllm, or leave it out",
    ),
    (
        lambda s: s.deploy is not None and s.audit_image is None,
        "missing --audit-image", "give an image that has specdec with its extra audit",
    ),
    *(
        (
            lambda s, name=name, default=default: s.deploy is None and getattr(s, name) != default,
            f"{name_flag(name)} has no effect without --deploy", "leave it out",
        )
        for name, default in (
            ("audit_image", None), ("image", None), ("storage", "models"), ("replicas", 2),
            ("gpus", 1),
        )
    ),
)  # fmt: skip


def check_settings(settings: ExportSettings) -> None:
    """Raise UsageError for missing options, and for options without effect."""
    require(settings)
    flags = [name_flag(name) for name in settings.drafters]
    if len(flags) > 1:
        raise UsageError(
            f"{' and '.join(flags)} are both given", "a folder holds one drafter: give one of them"
        )
    if settings.checkpoint_dir is not None and flags:
        raise UsageError(f"--checkpoint-dir and {flags[0]} are both given", "give one of them")
    refuse_contradictions(settings, CONTRADICTIONS)
