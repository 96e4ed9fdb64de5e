"""A model repository for Triton: the backend's own templates, filled in for an engine.

Templates and model.py files are Triton's, of the release that is to serve the engine: the folder
all_models/inflight_batcher_llm of its TensorRT-LLM backend. Known here are the variables in them.
A variable that is left out stays as it is in a text, which the backend takes as not set.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.command.settings import need, to_plain
from specdec.errors import Problems, SpecDecError, UsageError, join_names, suggest
from specdec.files.backends import TENSORRT_LLM, read_backend
from specdec.files.manifest import write_manifest
from specdec.files.staging import check_output_dir, stage_folder
from specdec.methods.lookahead import count_lookahead_tokens
from specdec.options import Contradiction, name_flag
from specdec.system import logs
from specdec.trtllm.engine_folder import (
    EXTERNAL,
    EngineFolder,
    read_engine_folder,
)

from .settings import BuildSettings

logger = logs.get_logger(__name__)

CONFIG = "config.pbtxt"
TARGET, DRAFT, BLS = "tensorrt_llm", "tensorrt_llm_draft", "tensorrt_llm_bls"
MODELS = ("preprocessing", TARGET, "postprocessing", "ensemble", BLS)
CONTAINER = Path("/app/all_models/inflight_batcher_llm")  # of NVIDIA's image of Triton
VARIABLE = re.compile(r"\$\{(\w+)\}")
# A text that is one variable may stay unset; anywhere else the file would not parse.
TEXT = re.compile(r'string_value:\s*"\$\{(\w+)\}"')
# Texts, comments, and the pieces between them, in which a value is a word or a number.
PIECES = re.compile(r'"(?:[^"\\\n]|\\.)*"|#[^\n]*|[^"#]+|"')
WORD = re.compile(r"[\w.+-]+", re.ASCII)

# The variables of each model's template, as of TensorRT-LLM 2a9abd95, 808059da, 89fd9b74, bff88ea8.
# A template without one with an asterisk is of no release that is known here.
_VARIABLES = {
    "preprocessing": (
        "triton_max_batch_size* max_queue_delay_microseconds max_queue_size tokenizer_dir* "
        "add_special_tokens multimodal_model_path visual_model_path engine_dir max_num_images "
        "preprocessing_instance_count* tokenizer_type"
    ),
    TARGET: (
        "triton_backend triton_max_batch_size* decoupled_mode* max_queue_delay_microseconds "
        "max_queue_size encoder_input_features_data_type logits_datatype "
        "prompt_embedding_table_data_type max_beam_width* batching_strategy* engine_dir* "
        "encoder_engine_dir max_tokens_in_paged_kv_cache max_attention_window_size "
        "sink_token_length batch_scheduler_policy kv_cache_free_gpu_mem_fraction* "
        "cross_kv_cache_fraction kv_cache_host_memory_bytes kv_cache_onboard_blocks "
        "enable_trt_overlap exclude_input_in_output* cancellation_check_period_ms "
        "stats_check_period_ms iter_stats_max_iterations request_stats_max_iterations "
        "enable_kv_cache_reuse* normalize_log_probs enable_chunked_context gpu_device_ids* "
        "participant_ids num_nodes lora_cache_optimal_adapter_size lora_cache_max_adapter_size "
        "lora_cache_gpu_memory_fraction lora_cache_host_memory_bytes lora_prefetch_dir "
        "decoding_mode lookahead_window_size lookahead_ngram_size lookahead_verification_set_size "
        "medusa_choices eagle_choices gpu_weights_percent enable_context_fmha_fp32_acc "
        "multi_block_mode cuda_graph_mode cuda_graph_cache_size speculative_decoding_fast_logits "
        "tokenizer_dir guided_decoding_backend xgrammar_tokenizer_info_path"
    ),
    "postprocessing": (
        "triton_max_batch_size* tokenizer_dir* skip_special_tokens tokenizer_type "
        "postprocessing_instance_count*"
    ),
    "ensemble": "triton_max_batch_size* logits_datatype",
    BLS: (
        "triton_max_batch_size* decoupled_mode* logits_datatype accumulate_tokens* "
        "tensorrt_llm_model_name* tensorrt_llm_draft_model_name* multimodal_encoders_name "
        "bls_instance_count* prompt_embedding_table_data_type"
    ),
}  # fmt: skip
KNOWN_VARIABLES = {model: text.replace("*", "").split() for model, text in _VARIABLES.items()}
NEEDED_VARIABLES = {
    model: [name[:-1] for name in text.split() if name.endswith("*")]
    for model, text in _VARIABLES.items()
}
# Variables that only the user knows, by the engine's mode.
USER_VARIABLES = {
    "medusa": ("medusa_choices",),
    "eagle": ("eagle_choices",),
    "lookahead_decoding": (
        "lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size",
    ),
}  # fmt: skip
# Variables that a user cannot choose for a pair of engines, with the reason.
FIXED_FOR_PAIRS = {
    "participant_ids": "it is for a server with ranks for each engine",
    "decoupled_mode": "the BLS model refuses to stream drafts",
    "enable_kv_cache_reuse": "drafts need it",
    "tensorrt_llm_model_name": "the models are named here",
    "tensorrt_llm_draft_model_name": "the models are named here",
}
# Variables whose value for the target is never the draft engine's too.
ENGINE_VARIABLES = ("engine_dir", "gpu_device_ids")
TRITON_FIELDS = ("triton_templates", "triton_draft_engine_dir", "triton_parameters")
FRACTION = "kv_cache_free_gpu_mem_fraction"


CONTRADICTIONS: tuple[Contradiction, ...] = (
    (
        lambda s: s.emit_triton is None
        and next((name_flag(name) for name in TRITON_FIELDS if getattr(s, name)), None),
        "{found} has no effect without --emit-triton", "leave it out",
    ),
    (
        lambda s: s.emit_triton is not None and s.emit_script is not None,
        "--emit-triton describes an engine that is there, --emit-script one that is not yet",
        "build the engine first; then call it with --output-dir and --emit-triton alone",
    ),
    (
        lambda s: s.emit_triton is not None and "tokenizer_dir" not in parse_parameters(s)[0],
        "--emit-triton needs the tokenizer's folder as the server will see it",
        "give --triton-parameters tokenizer_dir=DIR",
    ),
    (
        lambda s: s.emit_triton is not None and s.triton_draft_engine_dir is None
        and next(iter(parse_parameters(s)[1]), None),
        "--triton-parameters draft.{found} without --triton-draft-engine-dir",
        "give the draft engine",
    ),
)  # fmt: skip


def read_templates(settings: BuildSettings) -> dict[str, str]:
    """Fill each config.pbtxt; raise SpecDecError for missing and unknown variables."""
    folder = settings.triton_templates or CONTAINER
    texts, problems = {}, Problems()
    for model in MODELS:
        path = folder / model / CONFIG
        if not path.is_file():
            raise SpecDecError(
                f"{path} does not exist",
                "give --triton-templates: the folder all_models/inflight_batcher_llm of the"
                " TensorRT-LLM backend of Triton's release, in NVIDIA's image or from"
                " triton_backend/ of TensorRT-LLM's repository",
            )
        texts[model] = path.read_text(encoding="utf-8")
    user_values = {**(parameters := parse_parameters(settings))[0], **parameters[1]}
    template_variables = {model: set(VARIABLE.findall(text)) for model, text in texts.items()}
    for model, variables in template_variables.items():
        path = folder / model / CONFIG
        missing_names = [name for name in NEEDED_VARIABLES[model] if name not in variables]
        unknown_names = sorted(variables - set(KNOWN_VARIABLES[model]) - set(user_values))
        problems += Problems.from_table(
            (missing_names, f"{path} has no variable {join_names(missing_names)}",
             "give the templates unfilled, of a release up to TensorRT-LLM 1.2"),
            (unknown_names, f"{path} has unknown variables {join_names(unknown_names)}",
             "say what they are: --triton-parameters NAME=VALUE"),
        )  # fmt: skip
    all_variables = sorted(set().union(*template_variables.values()))
    for name in sorted(set(user_values) - set(all_variables)):
        fact = f"--triton-parameters {name}: no template has it{suggest(name, all_variables)}"
        problems.add(fact, "leave it out")
    problems.raise_all()
    return texts


def parse_parameters(settings: BuildSettings) -> tuple[dict[str, str], dict[str, str]]:
    """Read --triton-parameters, NAME=VALUE each: the target's, then those with "draft." first."""
    parameters: tuple[dict[str, str], dict[str, str]] = {}, {}
    for entry in settings.triton_parameters:
        name, equals, value = entry.partition("=")
        if not equals or not name or "$" in value:
            raise UsageError(
                f"--triton-parameters {entry!r}", "write NAME=VALUE, without dollar signs"
            )
        variable = name.removeprefix("draft.")
        if parameters[variable != name].setdefault(variable, value) != value:
            raise UsageError(f"--triton-parameters gives {name} twice", "keep one")
    return parameters


