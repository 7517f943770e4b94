"""``LLM``: the front door. Turns prompts into requests, checks them, and hands them to the executor.

Used by Python callers (``generate``, ``generate_async``) and by ``triton_io`` (``submit`` with a sink).
Knows nothing of schedulers, blocks or tensors.
"""

import functools
import itertools
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from tqdm import tqdm

from backend_engine import admission
from backend_engine.admission import Submission
from backend_engine.builder.engine_builder import build_engine
from backend_engine.config.build_config import BuildConfig
from backend_engine.config.engine_args import EngineArgs
from backend_engine.config.sampling_params import SamplingParams
from backend_engine.core.protocols import StopMatcher
from backend_engine.core.request import LlmRequest, RequestLimits
from backend_engine.errors import InvalidRequestError, ShutdownError
from backend_engine.executor.build import create_engine
from backend_engine.executor.iteration_stats import EngineStats, IterationStats
from backend_engine.hub import local_path
from backend_engine.logger import get_logger
from backend_engine.plugins.discovery import load_plugins
from backend_engine.results import GenerationHandle, GenerationResult
from backend_engine.text.chat_template import ChatTemplate
from backend_engine.text.detokenizer import create_detokenizer
from backend_engine.text.stop_strings import StopStringMatcher
from backend_engine.text.text_stream import TextStream
from backend_engine.text.tokenizer import check_same_tokenizer, load_tokenizer

_logger = get_logger(__name__)

Prompt = str | Sequence[int]
PROGRESS_BAR_FROM = 4


