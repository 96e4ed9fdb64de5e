"""TensorRT-LLM's ModelRunnerCpp, called so that nothing is ignored, cut or mixed up in silence.

Its versions take different arguments, and an unknown keyword argument of `generate` is dropped
without a word: options are compared with the installed signatures instead of with a version number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.decode.sampling import SamplingParams
from specdec.engine.verification import Verification
from specdec.errors import SpecDecError, summarize
from specdec.system import logs
from specdec.trtllm.engine_folder import EngineFolder

logger = logs.get_logger(__name__)

NO_END = -1  # an end id that no token has: the runtime then ends only at the length
# A runner's executor: `session` in 0.14 and 1.x, another name in some states of 1.x (03832911).
EXECUTOR_NAMES = ("session", "executor")
# Parts of the runtime's messages, and what helps.
REMEDIES = (
    ("incompatible device", "build the engine again on a GPU of the kind that runs it"),
    ("plan file", "build the engine again with the TensorRT that is installed here"),
    ("libmpi", "install the MPI that TensorRT-LLM was built with; `specdec doctor` says more"),
    ("out of memory", "lower --kv-cache-free-gpu-memory-fraction, or use a GPU with more memory"),
    ("cudamalloc", "lower --kv-cache-free-gpu-memory-fraction, or use a GPU with more memory"),
    ("serializ", "build the engine again with the TensorRT that is installed here"),
    ("world size", "start as many processes as the engine has ranks, or none at all"),
    ("maximum draft tokens", "draft fewer tokens, or build with a larger --max-draft-len"),
    ("maximum input length", "shorten the prompt, or build with a larger --max-input-len"),
)


@dataclasses.dataclass(frozen=True)
class RowOutput:
    """Output of one row of a call: new tokens only.

    logits: [tokens or more, V], those that each was chosen by, as the runtime has them: of its own
    type, V padded. num_iterations: decoding steps, that of the prompt included; None where the
    runtime does not tell.
    """

    tokens: list[int]
    logits: Tensor | None = None
    num_iterations: int | None = None


def hush_stdout() -> contextlib.AbstractContextManager[Any]:
    """Send to stderr what the package prints: its banner, and the lines of its logger.

    What it writes from C++ does not pass here; `specdec.command.stdout` sees to that.
    """
    return contextlib.redirect_stdout(sys.stderr)


@contextlib.contextmanager
def call_runtime(doing: str) -> Iterator[None]:
    """Keep stdout clean, and turn whatever the runtime raises into an error of ours."""
    try:
        with hush_stdout():
            yield
    except SpecDecError:
        raise
    except Exception as error:  # the runtime raises anything, from C++ as from asserts
        text = summarize(error)
        hints = [hint for fragment, hint in REMEDIES if fragment in str(error).lower()]
        raise SpecDecError(
            f"TensorRT-LLM failed {doing}: {text}",
            hints[0] if hints else "its own log above says more; --debug shows the traceback",
        ) from error


def import_runtime() -> Any:
    """Import TensorRT-LLM; one clear sentence where it is not installed or does not load."""
    try:
        with hush_stdout():
            return importlib.import_module("tensorrt_llm.runtime").ModelRunnerCpp
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("tensorrt_llm"):
            raise SpecDecError(
                f"TensorRT-LLM is installed but lacks {error.name}",
                "install tensorrt-llm again, with what it requires",
            ) from None
        raise SpecDecError(
            "this engine was built for TensorRT-LLM, which is not installed here",
            "run it where tensorrt-llm is, in NVIDIA's container for instance, or build the"
            " checkpoint with --backend torch",
        ) from None
    except Exception as error:  # noqa: BLE001 - a library that does not load raises anything
        raise SpecDecError(
            f"TensorRT-LLM does not load here: {summarize(error)}",
            "`specdec doctor` shows what is missing",
        ) from None


def find_rank() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, as MPI itself has them."""
    package = importlib.import_module("tensorrt_llm")
    return int(package.mpi_rank()), int(package.mpi_world_size())


def has_orchestrator(runtime: Any) -> bool:
    """Return whether several ranks can be led from a plain process."""
    return "is_orchestrator_mode" in inspect.signature(runtime.from_dir).parameters