def plan_models(settings: BuildSettings) -> dict[str, dict[str, str]]:
    """Return each model's variables; raise SpecDecError that lists what does not fit."""
    target, folder = read_engine(settings.output_dir), settings.triton_draft_engine_dir
    draft = None if folder is None else read_engine(folder)
    target_values, draft_values = parse_parameters(settings)
    find_engine_problems(target, draft, target_values, draft_values).raise_all()
    batch = min(engine.max_batch_size for engine in (target, draft) if engine)
    common = {"triton_max_batch_size": str(batch), "max_queue_delay_microseconds": "0",
              "max_queue_size": "0"}  # fmt: skip
    logits = {"logits_datatype": "TYPE_FP16" if target.logits_dtype == "float16" else "TYPE_FP32"}
    reuses = target.mode == EXTERNAL or draft is not None

    def describe(engine: EngineFolder, user_values: Mapping[str, str]) -> dict[str, str]:
        return {
            **common, **logits, "triton_backend": "tensorrtllm", "decoupled_mode": "False",
            "max_beam_width": str(engine.max_beam_width),
            "batching_strategy": "inflight_fused_batching",
            "engine_dir": str(engine.folder.resolve()),
            "enable_kv_cache_reuse": str(reuses), "exclude_input_in_output": "True",
            "encoder_input_features_data_type": "TYPE_FP16",
            "prompt_embedding_table_data_type": "TYPE_FP16", **user_values,
        }  # fmt: skip

    models = {
        "preprocessing": {
            **common, "preprocessing_instance_count": "1", "add_special_tokens": "True",
            "engine_dir": str(target.folder.resolve()), **target_values,
        },
        TARGET: describe(target, target_values),
        "postprocessing": {
            **common, "postprocessing_instance_count": "1", "skip_special_tokens": "True",
            **target_values,
        },
        "ensemble": {**common, **logits, **target_values},
        BLS: {
            **common, **logits, "decoupled_mode": "False", "accumulate_tokens": "False",
            "bls_instance_count": "1", "tensorrt_llm_model_name": TARGET,
            "prompt_embedding_table_data_type": "TYPE_FP16",
            **({"tensorrt_llm_draft_model_name": DRAFT} if draft else {}), **target_values,
        },
    }  # fmt: skip
    if draft is not None:
        shared_values = {
            name: value for name, value in target_values.items() if name not in ENGINE_VARIABLES
        }
        models[DRAFT] = describe(draft, shared_values | draft_values)
    return models


