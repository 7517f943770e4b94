"""What a request to the engine model becomes once it is parsed. Frozen data, handed from parser to sender."""

from dataclasses import dataclass, field

from backend_engine.config.sampling_params import SamplingParams
from backend_engine.core.request import DEFAULT_PRIORITY
from backend_engine.triton_io.tensor_rows import FP32
from backend_engine.triton_io.word_lists import WordLimits


@dataclass(frozen=True)
class RequestDefaults:
    """What the model's parameters say for requests that do not, and what bounds them.

    Times in milliseconds, ``None`` = no limit. ``max_sequences``: rows times sequences. ``max_logits_bytes``: context
    and generation logits of a request together, in ``logits_dtype`` (``TYPE_FP32`` or ``TYPE_FP16``).
    """

    exclude_input_in_output: bool = False
    include_stop_words_in_output: bool = True
    deadline_ms: int | None = 600_000
    queue_timeout_ms: int | None = None
    skip_special_tokens: bool = True
    max_beam_width: int = 1
    max_sequences: int = 64
    max_logits_bytes: int = 64 << 20
    logits_dtype: str = FP32
    word_limits: WordLimits = field(default_factory=WordLimits)

    @property
    def logits_itemsize(self) -> int:
        """Bytes of one logit."""
        return 4 if self.logits_dtype == FP32 else 2


@dataclass(frozen=True)
class RequestOptions:
    """How a row of a request is to be run and answered. Times in seconds from now, ``None`` = no limit."""

    streaming: bool = False
    exclude_input: bool = False
    detokenize: bool = False
    return_log_probs: bool = False
    return_finish_reason: bool = False
    return_stop_reason: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    errors_in_band: bool = False
    piecewise: bool = False
    piece_group: str = ""
    priority: int = DEFAULT_PRIORITY
    deadline_s: float | None = None
    queue_timeout_s: float | None = None
    cache_salt: str = ""
    client_id: str = ""
    half_logits: bool = False


@dataclass(frozen=True)
class EngineRow:
    """One prompt, to be answered ``sampling_params.n`` times."""

    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    options: RequestOptions


@dataclass(frozen=True)
class EngineRequest:
    """A request ready for the engine: its rows, at least one."""

    rows: tuple[EngineRow, ...]

    @property
    def options(self) -> RequestOptions:
        """How the request as a whole is answered: ``streaming``, ``piecewise``, ``errors_in_band``, ``client_id``."""
        return self.rows[0].options


@dataclass(frozen=True)
class StopRequest:
    """A request to end the running ones with this client id."""

    client_id: str


@dataclass(frozen=True)
class NextPieceRequest:
    """A request for what the piecewise request with this client id, or a group of them, has to say next."""

    client_id: str