class IterationCounter:
    """Stands for a runner's executor and keeps the number of iterations that responses carry.

    0.14's carry none; 1.x's `decoding_iter`.
    """

    def __init__(self, executor: Any) -> None:
        self.executor = executor
        self._ids: list[int] = []
        self._iterations: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executor, name)

    def enqueue_requests(self, requests: Any) -> Any:
        self._ids = self.executor.enqueue_requests(requests)
        self._iterations = {}
        return self._ids

    def await_responses(self, *args: Any, **kwargs: Any) -> Any:
        batches = self.executor.await_responses(*args, **kwargs)
        # For several ids, as 0.14's runner asks, there is a list for each.
        responses = [
            one for batch in batches for one in (batch if isinstance(batch, list) else [batch])
        ]
        for response in responses:
            if not response.has_error() and response.result.is_final:
                count = getattr(response.result, "decoding_iter", None)
                if type(count) is int:
                    self._iterations[response.request_id] = count
        return batches

    def list_iterations(self) -> list[int | None]:
        """Return the iterations of the last call's rows, in their order."""
        return [self._iterations.get(number) for number in self._ids]


class TensorRTRunner:
    """A loaded engine; rank 0's, where there are several."""

    def __init__(self, folder: EngineFolder, options: Mapping[str, Any]) -> None:
        self.folder = folder
        runtime = import_runtime()
        parameters = inspect.signature(runtime.from_dir).parameters
        if unknown_options := sorted(name for name in options if name not in parameters):
            raise SpecDecError(
                f"this TensorRT-LLM's runner does not know {', '.join(unknown_options)}",
                "install the version that the engine was built with",
            )
        if folder.manifest is not None:
            rank_name = (
                "" if options.get("is_orchestrator_mode") else f"rank{options.get('rank', 0)}"
            )
            Verification(folder.folder, (f"{rank_name}.engine",)).finish()
        with call_runtime(f"to load {folder.folder}"):
            self._runner = runtime.from_dir(engine_dir=str(folder.folder), **options)
        generate_parameters = inspect.signature(runtime.generate).parameters
        self._takes_logits = "output_generation_logits" in generate_parameters
        self._counter: IterationCounter | None = None
        for name in EXECUTOR_NAMES:
            if hasattr(self._runner, name):
                self._counter = IterationCounter(getattr(self._runner, name))
                setattr(self._runner, name, self._counter)
                break

    @property
    def executor(self) -> Any:
        """The runtime's own executor, for requests that come and go."""
        if self._counter is None:
            raise SpecDecError(
                "this TensorRT-LLM's runner has its executor under no name that is known",
                "install a release up to 1.2",
            )
        return self._counter.executor

    def generate(
        self,
        texts: Sequence[Sequence[int]],
        *,
        drafts: Sequence[Sequence[int]] | None = None,
        draft_logits: Sequence[Tensor] | None = None,
        keep_logits: bool = False,
        **call: Any,
    ) -> list[RowOutput]:
        """Continue texts with at most `max_new_tokens` each; `call` as of `_make_arguments`.

        drafts: of each text, one token or more. With them the runtime returns logits in the order
        in which requests happen to complete: those are then run one by one.
        """
        if keep_logits and drafts is not None and len(texts) > 1:
            return self._generate_each(texts, drafts, draft_logits, **call)
        arguments = self._make_arguments(texts, **call)
        if drafts is not None:
            assert all(drafts), "the runtime takes no empty draft"
            arguments["draft_tokens_list"] = [list(draft) for draft in drafts]
            arguments["draft_logits_list"] = None if draft_logits is None else list(draft_logits)
        if keep_logits and self._takes_logits:
            arguments["output_generation_logits"] = True
        with call_runtime("to generate"):
            output = self._runner.generate(**arguments)
        tokens = self._read_tokens(output, texts)
        kept = self._read_logits(output, tokens) if keep_logits else [None] * len(texts)
        iterations = self.list_iterations(len(texts))
        return [RowOutput(*row) for row in zip(tokens, kept, iterations, strict=True)]

    def _generate_each(
        self,
        texts: Sequence[Sequence[int]],
        drafts: Sequence[Sequence[int]],
        draft_logits: Sequence[Tensor] | None,
        **call: Any,
    ) -> list[RowOutput]:
        """Continue texts with drafts in a call each, whose logits are then their own."""
        rows = []
        for index, text in enumerate(texts):
            logits = None if draft_logits is None else [draft_logits[index]]
            rows += self.generate(
                [text], drafts=[drafts[index]], draft_logits=logits, keep_logits=True, **call
            )
        return rows

    def stream(self, texts: Sequence[Sequence[int]], **call: Any) -> Iterator[list[list[int]]]:
        """Yield every row's new tokens so far, whenever some row has more."""
        arguments = self._make_arguments(texts, **call)
        with call_runtime("to generate"):
            steps = iter(self._runner.generate(streaming=True, **arguments))
        while True:
            with call_runtime("to generate"):
                output = next(steps, None)
            if output is None:
                return
            yield self._read_tokens(output, texts)

    def widen(self, logits: Tensor) -> Tensor:
        """Return logits [tokens, V] in float32 on the CPU, without the vocabulary's padding."""
        return logits[:, : self.folder.vocab_size].float().cpu()

    def list_iterations(self, num_rows: int) -> list[int | None]:
        """Return the decoding steps of the last call's rows; None for unknown numbers."""
        counts = self._counter.list_iterations() if self._counter is not None else []
        return counts if len(counts) == num_rows else [None] * num_rows

    def _make_arguments(
        self,
        texts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: SamplingParams,
        seed: int,
        end_id: int = NO_END,
        stop_ids: Sequence[Sequence[Sequence[int]]] | None = None,
    ) -> dict[str, Any]:
        """Return the arguments of ModelRunnerCpp.generate.

        stop_ids: for each text, sequences of tokens that end it. An end id must be given: the
        runner pads its output with it.
        """
        arguments: dict[str, Any] = {
            "batch_input_ids": [torch.tensor(list(text), dtype=torch.int32) for text in texts],
            "max_new_tokens": max_new_tokens, "end_id": end_id, "pad_id": max(end_id, 0),
            "return_dict": True, "output_sequence_lengths": True, "num_beams": 1,
        }  # fmt: skip
        if sampling.is_greedy:
            arguments |= {"top_k": 1, "temperature": 1.0}
        else:
            arguments |= {
                "top_k": sampling.top_k, "top_p": sampling.top_p,
                "temperature": sampling.temperature, "random_seed": seed,
            }  # fmt: skip
        if stop_ids is not None and any(stop_ids):
            arguments["stop_words_list"] = [[list(ids) for ids in row] for row in stop_ids]
        return arguments

    def _read_tokens(self, output: Any, texts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Cut each row's new tokens out of the output, which begins with its prompt."""
        ids, lengths = output["output_ids"], output["sequence_lengths"]
        if ids.dim() != 3 or lengths.dim() != 2 or len(ids) != len(texts):
            raise SpecDecError(
                f"TensorRT-LLM returned output_ids {list(ids.shape)} and sequence_lengths"
                f" {list(lengths.shape)} for {len(texts)} requests",
                "this is not the form that its releases up to 1.2 have",
            )
        rows = []
        for row, (text, length) in enumerate(zip(texts, lengths[:, 0].tolist(), strict=True)):
            row_ids = ids[row, 0, :length].tolist()
            if row_ids[: len(text)] != list(text):
                raise SpecDecError(
                    f"TensorRT-LLM's output of row {row} does not begin with its {len(text)}"
                    " prompt tokens",
                    "this is not the form that its releases up to 1.2 have",
                )
            rows.append(row_ids[len(text) :])
        return rows

    def _read_logits(self, output: Any, tokens: Sequence[Sequence[int]]) -> list[Tensor | None]:
        """Take each row's logits [tokens or more, V]: a list with drafts, else one tensor."""
        logits = output.get("generation_logits")
        if logits is None or len(logits) != len(tokens):
            raise SpecDecError(
                f"TensorRT-LLM returned no generation logits for {self.folder.folder}",
                "build the engine with --gather-generation-logits",
            )
        rows: list[Tensor | None] = []
        for row, row_tokens in zip(logits, tokens, strict=True):
            row_logits = row[0]
            if len(row_logits) < len(row_tokens):
                raise SpecDecError(
                    f"TensorRT-LLM returned logits of {len(row_logits)} tokens for"
                    f" {len(row_tokens)}",
                    "leave --output-generation-logits out for this engine",
                )
            rows.append(row_logits)
        return rows