def read_engine(folder: Path) -> EngineFolder:
    """Read an engine; raise SpecDecError for one that Triton's backend does not serve."""
    if (backend := read_backend(folder)) != TENSORRT_LLM:
        raise SpecDecError(
            f"{folder} was built for the backend {backend!r}, and Triton serves TensorRT-LLM's",
            "build it with --backend tensorrt-llm",
        )
    return read_engine_folder(folder)


def find_engine_problems(
    target: EngineFolder, draft: EngineFolder | None, target_values: Mapping[str, str],
    draft_values: Mapping[str, str],
) -> Problems:  # fmt: skip
    """List what keeps these engines from being served as they are asked to be."""
    user_names = USER_VARIABLES.get(target.mode or "", ())
    missing_names = [name for name in user_names if name not in target_values]
    target_devices = target_values.get("gpu_device_ids")
    draft_devices = draft_values.get("gpu_device_ids")
    problems = Problems.from_table(
        *((not is_fraction(values.get(FRACTION, "1")),
           f"{name} is {values.get(FRACTION)!r}", "give a number above 0, at most 1")
          for name, values in ((FRACTION, target_values), (f"draft.{FRACTION}", draft_values))),
        (missing_names,
         f"an engine of mode {target.mode} is served with {join_names(missing_names)}",
         "give --triton-parameters " + " ".join(f"{name}=..." for name in missing_names)),
        (target_values.get("speculative_decoding_fast_logits", "").lower() in ("true", "1"),
         "speculative_decoding_fast_logits needs participant_ids of each engine's own, and a"
         " server of as many ranks as both engines and one more",
         "leave it out; requests with use_draft_logits then pass logits through the server"),
        *((devices is not None and not are_devices(devices, engine.world_size),
           f"{flag} is {devices!r}, the engine has {engine.world_size} ranks",
           "give one device number a rank, as 0,1")
          for flag, devices, engine in (("gpu_device_ids", target_devices, target),
                                        ("draft.gpu_device_ids", draft_devices, draft)) if engine),
    )  # fmt: skip
    problems += find_window_problems(target, target_values)
    if draft is not None:
        problems += find_pair_problems(target, draft, target_values, draft_values)
    return problems