class LLM:
    """A model ready to generate.

    ``LLM(model, tokenizer=None, **engine_args)``: ``model`` is a checkpoint in any format, an engine folder, or
    an id on the Hugging Face Hub; the further arguments are
    the fields of ``EngineArgs``. ``ModelLoadError`` and ``ConfigError`` name what is wrong in one line. Close with
    ``shutdown()`` or use it as a context manager. All methods may be called from any thread.
    """

    def __init__(self, model: str, tokenizer: str | None = None, **engine_args: Any) -> None:
        args = EngineArgs.of(local_path(str(model)), tokenizer and local_path(str(tokenizer)), engine_args)
        self._args = args
        self._executor = None
        self.tokenizer = None
        load_plugins(args.plugins)
        if not args.skip_tokenizer_init:
            self.tokenizer = load_tokenizer(args.tokenizer or args.model, args.trust_remote_code)
            if args.tokenizer is not None:
                check_same_tokenizer(self.tokenizer, args.tokenizer, args.model, args.trust_remote_code)
        self._executor, self.limits, self.config = create_engine(args)
        if self.tokenizer is not None:
            admission.check_vocabulary(self.tokenizer, args.tokenizer or args.model, self.limits.vocab_size)
            self.limits = admission.with_end_of(self.limits, self.tokenizer)
        self._request_ids = itertools.count(1)
        self._executor.start()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
    ) -> GenerationResult | list[GenerationResult]:
        """Generate for one prompt (text or token ids) or a list of them, and wait.

        ``sampling_params`` is one for all or one a prompt. A list of results comes in the order of its prompts,
        with a progress bar for many of them (``use_tqdm`` decides otherwise). The first failure is raised after
        the others were cancelled.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer))
        listed: list[Any] = [prompts] if single else list(prompts)
        if isinstance(sampling_params, Sequence):
            if len(sampling_params) != len(listed):
                raise InvalidRequestError(
                    f"{len(sampling_params)} sampling_params were given for {len(listed)} prompts"
                )
            params: list[SamplingParams | None] = list(sampling_params)
        else:
            params = [sampling_params] * len(listed)
        handles: list[GenerationHandle] = []
        show = len(listed) >= PROGRESS_BAR_FROM if use_tqdm is None else use_tqdm
        try:
            for prompt, one in zip(listed, params, strict=True):
                handles.append(self.generate_async(prompt, one))
            bar = tqdm(handles, desc="generate", unit="prompt", disable=not show)
            results = [handle.result() for handle in bar]
        except BaseException:
            for handle in handles:
                handle.abort()
            raise
        return results[0] if single else results

    def generate_async(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> GenerationHandle:
        """Start generating and return at once; see ``GenerationHandle`` for streaming and waiting."""
        params = sampling_params or SamplingParams()
        text = prompt if isinstance(prompt, str) else None
        ids = self._encode(prompt, params.add_special_tokens) if isinstance(prompt, str) else list(prompt)
        streams = [self._stream(ids, params) for _ in range(params.n)]
        request_ids: list[int] = []

        def abort() -> None:
            for request_id in request_ids:
                self.cancel(request_id)

        handle = GenerationHandle(text, ids, streams, params.logprobs is not None, abort)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        request_ids += self.submit_all(
            [Submission(ids, params, handle.sink(index), seed=seed, sequence_index=index) for index in range(params.n)]
        )
        return handle

    def chat(self, messages: list[dict[str, Any]], sampling_params: SamplingParams | None = None) -> GenerationResult:
        """Answer a conversation (``[{"role": ..., "content": ...}, ...]``) using the model's chat template."""
        return self.generate_async(self._chat_template.encode(messages), sampling_params).result()

    @functools.cached_property
    def _chat_template(self) -> ChatTemplate:
        if self.tokenizer is None:
            raise InvalidRequestError("chat needs a tokenizer, and this engine was started without one")
        return ChatTemplate(self.tokenizer)

    def submit(self, submission: Submission) -> int:
        """Queue one sequence and return its request id; see ``submit_all``."""
        return self.submit_all([submission])[0]

    def submit_all(self, submissions: Sequence[Submission]) -> list[int]:
        """Queue all sequences or, when one of them is refused, none; returns their request ids.

        Raises ``InvalidRequestError``, ``OutOfCapacityError`` (queue full) or ``ShutdownError``, and then never
        calls a sink.
        """
        if self._executor is None:
            raise ShutdownError("the engine has been shut down")
        now = time.monotonic()
        requests = [self._request(submission, now) for submission in submissions]
        self._executor.enqueue(requests)
        return [request.request_id for request in requests]

    def _request(self, submission: Submission, now: float) -> LlmRequest:
        """The checked and resolved request; ``now``: its arrival, ``time.monotonic`` seconds."""
        ids = admission.check_prompt(submission.prompt_token_ids, self.limits)
        params = self.limits.sampling_defaults.fill(submission.sampling_params)
        params = admission.resolve_words(params, self.tokenizer)
        base_seed = params.seed if submission.seed is None else submission.seed
        deadline_s, queue_timeout_s = submission.deadline_s, submission.queue_timeout_s
        return LlmRequest(
            next(self._request_ids),
            ids,
            params,
            admission.stop_conditions(params, len(ids), self.limits),
            submission.sink,
            arrival_time=now,
            client_id=submission.client_id,
            seed=admission.sequence_seed(
                secrets.randbits(64) if base_seed is None else base_seed, submission.sequence_index
            ),
            cache_salt=admission.cache_salt(submission.cache_salt, len(ids), self.limits),
            priority=submission.priority,
            sequence_index=submission.sequence_index,
            limits=RequestLimits(
                None if deadline_s is None else now + deadline_s,
                None if queue_timeout_s is None else now + queue_timeout_s,
            ),
            stop_matcher=self._stop_matcher(ids, params),
            logits_processors=admission.logits_processors(params, self.limits.vocab_size),
        )

    def cancel(self, request_id: int) -> None:
        """End a request soon; its sink gets a final output with ``cancelled``. Unknown ids are harmless."""
        if self._executor is not None:
            self._executor.cancel(request_id)

    def detokenizer(self, prompt_token_ids: Sequence[int], params: SamplingParams, echo: bool = False) -> TextStream:
        """A text stream for one sequence, wired with its stop words; ``echo`` makes the prompt part of the text.

        ``InvalidRequestError`` when the engine has no tokenizer.
        """
        if self.tokenizer is None:
            raise InvalidRequestError("text output needs a tokenizer, and this engine was started without one")
        prompt_text = self.tokenizer.decode(list(prompt_token_ids), params.skip_special_tokens) if echo else ""
        return TextStream(
            create_detokenizer(self.tokenizer, prompt_token_ids, params.skip_special_tokens),
            tuple(params.stop or ()),
            params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            prefix=prompt_text,
        )

    def save(self, folder: str | os.PathLike[str], build_config: BuildConfig | None = None) -> None:
        """Write the model as an engine folder, which ``LLM(folder)`` loads.

        build_config: ``None`` = the limits that this engine runs with, on one rank, weights in the checkpoint's
        precision. The weights are read from the checkpoint again, so the running engine is not touched. Raises
        ``ConfigError`` when ``folder`` exists or a value is not allowed, ``ModelLoadError`` when the checkpoint is
        gone.
        """
        if build_config is None:
            scheduler = self.config.scheduler
            build_config = BuildConfig(
                max_batch_size=scheduler.max_batch_size,
                max_input_len=self.config.max_input_len,
                max_seq_len=self.config.max_seq_len,
                max_num_tokens=scheduler.max_num_tokens,
                plugins=self._args.plugins,
            )
        report = build_engine(self._args.model, Path(folder), build_config, self._args.trust_remote_code)
        for warning in report.warnings:
            _logger.warning("%s", warning)
        _logger.info("engine folder %s: %.1f MB", folder, report.num_bytes / 1e6)

    def stats(self) -> EngineStats:
        """Levels and totals of the engine now."""
        if self._executor is None:
            raise ShutdownError("the engine has been shut down")
        return self._executor.stats()

    def get_stats(self) -> list[IterationStats]:
        """Statistics of the last iterations, oldest first."""
        return [] if self._executor is None else self._executor.recent_iterations()

    def shutdown(self) -> None:
        """End all requests with a final output, stop the executor and free the model. Idempotent."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise InvalidRequestError("a text prompt needs a tokenizer, and this engine was started without one")
        return self.tokenizer.encode(text, add_special_tokens)

    def _stream(self, ids: Sequence[int], params: SamplingParams) -> TextStream | None:
        wanted = params.detokenize and self.tokenizer is not None
        return self.detokenizer(ids, params) if wanted else None

    def _stop_matcher(self, ids: Sequence[int], params: SamplingParams) -> StopMatcher | None:
        if not params.stop or self.tokenizer is None:
            return None
        detokenizer = create_detokenizer(self.tokenizer, ids, params.skip_special_tokens)
        return StopStringMatcher(tuple(params.stop), detokenizer, min_tokens=params.min_tokens)
