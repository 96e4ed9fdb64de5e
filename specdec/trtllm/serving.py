"""An engine of TensorRT-LLM for a server: requests come and go on its executor, which batches them.

The executor is the one that ModelRunnerCpp has made. What a request is made of is what the runners
of 0.14 and 1.x make theirs of, and the answers are read as they read them.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, cast

from specdec.decode.api import Engine, Output
from specdec.decode.encoding import use_template
from specdec.decode.prompts import find_end_ids
from specdec.decode.requests import NO_ROW, ActiveRequest, Request
from specdec.decode.sampling import SamplingParams
from specdec.decode.settings import DecodeSettings
from specdec.errors import Problems, SpecDecError, UsageError
from specdec.files.folders import TENSORRT_LLM
from specdec.methods import METHODS
from specdec.methods.draft_target import DraftTargetDraft, adapts_drafts
from specdec.methods.prompt_lookup import read_options as read_lookup_options
from specdec.options import as_options
from specdec.pretrained import load_tokenizer
from specdec.tokenizer import find_tokenizer
from specdec.trtllm.engine_folder import EXTERNAL, EngineFolder, read_engine_folder
from specdec.trtllm.followed import Followed
from specdec.trtllm.run_checks import (
    check_machine,
    check_requests,
    check_settings,
    find_build_problems,
    find_flag_problems,
)
from specdec.trtllm.run_options import make_method_options, make_shared_options
from specdec.trtllm.runner import (
    TensorRTRunner,
    call_runtime,
    find_rank,
    has_orchestrator,
    import_runtime,
)

# How long a step waits for tokens; meanwhile no new request is taken.
PATIENCE = datetime.timedelta(milliseconds=20)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutorSettings(DecodeSettings):
    """Settings of an engine, and what only TensorRT-LLM reads."""

    kv_cache_free_gpu_memory_fraction: float | None = None


class ExecutorEngine(Engine):
    """What `specdec.Engine` is to a server, on an engine folder of TensorRT-LLM."""

    @classmethod
    def open(
        cls,
        settings: DecodeSettings,
        tokenizer: Any = None,
        *,
        max_batch_size: int | None = None,
        max_seq_len: int | None = None,
        prompt_chunk: int | Literal["auto"] | None = None,
    ) -> ExecutorEngine:
        """Load an engine folder as `Engine.open` does; the executor decides how prompts are read.

        Raises SpecDecError for what the executor cannot do by itself.
        """
        if isinstance(prompt_chunk, int):
            raise UsageError(
                f"--prompt-chunk {prompt_chunk} has no effect on a TensorRT-LLM engine, whose"
                " executor decides how prompts are read",
                "leave it out",
            )
        folder = read_engine_folder(settings.engine_dir)
        if not isinstance(settings, ExecutorSettings):
            settings = ExecutorSettings(**vars(settings))
        settings = dataclasses.replace(
            settings,
            tokenizer_dir=find_tokenizer(settings.engine_dir, settings.tokenizer_dir),
            kv_cache_enable_block_reuse=folder.has_paged_context_fmha
            and folder.kv_cache_type == "PAGED",
        )
        for method in METHODS.values():
            method.read(settings)  # what is written wrong is told before anything is loaded
        check_settings(settings, settings.kv_cache_free_gpu_memory_fraction)
        drafts_itself = read_lookup_options(settings) is None and not adapts_drafts(settings)
        has_draft = as_options(settings, DraftTargetDraft).draft_engine_dir is not None
        if has_draft or folder.mode == EXTERNAL or not drafts_itself:
            raise SpecDecError(
                f"{folder.folder} takes drafts from outside at every step, which TensorRT-LLM's"
                " executor cannot be served with here",
                "run it with specdec-run, or serve it with Triton as docs/triton.md says",
            )
        problems = find_flag_problems(settings, folder)
        problems += find_build_problems(folder)
        problems.raise_all()
        made = make_method_options(settings, folder)
        if tokenizer is None and settings.tokenizer_dir is not None:
            tokenizer = load_tokenizer(settings.tokenizer_dir)
        tokenizer = use_template(tokenizer, settings.chat_template)
        end_ids = find_end_ids(settings, tokenizer)
        check_machine(folder, None, must_run=True)
        core = ExecutorCore(
            _lower_limits(folder, max_batch_size, max_seq_len), settings, made, tokenizer
        )
        return cls(cast(Any, core), settings, tokenizer, end_ids)

    @property
    def tells_origins(self) -> bool:
        """Whether it is known of each token how it came."""
        return self._executor.folder.mode is None

    def generate(self, prompts: Any, **settings: Any) -> list[Output]:
        raise SpecDecError(
            "an engine of TensorRT-LLM only streams here", "generate with specdec-run"
        )

    def make_token(self) -> None:
        """Make a token, to see that the engine can."""
        prompt = self._executor.make_first_request()
        with self.stream(prompt) as stream:
            for _ in stream:
                pass

    @property
    def _executor(self) -> ExecutorCore:
        return cast(ExecutorCore, self._get_core())

    def _make_batch(self, core: Any) -> Any:
        return ExecutorBatch(core, self.tokenizer)


class ExecutorCore:
    """A loaded engine, with what `Engine` reads of one."""

    is_lost = False
    num_reused_tokens = 0  # the runtime does not tell

    def __init__(
        self,
        folder: EngineFolder,
        settings: ExecutorSettings,
        method_options: Mapping[str, Any],
        tokenizer: Any,
    ) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self.config = SimpleNamespace(build=folder)
        self.max_seq_len = folder.max_total_len
        runtime = import_runtime()
        rank, size = find_rank()
        if size != 1:
            raise SpecDecError(
                f"MPI has {size} processes, and a server leads its ranks from a single one",
                "start it without mpirun or srun",
            )
        placement: dict[str, Any] = {"rank": rank}
        if folder.world_size > 1:
            if not has_orchestrator(runtime):
                raise SpecDecError(
                    f"the engine has {folder.world_size} ranks, and this TensorRT-LLM has no"
                    " orchestrator mode to lead them from a server",
                    "use release 1.0 or later, or an engine of one rank",
                )
            placement |= {"is_orchestrator_mode": True, "device_ids": [*range(folder.world_size)]}
        fraction = settings.kv_cache_free_gpu_memory_fraction
        options = make_shared_options(fraction) | placement | dict(method_options)
        options["kv_cache_enable_block_reuse"] = settings.kv_cache_enable_block_reuse
        self._runner: TensorRTRunner | None = TensorRTRunner(folder, options)
        with call_runtime("to load its bindings"):
            self._bindings = importlib.import_module("tensorrt_llm.bindings.executor")

    def check_ranks(self) -> None:
        """Nothing: the runtime tells of its ranks where they are asked for something."""

    def find_limits(self, *, drafts: bool) -> tuple[int, int]:
        """Tokens of the longest prompt, and of a prompt and its output."""
        return self.folder.max_input_len, self.max_seq_len

    def describe(self) -> dict[str, Any]:
        return {
            "method": self.folder.method, "backend": TENSORRT_LLM, "device": "cuda",
            "dtype": self.folder.dtype, "quantization": None, "tp_size": self.folder.tp_size,
        }  # fmt: skip

    def close(self) -> None:
        self._runner = None

    def check_requests(self, requests: Sequence[Request]) -> None:
        """Raise SpecDecError that lists every request that the engine cannot do."""
        problems = Problems()
        for request in requests:
            if request.keep_trees:
                problems.add(
                    f"{request.name} asks for draft trees, which is not offered with an engine of"
                    " TensorRT-LLM",
                    "leave it out, or serve an engine of the torch backend",
                    "keep_trees",
                )
        problems.raise_all()
        check_requests(requests, self.folder, None)

    def make_first_request(self) -> Request:
        """A request for one token, of the kind that the engine decodes."""
        samples = self.folder.method == "redrafter" and not self.folder.pretrained.get(
            "redrafter_greedy_search", True
        )
        return Request(
            index=0, input_ids=[0], max_output_len=1, end_ids=frozenset(),
            sampling=SamplingParams(temperature=1.0 if samples else 0.0),
        )  # fmt: skip

    def enqueue(self, followed: Followed) -> int:
        """Hand a request to the executor; return the number that its answers have."""
        request, made = followed.active.request, self._bindings
        sampling: dict[str, Any] = {"top_k": 1, "temperature": 1.0}
        if not request.sampling.is_greedy:
            params = request.sampling
            sampling = {
                "top_k": params.top_k, "top_p": params.top_p, "temperature": params.temperature,
                "seed": params.seed,
            }  # fmt: skip
        with call_runtime("to take a request"):
            return int(self._find_executor().enqueue_request(made.Request(
                input_token_ids=list(request.input_ids), max_tokens=request.max_output_len,
                streaming=True, end_id=followed.end_id, pad_id=max(followed.end_id, 0),
                sampling_config=made.SamplingConfig(beam_width=1, **sampling),
                output_config=made.OutputConfig(), stop_words=followed.stop_ids or None,
            )))  # fmt: skip

    def cancel(self, number: int) -> None:
        """Let the executor forget a request."""
        with call_runtime("to cancel a request"):
            self._find_executor().cancel_request(number)

    def await_responses(self) -> list[Any]:
        """What the executor has answered, after a short wait if that is nothing yet."""
        with call_runtime("to generate"):
            return list(self._find_executor().await_responses(timeout=PATIENCE))

    def _find_executor(self) -> Any:
        if self._runner is None:
            raise SpecDecError("this engine is closed", "load it again")
        return self._runner.executor


class ExecutorBatch:
    """The requests that are on the executor; what a `Batch` is to the streams of an `Engine`."""

    def __init__(self, core: ExecutorCore, tokenizer: Any) -> None:
        self._core, self._tokenizer = core, tokenizer
        self._running: dict[int, tuple[Followed, list[int]]] = {}  # with all its tokens

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def submit(self, request: Request) -> ActiveRequest:
        """Begin a request; what it becomes can be read from what is returned."""
        followed = Followed(
            request, NO_ROW, self._core.folder, self._tokenizer, follows_text=True
        )  # fmt: skip
        self._running[self._core.enqueue(followed)] = followed, []
        return followed.active

    def cancel(self, active: ActiveRequest) -> None:
        """Note that a request is to end, of which the executor hears when the next step begins."""
        active.is_cancelled = True

    def step(self) -> None:
        """Take what the executor has answered since the last step."""
        try:
            for number, (followed, _) in list(self._running.items()):
                followed.active.take_cancellation()
                if followed.active.finish_reason is not None:
                    self._forget(number)
            if self._running:
                for response in self._core.await_responses():
                    self._take(response)
        except BaseException:
            for number in list(self._running):
                self._forget(number)
            raise

    def _take(self, response: Any) -> None:
        number = response.request_id
        if number not in self._running:  # it was cancelled
            return
        followed, tokens = self._running[number]
        if response.has_error():
            del self._running[number]
            raise SpecDecError(
                f"TensorRT-LLM could not finish a request: {response.error_msg}",
                "its own log above says more",
            )
        result = response.result
        tokens += result.output_token_ids[0]
        if len(tokens) >= followed.active.request.max_output_len and not result.is_final:
            return  # what ends it, and knows the number of its steps, comes next
        followed.take(tokens)
        if result.is_final:
            del self._running[number]
            followed.end(tokens, getattr(result, "decoding_iter", None))
        elif followed.active.finish_reason is not None:  # at a stop word that only the text shows
            followed.end(tokens, None)
            self._forget(number)

    def _forget(self, number: int) -> None:
        del self._running[number]
        self._core.cancel(number)


def _lower_limits(
    folder: EngineFolder, max_batch_size: int | None, max_seq_len: int | None
) -> EngineFolder:
    """The folder as if it had been built for fewer and shorter requests."""
    for name, given, own in (
        ("max_batch_size", max_batch_size, folder.max_batch_size),
        ("max_seq_len", max_seq_len, folder.max_total_len),
    ):
        if given is not None and given > own:
            raise SpecDecError(
                f"--{name.replace('_', '-')} is {given}, the engine's is {own}",
                f"give {own} or less, or build a larger engine",
            )
    return dataclasses.replace(
        folder,
        max_batch_size=max_batch_size or folder.max_batch_size,
        max_seq_len=(max_seq_len or folder.max_total_len) + folder.max_draft_len,
        max_input_len=min(folder.max_input_len, max_seq_len or folder.max_input_len),
    )