def find_pair_problems(
    target: EngineFolder, draft: EngineFolder, target_values: Mapping[str, str],
    draft_values: Mapping[str, str],
) -> Problems:  # fmt: skip
    """List what keeps one engine from drafting for the other behind a server."""
    target_devices, draft_devices = (
        set((values.get("gpu_device_ids") or "0").split(","))
        for values in (target_values, draft_values)
    )
    return Problems.from_table(
        *((name in {*target_values, *draft_values},
           f"--triton-parameters {name} with a draft engine: {reason}", "leave it out")
          for name, reason in sorted(FIXED_FOR_PAIRS.items())),
        (target.mode != EXTERNAL,
         f"{target.folder} has mode {target.mode} and takes no drafts of another engine",
         f"build the target with --speculative-decoding-mode {EXTERNAL}"),
        (draft.mode is not None,
         f"{draft.folder} has mode {draft.mode}", "draft with a plain engine"),
        *((not engine.has_paged_context_fmha,
           f"{engine.folder} cannot reuse blocks of its KV cache, which drafts need",
           "build it with --use-paged-context-fmha enable") for engine in (target, draft)),
        (target_devices & draft_devices and FRACTION not in {*target_values, *draft_values},
         "both engines are on one GPU, and each KV cache would take 0.9 of what is free",
         f"give --triton-parameters {FRACTION}=0.4, or gpu_device_ids and draft.gpu_device_ids"),
    )  # fmt: skip


def is_fraction(text: str) -> bool:
    """Return whether a text is a number above 0, at most 1."""
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False


def are_devices(text: str, count: int) -> bool:
    """Return whether a text lists so many numbers of devices."""
    numbers = text.split(",")
    return len(numbers) == count and all(number.isdecimal() for number in numbers)


