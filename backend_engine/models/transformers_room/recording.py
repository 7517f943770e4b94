"""``record``: what a transformers model does in a forward pass, learnt by running it once over a few tokens.

Called while a model is loaded. Notes every call of transformers' attention interface and every linear layer that is
run; refuses, in one line, what the paged cache cannot express. Changes no weight.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from backend_engine.errors import ModelLoadError

# Under this name the recording functions are registered with transformers, the mask's and the attention's.
RECORDING = "inflight_recording"
_RECORDER = "inflight_recorder"
_NUM_TOKENS = 5
# A mask is looked at over at least so many positions.
_MIN_POSITIONS = 1 << 17
# Codes of masks, beside the sizes of windows.
_CAUSAL, _OTHER = 0.0, -1.0
# Arguments of the interface that change nothing here, whatever they are.
_WITHOUT_EFFECT = frozenset(
    {
        "dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
        "position_embeddings", "return_dict", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
    }
)  # fmt: skip


class UnservedCallError(ModelLoadError):
    """A call of attention that the paged cache cannot serve; the message is the reason alone."""


class AttentionCall(NamedTuple):
    """One call of the interface. ``window``: ``AttentionSpec.sliding_window``."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool


@dataclass
class Recording:
    """``calls`` of attention and ``linears`` that ran, both in order; ``vocab_size``: width of the logits."""

    calls: list[AttentionCall] = field(default_factory=list)
    linears: dict[nn.Module, None] = field(default_factory=dict)
    vocab_size: int = 0


def record(model: nn.Module, linear_types: tuple[type[nn.Module], ...]) -> Recording:
    """Run ``model``, which must have the attention implementation ``RECORDING``, over a few tokens.

    Raises ``UnservedCallError`` for a call of attention that cannot be served.
    """
    recording = Recording()
    device = next(model.parameters()).device
    hooks = [
        module.register_forward_hook(_note_linear(recording))
        for module in model.modules()
        if type(module) in linear_types
    ]
    for module in model.modules():
        setattr(module, _RECORDER, recording)
    try:
        ids = torch.arange(_NUM_TOKENS, device=device).unsqueeze(0)
        logits = model(input_ids=ids, position_ids=ids, use_cache=False, return_dict=True).logits
    finally:
        for hook in hooks:
            hook.remove()
        for module in model.modules():
            delattr(module, _RECORDER)
    recording.vocab_size = int(logits.shape[-1])
    return recording


def _note_linear(recording: Recording) -> Callable[..., None]:
    def note(module: nn.Module, args: Any, output: Any) -> None:
        recording.linears[module] = None

    return note


def recording_mask(mask_function: Callable[..., Tensor], q_length: int, kv_length: int, **kwargs: Any) -> Tensor:
    """In place of a mask, a tensor of its shape filled with what kind of mask it is (see ``_mask_code``)."""
    code = _mask_code(mask_function, max(_MIN_POSITIONS, 2 * (kwargs.get("local_size") or 0) + 1))
    return torch.full((1, 1, q_length, kv_length), code, dtype=torch.float64, device=kwargs.get("device"))


def _mask_code(mask_function: Callable[..., Tensor], num_positions: int) -> float:
    """``_CAUSAL``, the size of a sliding window, or ``_OTHER``, found by asking for a few rows of the mask."""
    keys = torch.arange(num_positions)
    zero = torch.zeros((), dtype=torch.int64)
    last = num_positions - 1
    window = 0
    for query in (last, 0, 1, 2, 3, 5, 17, 100, last // 3, last // 2, last - 1):
        try:
            seen = torch.as_tensor(mask_function(zero, zero, torch.tensor(query), keys)).expand(num_positions)
        except (IndexError, RuntimeError):
            return _OTHER
        if query == last:
            window = int(seen.sum())
        expected = (keys <= query) & (keys > query - window)
        if not torch.equal(seen, expected):
            return _OTHER
    return _CAUSAL if window == num_positions else float(window)


def recording_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Note the call and answer with zeros."""
    recording: Recording = getattr(module, _RECORDER)
    recording.calls.append(_call(module, (query, key, value), attention_mask, scaling, kwargs))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _call(
    module: nn.Module, qkv: tuple[Tensor, ...], mask: Any, scaling: float | None, kwargs: dict[str, Any]
) -> AttentionCall:
    query, key, value = qkv
    where = type(module).__name__
    shapes = [tuple(x.shape) for x in qkv]
    num_heads, num_kv_heads, key_dim = query.shape[1], key.shape[1], key.shape[3]
    is_usual = all(len(shape) == 4 and shape[0] == 1 and shape[2] == _NUM_TOKENS for shape in shapes)
    if not is_usual or num_heads % num_kv_heads or value.shape[1] != num_kv_heads or query.shape[3] != key_dim:
        raise UnservedCallError(f"{where} attends with queries, keys and values of shapes {shapes}")
    if not _is_causal(module, kwargs):
        raise UnservedCallError(f"{where} is not causal: tokens see later ones")
    known = {"sliding_window", "softcap", "s_aux", "is_causal"} | _WITHOUT_EFFECT
    others = sorted(
        name for name, given in kwargs.items() if not (given is None or isinstance(given, bool) or name in known)
    )
    if others:
        raise UnservedCallError(f"{where} hands {', '.join(others)} to attention, which is not known here")
    softcap = kwargs.get("softcap")
    return AttentionCall(
        module=module,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value.shape[3],
        scale=float(scaling) if scaling is not None else key_dim**-0.5,
        # A model that asks for no mask leaves the window to the attention function.
        window=kwargs.get("sliding_window") if mask is None else _window(where, mask),
        softcap=float(softcap) if softcap else None,
        has_sinks=kwargs.get("s_aux") is not None,
    )


def _is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    stated = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if stated is None else stated)


def _window(where: str, mask: Any) -> int | None:
    """The window that ``recording_mask`` wrote into the mask."""
    if not isinstance(mask, Tensor) or not bool((mask == mask.reshape(-1)[0]).all()):
        raise UnservedCallError(f"{where} adds a mask or a bias of its own to the scores of attention")
    code = float(mask.reshape(-1)[0])
    if code == _OTHER or code != int(code) or code < 0:
        raise UnservedCallError(f"{where} has a mask that is neither causal nor a sliding window")
    return int(code) or None
