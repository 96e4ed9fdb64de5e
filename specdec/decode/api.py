"""The public API: an engine in this process, and its streams. docs/api.md is its page."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from specdec.decode.call_settings import (
    AnyPrompt,
    Settings,
    fill_prompt,
    list_prompts,
    make_defaults,
    make_prompt,
    read_options,
    refuse_long_names,
)
from specdec.decode.chats import make_chat_prompt, read_answer
from specdec.decode.engine import MeasuringTime, TorchEngine, load_engine
from specdec.decode.loop import Batch, Options
from specdec.decode.models import make_engines
from specdec.decode.outputs import Event, Output, describe_output
from specdec.decode.prompt_requests import find_end_ids, make_requests
from specdec.decode.requests import ActiveRequest, Request, RequestStats, choose_best
from specdec.decode.sessions import Sessions
from specdec.decode.settings import DecodeSettings
from specdec.errors import (
    EngineBusyError,
    EngineLostError,
    PromptError,
    SpecDecError,
    StepError,
    UsageError,
    shorten,
)
from specdec.files.backends import find_backend
from specdec.files.session_files import SessionFolder
from specdec.files.vocabulary import has_same_tokens
from specdec.system import logs
from specdec.text.call_formats import AUTO, NO_FORMATS, ChatFormats
from specdec.text.call_probe import choose_formats
from specdec.text.encoding import encode_prompt, find_continued_text, use_template
from specdec.text.grammar import GrammarCompiler
from specdec.text.prompts import ONLY, Prompt
from specdec.text.tokenizer import find_tokenizer, load_engine_tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Engine:
    """An engine folder in memory, ready to generate. Make one with `Engine.load`.

    A context manager, which closes it. One thread at a time may use an engine and its streams;
    a second one gets an EngineBusyError.
    """

    def __init__(
        self,
        core: TorchEngine,
        settings: DecodeSettings,
        tokenizer: Any,
        end_ids: frozenset[int],
        prompt_chunk: int | Literal["auto"] | None = None,
        sessions: Sessions | None = None,
    ) -> None:
        """Take a loaded engine; programs call `load`."""
        self._core: TorchEngine | None = core
        self._settings, self._end_ids = settings, end_ids
        self._prompt_chunk, self.sessions = prompt_chunk, sessions
        self.tokenizer = tokenizer
        self._lock = threading.Lock()
        self._batch: Batch | None = None  # that streams are in
        self._kept = contextlib.ExitStack()  # keeps engines that `load` made in their cache

    @classmethod
    def load(  # noqa: PLR0913 - the public signature
        cls,
        path: str | Path,
        *,
        tokenizer: Any = None,
        drafter: str | Path | None = None,
        draft: str | Path | None = None,
        device: str = "auto",
        speculation: bool = True,
        max_batch_size: int | None = None,
        max_seq_len: int | None = None,
        prompt_chunk: int | Literal["auto"] | None = None,
        is_launched: bool = False,
        **options: Any,
    ) -> Engine:
        """Load an engine folder or a model, and start the engine's other ranks where it has some.

        path: an engine folder of the torch backend, or a model: a Hugging Face folder, a Hub id or
        a GGUF file, whose engine is made, or taken from the cache of specdec generate.
        tokenizer: a folder, a hub id, or a transformers tokenizer; None is the one that the engine
        or the model has, if any; its end tokens count with a tokenizer of transformers, too.
        drafter: a trained drafter for a model, or a whole small one: a folder or Hub id. draft: a
        draft model, or its engine folder. device: auto, cpu or cuda.
        speculation: False decodes one token per step. max_batch_size, max_seq_len: fewer and
        shorter requests than the engine was built for, which take less memory. prompt_chunk: tokens
        of new prompts that are read in a step of streams that have begun; "auto" is as many as
        leave it at most six times as long as without them; None reads a prompt whole, and the
        streams wait.
        is_launched: this may be rank 0 of torchrun's processes,
        the others of which follow it. options: those of specdec-run that say who drafts and how,
        with underscores, such as draft_len="auto" or eagle_tree_tokens=12; with a model also those
        that say how it is converted and built, such as dtype and quantization.

        Raises SpecDecError where the engine cannot be loaded; UsageError, which is one, for options
        that are unknown or have no effect with it.
        """
        if logs.get_launched_rank() is not None and not is_launched:
            raise SpecDecError(
                "this process was started by a launcher, and an Engine starts its ranks itself",
                "start one process, without torchrun or mpirun",
            )
        name = tokenizer if isinstance(tokenizer, (str, Path)) else None
        if not isinstance(speculation, bool):
            raise UsageError(f"speculation is {shorten(speculation)}", "give True or False")
        if name is None and tokenizer is not None and not hasattr(tokenizer, "apply_chat_template"):
            raise UsageError(
                f"tokenizer is {shorten(tokenizer)}, of the type {type(tokenizer).__name__}",
                "give a folder, a Hub id, or a tokenizer of transformers, such as AutoTokenizer"
                " returns",
            )
        with contextlib.ExitStack() as stack, refuse_long_names():
            limits = {"max_batch_size": max_batch_size, "max_seq_len": max_seq_len}
            folders = make_engines(
                stack, path, drafter=drafter, draft=draft, limits=limits, device=device,
                options=options,
            )  # fmt: skip
            settings = read_options(folders.options, {
                "engine_dir": "" if path is None else folders.engine, "device": device,
                "no_speculation": not speculation, "draft_engine_dir": folders.draft,
                "tokenizer_dir": folders.tokenizer if tokenizer is None else name,
            })  # fmt: skip
            engine = cls.open(
                settings, None if name is not None else tokenizer, max_batch_size=max_batch_size,
                max_seq_len=max_seq_len, prompt_chunk=prompt_chunk, measuring="late",
            )  # fmt: skip
            engine._kept = stack.pop_all()
        return engine

    @classmethod
    def open(
        cls,
        settings: DecodeSettings,
        tokenizer: Any = None,
        *,
        max_batch_size: int | None = None,
        max_seq_len: int | None = None,
        prompt_chunk: int | Literal["auto"] | None = None,
        measuring: MeasuringTime = "first",
        session_folder: SessionFolder | None = None,
    ) -> Engine:
        """Load an engine as `load` does, by the settings of a command that decodes.

        tokenizer: a transformers tokenizer; None is that of the settings, or the engine's own. In
        a process of a launcher, this is rank 0, which the others follow. measuring: as in
        `TorchEngine`. session_folder: where texts' keys and values are kept, the engine's from then
        on; None where they are not.
        """
        if not (backend := find_backend(settings.engine_dir)).is_loadable:
            raise SpecDecError(
                f"{settings.engine_dir} is an engine of {backend.title}, which Engine cannot load",
                f"{backend.runners}, or build its checkpoint with --backend torch",
            )
        is_chosen = prompt_chunk is None or isinstance(prompt_chunk, str) and prompt_chunk == "auto"
        if not is_chosen and not (type(prompt_chunk) is int and prompt_chunk > 0):
            raise UsageError(
                f"prompt_chunk is {shorten(prompt_chunk)}",
                'give a number from 1 on, "auto", or None',
            )
        if tokenizer is None:
            folder, tokenizer = load_engine_tokenizer(settings.engine_dir, settings.tokenizer_dir)
        else:
            folder = find_tokenizer(settings.engine_dir, settings.tokenizer_dir)
        settings = dataclasses.replace(settings, tokenizer_dir=folder)
        tokenizer = use_template(tokenizer, settings.chat_template)
        end_ids = find_end_ids(settings, tokenizer)
        core = load_engine(settings, tokenizer, measuring=measuring)
        try:
            core.lower_limits(max_batch_size=max_batch_size, max_seq_len=max_seq_len)
            sessions = None
            if session_folder is not None:
                sessions = Sessions(session_folder, core.describe_identity())
        except BaseException:
            core.close()
            raise
        return cls(core, settings, tokenizer, end_ids, prompt_chunk, sessions)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the engine's memory and end its other ranks; its streams end with an error."""
        if self._core is None:
            return
        with self._use() as core:
            self._core = self._batch = None
            if self.sessions is not None:
                self.sessions.close()
            core.close()
            self._kept.close()

    def describe(self) -> dict[str, Any]:
        """Return method, backend, device, dtype, quantization and tp_size."""
        return self._get_core().describe()

    @property
    def core(self) -> TorchEngine:
        """The loaded engine, for measuring its steps one by one."""
        return self._get_core()

    @property
    def is_lost(self) -> bool:
        """Return whether another rank has ended, after which nothing can be generated any more."""
        return self._get_core().is_lost

    @property
    def tells_origins(self) -> bool:
        """Return whether the engine knows of each token how it came, drafted or not."""
        return True

    @property
    def num_sought_tokens(self) -> int:
        """Prompt tokens that were looked for in the cache so far."""
        return self._get_core().num_sought_tokens

    @property
    def num_reused_tokens(self) -> int:
        """Prompt tokens that were taken from the cache so far."""
        return self._get_core().num_reused_tokens

    @property
    def max_batch_size(self) -> int:
        """Requests that are decoded at once; more wait for their turn."""
        return self._get_core().config.build.max_batch_size

    @property
    def max_input_len(self) -> int:
        """Tokens of the longest prompt."""
        return self._get_core().config.build.max_input_len

    @property
    def max_seq_len(self) -> int:
        """Tokens of a prompt and its output together."""
        return self._get_core().max_seq_len

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        *,
        keep_logits: bool = False,
        **settings: Unpack[Settings],
    ) -> list[Output]:
        """Continue prompts, several at once; return their outputs in the same order.

        prompts: a text, the token ids of a prompt, a Prompt, or a list of these. keep_logits: let
        the outputs have the logits that their tokens were chosen by; not while streams are open.

        Raises PromptError that lists every prompt beyond the engine's limits, before anything is
        decoded; EngineBusyError and EngineLostError as their names say.
        """
        prompt_list, defaults = list_prompts(prompts), make_defaults(settings)
        with self._use() as core:
            requests = self._make_requests(core, prompt_list, defaults, repeats=True)
            if not requests:
                return []
            batch = self._batch
            if batch is None or not batch.is_busy:
                self._batch = None  # its memory is free for this call
                options = self._make_options(core)
                options = dataclasses.replace(options, keep_logits=keep_logits)
                results = core.generate(requests, options)
            elif keep_logits:
                raise EngineBusyError(
                    "streams are open, whose steps keep no logits", "close them first"
                )
            else:
                results = [batch.submit(request) for request in requests]
                for request in results:
                    while request.finish_reason is None:
                        self._step(batch)
        return [describe_output(result, self.tokenizer) for result in choose_best(results)]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        **settings: Any,
    ) -> Output:
        """Answer a conversation by the chat template; the output's `message` goes after it.

        messages: in OpenAI's form, with tool_calls and results of tools. tools: functions that the
        answer may call, in OpenAI's form. settings: fields of a Prompt, such as max_output_len or
        chat_template_kwargs.
        """
        make_defaults(cast("Settings", settings))  # refuses names that no prompt has
        formats = self._chat_formats
        prompt = make_chat_prompt(messages, tools, formats, self.tokenizer, settings)
        (output,) = self.generate([prompt])
        message = read_answer(output, tools, formats, find_continued_text(prompt))
        return dataclasses.replace(output, message=message)

    @functools.cached_property
    def _chat_formats(self) -> ChatFormats:
        """Formats of the model's tool calls and reasoning, by its chat template."""
        return NO_FORMATS if self.tokenizer is None else choose_formats(AUTO, AUTO, self.tokenizer)

    def run(self, requests: Sequence[Request], **option_fields: Any) -> list[ActiveRequest]:
        """Decode prepared requests while no stream is open; `generate` for commands.

        kept: fields of the loop's `Options`. Raises Interrupted on Ctrl-C, with what there is.
        """
        with self._use() as core:
            self._batch = None
            return core.generate(
                requests, dataclasses.replace(self._make_options(core), **option_fields)
            )

    def prepare(
        self, prompt: AnyPrompt, *, max_output_len: int | None = 100, index: int = ONLY,
        cuts_output: bool = False,
    ) -> Request:  # fmt: skip
        """Tokenize and check a prompt, for `stream`; any thread may call this at any time.

        max_output_len: None is as many as the engine has room for after this prompt. index: of
        several prompts, for messages. cuts_output: whether the limit of an output that is longer
        than the room after the prompt becomes the room.
        """
        full_prompt = make_prompt(prompt)
        min_tokens = full_prompt.min_tokens
        least_len = max(1, min_tokens) if type(min_tokens) is int else 1
        core, defaults = self._get_core(), Prompt(max_output_len=max_output_len or least_len)
        (request,) = self._tokenize([prompt], defaults, index)
        max_input_len, max_seq_len = core.find_limits(with_drafts=request.allows_drafts)
        length, limit = len(request.input_ids), request.max_output_len
        room = max_seq_len - length
        is_unlimited = max_output_len is None and full_prompt.max_output_len is None
        takes_room = room >= limit if is_unlimited else cuts_output and 1 <= room < limit
        if takes_room and length <= max_input_len:
            request = dataclasses.replace(request, max_output_len=room)
        core.check_requests([request])
        return dataclasses.replace(request, vocabulary=core.config.vocabulary)

    def encode(self, prompt: AnyPrompt) -> list[int]:
        """Return the token ids of a prompt, however many; any thread may call this at any time."""
        self._get_core()
        checked_prompt = fill_prompt(ONLY, prompt, Prompt())
        return encode_prompt(checked_prompt, self._settings, self.tokenizer)[1]

    def stream(self, prompt: AnyPrompt | Request, **settings: Unpack[Settings]) -> Stream:
        """Continue a prompt step by step.

        prompt: what `generate` takes, or one that `prepare` returned, with its own settings.
        Streams that are open at the same time share their steps: whichever is asked for its next
        event runs one for all. The first takes a cache for max_batch_size requests of max_seq_len
        tokens.
        """
        with self._use() as core:
            if isinstance(prompt, Request):
                if settings:
                    raise UsageError(
                        f"{', '.join(settings)} has no effect on what prepare has returned",
                        "give it to prepare, in the prompt",
                    )
                request = prompt
                core.check_requests([request])  # another engine may have prepared it
                _check_vocabulary(request, core)
            else:
                (request,) = self._make_requests(core, [prompt], make_defaults(settings), ONLY)
            is_idle = self._batch is None or not self._batch.is_busy
            if is_idle and core.begin_drafts([request]):
                self._batch = None  # in which nothing drafts
            if self._batch is None:
                self._batch = self._make_batch(core)
            return Stream(self, self._batch, self._batch.submit(request))

    def make_token(self) -> None:
        """Make a token, which takes the memory of the cache; raises what keeps it from that."""
        with self.stream([0], max_output_len=1, end_ids=()) as stream:
            for _ in stream:
                pass

    def _make_batch(self, core: TorchEngine) -> Batch:
        core.check_whole()
        return Batch(
            core.decoder, core.drafter, self._make_options(core), core.timing,
            num_rows=core.config.build.max_batch_size,
            max_seq_len=core.find_limits(with_drafts=False)[1],
        )  # fmt: skip

    def step(self) -> bool:
        """Run one step of all open streams; return whether there was anything to do.

        For a program that serves many streams: call this, then `take` of each. Where there is
        nothing to do, it raises SpecDecError if another rank has ended.
        """
        with self._use() as core:
            batch = self._batch
            if batch is None or not batch.is_busy:
                core.check_ranks()
                core.drafter.keep()
                return False
            self._step(batch)
            return True

    def _step(self, batch: Batch) -> None:
        try:
            batch.step()
        except BaseException:  # the cache is between two steps
            self._batch = None
            raise

    @contextlib.contextmanager
    def _use(self) -> Iterator[TorchEngine]:
        """Keep other threads out."""
        if not self._lock.acquire(blocking=False):
            raise EngineBusyError(
                "another thread is using this engine",
                "let one thread call it, and hand it prompts through a queue",
            )
        try:
            yield self._get_core()
        finally:
            self._lock.release()

    def _get_core(self) -> TorchEngine:
        if self._core is None:
            raise EngineLostError("this engine is closed", "load it again")
        return self._core

    @functools.cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self._end_ids)

    def _make_options(self, core: TorchEngine) -> Options:
        return core.fill_options(
            Options(
                tokenizer=self.tokenizer,
                follow_text=self.tokenizer is not None,
                reuse_blocks=self._settings.kv_cache_enable_block_reuse,
                prompt_chunk=self._prompt_chunk,
                sessions=self.sessions,
            )
        )

    def _make_requests(
        self, core: TorchEngine, prompts: Sequence[AnyPrompt], defaults: Prompt,
        first_index: int = 0, *, repeats: bool = False,
    ) -> list[Request]:  # fmt: skip
        requests = self._tokenize(prompts, defaults, first_index, repeats=repeats)
        core.check_requests(requests)
        return requests

    def _tokenize(
        self, prompts: Sequence[AnyPrompt], defaults: Prompt, first_index: int = 0, *,
        repeats: bool = False,
    ) -> list[Request]:  # fmt: skip
        """Return requests of prompts, of any length."""
        checked_prompts = [
            fill_prompt(index, user_prompt, defaults)
            for index, user_prompt in enumerate(prompts, first_index)
        ]
        return make_requests(
            checked_prompts, self._settings, self.tokenizer, self._end_ids,
            lambda grammar: self._grammars.compile(grammar), first_index, repeats,
        )  # fmt: skip