def find_window_problems(target: EngineFolder, target_values: Mapping[str, str]) -> Problems:
    """List what keeps lookahead's window from filling the engine's drafts, as the runtime needs."""
    names = USER_VARIABLES["lookahead_decoding"]
    if target.mode != "lookahead_decoding" or not set(names) <= set(target_values):
        return Problems()
    sizes = [target_values[name] for name in names]
    are_good = all(size.isdecimal() and int(size) > 0 for size in sizes)
    count = count_lookahead_tokens(*map(int, sizes)) if are_good else 0
    return Problems.from_table(
        (not are_good,
         f"{join_names(names)} are {', '.join(sizes)}", "give three whole numbers"),
        (are_good and count != target.max_draft_len,
         f"lookahead [{','.join(sizes)}] drafts {count} tokens a step, and TensorRT-LLM wants"
         f" exactly the engine's max_draft_len, {target.max_draft_len}",
         f"choose others, or build with --max-draft-len {count}"),
    )  # fmt: skip


def fill(text: str, values: Mapping[str, str], path: Path) -> str:
    """Fill a template in; raise SpecDecError where a variable has no value and needs one."""
    if unset := set(VARIABLE.findall(TEXT.sub("", text))) - set(values):
        raise SpecDecError(
            f"{path} needs a value of {join_names(sorted(unset))}",
            "give --triton-parameters NAME=VALUE",
        )

    def fill_piece(piece: re.Match[str]) -> str:
        if piece[0].startswith("#"):
            return piece[0]
        is_text = piece[0].startswith('"')

        def fill_variable(match: re.Match[str]) -> str:
            value = values.get(match[1])
            if value is None:
                return match[0]
            if is_text:
                return escape(value)
            if not WORD.fullmatch(value):
                raise SpecDecError(
                    f"{path} takes a word or a number for {match[1]}, not {value!r}",
                    f"give --triton-parameters {match[1]}=VALUE, or leave it out",
                )
            return value

        return VARIABLE.sub(fill_variable, piece[0])

    return PIECES.sub(fill_piece, text)


def escape(value: str) -> str:
    """Write a value as protobuf's text format has it between quotes."""
    if "${" in value:
        raise SpecDecError(f"{value!r} holds '${{'", "Triton takes that for a value not set")
    return "".join(
        f"\\{c}" if c in '"\\' else f"\\{ord(c):03o}" if ord(c) < 32 or ord(c) == 127 else c
        for c in value
    )


def write_repository(settings: BuildSettings, templates: Mapping[str, str]) -> dict[str, Any]:
    """Write the model repository of the engine in output_dir; return what was written."""
    output, folder = need(settings.emit_triton), settings.triton_templates or CONTAINER
    input_paths = (settings.output_dir, settings.triton_draft_engine_dir, folder)
    inputs = [path for path in input_paths if path is not None]
    models = plan_models(settings)
    texts = {}
    for model, values in models.items():
        source = TARGET if model == DRAFT else model
        text = fill(templates[source], values, folder / source / CONFIG)
        texts[model] = text.replace(f'name: "{TARGET}"', f'name: "{model}"', 1)
    check_output_dir(output, force=settings.force, inputs=inputs)
    report = {"triton_dir": str(output), "models": list(models), "launch": make_launch(settings)}
    if settings.dry_run:
        return report
    with stage_folder(output, force=settings.force, inputs=inputs) as staged:
        for model, text in texts.items():
            source = TARGET if model == DRAFT else model
            shutil.copytree(folder / source, staged / model)
            (staged / model / CONFIG).write_text(text, encoding="utf-8")
            (staged / model / "1").mkdir(exist_ok=True)
        write_manifest(staged, kind="triton", settings=to_plain(settings), sources=[])
    logger.info("model repository %s; serve it with: %s", output, report["launch"])
    return report


def make_launch(settings: BuildSettings) -> str:
    """Return the command that serves the repository, in NVIDIA's image of Triton."""
    engines = ["--tensorrt_llm_model_name", f"{TARGET},{DRAFT}", "--multi-model"]
    if settings.triton_draft_engine_dir is None:
        engines = [f"--world_size={read_engine_folder(settings.output_dir).world_size}"]
    program = ["python3", "/app/scripts/launch_triton_server.py"]
    return shlex.join([*program, f"--model_repo={settings.emit_triton}", *engines])