def _check_vocabulary(request: Request, core: TorchEngine) -> None:
    """Raise PromptError for a request of an engine whose token ids mean something else here."""
    theirs, own = request.vocabulary, core.config.vocabulary
    if theirs is not None and own is not None and not has_same_tokens(theirs, own):
        raise PromptError(
            f"{request.name} was prepared by an engine with another tokenizer, whose token ids"
            " mean something else here",
            "let this engine prepare it",
            field="text",
        )


class Stream:
    """Iterator over the events of one prompt, as they come.

    A stream that is closed or garbage collected is cancelled: its row in the batch is free from
    the next step on.
    """

    def __init__(self, engine: Engine, batch: Batch, active: ActiveRequest) -> None:
        """Follow a request of a batch; programs call `Engine.stream`."""
        self._engine, self._batch, self._active = engine, batch, active
        self._num_taken = self._num_trees = 0
        self._is_over = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Event:
        """Run steps until this stream has gained something."""
        while not self._is_over:
            event = self.take()
            if event is not None:
                return event
            self._engine.step()
        raise StopIteration

    def take(self) -> Event | None:
        """Return what the stream has gained since the last event, without running anything.

        None where that is nothing. Raises StepError where a step has failed since, EngineLostError
        where the engine was closed.
        """
        active, engine = self._active, self._engine
        if self._is_over:
            return None
        with engine._use():
            reason = active.finish_reason
            if reason is None and engine._batch is not self._batch:
                self._is_over = True
                raise StepError(
                    f"a step of the engine failed, which ends this stream after"
                    f" {len(active.output_ids)} tokens",
                    "ask for the prompt again; the failure was raised where the step was run",
                )
            first_token, self._num_taken = self._num_taken, len(active.output_ids)
            first_tree, self._num_trees = self._num_trees, len(active.trees)
            if first_token == self._num_taken and reason is None:
                return None
            text, stream, stop_word = "", active.text_stream, None
            if stream is not None:
                if reason is not None:
                    stream.finish()
                text, stop_word = stream.take(), stream.stop_word
            if reason is not None:
                self._is_over = True
            return Event(
                text=text,
                token_ids=active.output_ids[first_token:],
                origins=active.origins[first_token:],
                ends=stream.ends[first_token:] if stream is not None else [],
                logprobs=active.logprobs[first_token:],
                trees=active.trees[first_tree:],
                prompt_logprobs=active.prompt_logprobs if first_token == 0 else [],
                finish_reason=reason,
                stats=active.stats if reason is not None else None,
                stop_word=stop_word,
            )

    @property
    def stats(self) -> RequestStats:
        """Counts of the stream's verify steps so far; they go on counting."""
        return self._active.stats

    @property
    def output(self) -> Output:
        """All that there is so far, taken or not; of text, what is certain while it goes on."""
        return describe_output(self._active, self._engine.tokenizer)

    def close(self) -> None:
        """Cancel the stream if it goes on."""
        self._batch.cancel(self._active)
        self._is_over = True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_active"):
            self._batch.cancel(self._active)
