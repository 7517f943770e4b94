"""``load_transformers_model``: from a folder to a ``TransformersModel`` that was checked against transformers itself.

Called by the model loader. Every fault of the folder, and every model that the paged cache cannot serve, is a one-line
``ModelLoadError``. Starts nothing; reads the folder only.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from backend_engine.attention.select import select_backend
from backend_engine.errors import ModelLoadError
from backend_engine.logger import get_logger
from backend_engine.models.model_source import ModelSource
from backend_engine.models.transformers_model import TransformersModel, attention_specs, register_attention
from backend_engine.models.transformers_room.facts import causal_lm_names, nearest_causal_lm, one_line, refuse
from backend_engine.models.transformers_room.linears import LINEAR_TYPES, pack_linears
from backend_engine.models.transformers_room.norms import replace_norms
from backend_engine.models.transformers_room.paged_attention import PAGED
from backend_engine.models.transformers_room.recording import RECORDING, Recording, UnservedCallError, record
from backend_engine.models.transformers_room.self_check import POSITION_LIMIT, Reference, distance, limit, reference
from backend_engine.ops.dense_products import DenseKind
from backend_engine.ops.huge_pages import HugePages
from backend_engine.ops.torch_ops import TorchOps
from backend_engine.quantization.quant_method import TensorOptions
from backend_engine.quantization.unquantized import Unquantized

_logger = get_logger(__name__)

T = TypeVar("T")
# Called with how many parts are done, how many there are, and what the last one was.
Progress = Callable[[int, int, str], None]
# From the shapes of the model's parameters to the checkpoint's tensors, all of them plain.
ReadWeights = Callable[[Mapping[str, tuple[int, ...]]], dict[str, torch.Tensor]]

# What a model's code, which is not ours, may raise when it is run in a way that it was not written for.
_MODEL_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, SafetensorError,
    StrictDataclassError, TypeError, ValueError,
)  # fmt: skip


class LoadedTransformersModel(NamedTuple):
    """A model that is ready to run, and the names of its parameters that hold NaN."""

    model: TransformersModel
    with_nan: tuple[str, ...]


def load_transformers_model(
    source: ModelSource,
    read_weights: ReadWeights,
    options: TensorOptions,
    ops: TorchOps,
    attention_backend: str = "auto",
    max_windows: tuple[int, ...] = (),
    progress: Progress | None = None,
    weight_kind: DenseKind = DenseKind.F32,
) -> LoadedTransformersModel:
    """Load, learn the calls of attention, pack the linear layers, and check the result.

    read_weights: see ``ReadWeights``; called for what transformers itself would not read as we do.
    max_windows: upper bounds of the layers' sliding windows, repeated over the layers. weight_kind: of linear layers,
    on a CPU in float32. Raises ``ModelLoadError``, or ``ConfigError`` for an attention backend that cannot serve the
    model.
    """
    _check_config(source)
    register_attention()
    model = _read(source, read_weights, options, progress)
    _check_class(model)
    faulty = tuple(name for name, parameter in model.named_parameters() if bool(parameter.isnan().any()))
    with torch.inference_mode():
        expected = _attempt(model, "transformers itself fails on it", lambda: reference(model, options.device))
        if expected.position_error > POSITION_LIMIT:
            raise refuse(model, "it does not number the positions of a text from 0")
        recording = _record(model)
        calls, specs = recording.calls, attention_specs(recording.calls)
        bounded = attention_specs(calls, max_windows)
        kind = select_backend(attention_backend, specs + bounded, options.dtype, options.device, type(ops))
        backend = kind(ops, options.device)
        packs = options.device.type == "cpu" and options.dtype == torch.float32
        if packs:
            replace_norms(model)
        if packs and weight_kind == DenseKind.F32:
            _pack(model, recording.linears, weight_kind, options)
        _use_attention(model, PAGED)
        paged = TransformersModel(model, calls, specs, backend, recording.vocab_size, options.dtype)
        _check(paged, expected, options)
        if packs and weight_kind != DenseKind.F32:
            # Shorter forms change the logits by more than the check lets pass: they come after it.
            _pack(model, recording.linears, weight_kind, options)
        if max_windows:
            # The user's windows change the logits: they come after the check.
            paged = TransformersModel(model, calls, bounded, backend, recording.vocab_size, options.dtype)
    return LoadedTransformersModel(paged, faulty)


def _pack(model: Any, linears: Collection[nn.Module], kind: DenseKind, options: TensorOptions) -> None:
    """The linear layers in the form ``kind``, the projection to the vocabulary in the form that is for it."""
    memory, head = HugePages(), model.get_output_embeddings()
    for form, is_head in ((kind, False), (kind.for_head, True)):
        chosen = [linear for linear in linears if (linear is head) == is_head]
        pack_linears(model, chosen, Unquantized(kind=form, memory=memory), options)


def read_config(source: ModelSource) -> Any:
    """The folder's configuration as transformers reads it; refuses what config.json alone tells."""
    _check_config(source)
    try:
        return AutoConfig.from_pretrained(
            str(source.model_dir), local_files_only=True, trust_remote_code=source.trust_remote_code
        )
    except _MODEL_ERRORS as error:
        raise ModelLoadError(f"transformers cannot read config.json of {source.model_dir}: {one_line(error)}") from None


def _check_config(source: ModelSource) -> None:
    """Refuse what config.json alone tells."""
    name, config = source.architecture, source.config
    where = source.where
    if config.get("is_encoder_decoder"):
        raise refuse(name, "it is an encoder-decoder")
    if source.trust_remote_code and "AutoModelForCausalLM" in (config.get("auto_map") or {}):
        return
    if name not in causal_lm_names():
        hint = nearest_causal_lm(name)
        raise ModelLoadError(
            f"{where}: transformers has no causal language model {name!r}"
            + (f"; did you mean {hint!r}?" if hint else "")
        )


def _read(source: ModelSource, read_weights: ReadWeights, options: TensorOptions, progress: Progress | None) -> Any:
    """The model with its weights, on its device; every parameter must be in the checkpoint, and nothing else."""
    if progress:
        progress(0, 1, "transformers")
    logs: Any = transformers_logging
    had_bar = logs.is_progress_bar_enabled()
    logs.disable_progress_bar()
    try:
        model, report = _from_pretrained(source, read_weights)(
            local_files_only=True,
            dtype=options.dtype,
            attn_implementation="eager",
            output_loading_info=True,
        )
    except _MODEL_ERRORS as error:
        raise ModelLoadError(f"transformers cannot load {source.model_dir}: {one_line(error)}") from None
    finally:
        if had_bar:
            logs.enable_progress_bar()
    for kind, says in (("missing_keys", "is not in the checkpoint"), ("unexpected_keys", "has no place in the model")):
        if report[kind]:
            names = sorted(report[kind])
            more = f" (nor {len(names) - 1} more)" if len(names) > 1 else ""
            raise ModelLoadError(f"checkpoint {source.model_dir}: tensor {names[0]} {says}{more}")
    if type(model).__name__ != source.architecture:
        raise ModelLoadError(
            f"config.json of {source.model_dir}: architectures names {source.architecture}, but transformers runs "
            f"model_type {model.config.model_type!r} as {type(model).__name__}"
        )
    if progress:
        progress(1, 1, "transformers")
    return model.to(options.device).eval()


def _from_pretrained(source: ModelSource, read_weights: ReadWeights) -> Callable[..., Any]:
    """``from_pretrained`` with its source of weights: the folder, or, where that holds packed ones or no safetensors
    files, what ``read_weights`` gives.
    """
    auto_model: Any = AutoModelForCausalLM
    trust = source.trust_remote_code
    is_plain = not source.config.get("quantization_config")
    if is_plain and any(source.model_dir.glob("*.safetensors")):
        return functools.partial(
            auto_model.from_pretrained, str(source.model_dir), trust_remote_code=trust, use_safetensors=True
        )
    config = read_config(source)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        shell: Any = auto_model.from_config(config, trust_remote_code=trust)
    shapes = {name: tuple(tensor.shape) for name, tensor in shell.state_dict().items()}
    return functools.partial(type(shell).from_pretrained, None, config=config, state_dict=read_weights(shapes))


def _check_class(model: Any) -> None:
    """Refuse what the model's class alone tells."""
    if getattr(model, "_is_stateful", False):
        raise refuse(model, "it keeps a recurrent state between tokens")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise refuse(model, "it takes no position_ids, so that its positions cannot be those of several requests")


def _record(model: Any) -> Recording:
    """What the model calls; refuses a model whose layers do not attend through the interface."""
    _use_attention(model, RECORDING)
    try:
        recording = _attempt(model, "it fails", lambda: record(model, LINEAR_TYPES))
    except UnservedCallError as error:
        raise refuse(model, str(error)) from None
    if not recording.calls:
        raise refuse(model, "its layers do not attend through transformers' attention interface")
    return recording


def _use_attention(model: Any, name: str) -> None:
    """Switch the attention implementation; refuses a model that cannot."""
    _attempt(model, "its attention cannot be exchanged", lambda: model.set_attn_implementation(name))
    if model.config._attn_implementation != name:
        raise refuse(model, "its layers do not attend through transformers' attention interface")


def _check(paged: TransformersModel, expected: Reference, options: TensorOptions) -> None:
    """Compare with what transformers computed; refuses a model whose logits differ by more than rounding explains."""
    model: Any = paged.model
    error = _attempt(
        model, "it fails", lambda: distance(paged, expected, paged.attention_specs, paged.backend, options.dtype)
    )
    largest = limit(options.dtype)
    if error > largest:
        raise refuse(model, f"its logits differ from transformers' own by {error:.1e} of their length{_guess(paged)}")
    _logger.info(
        "self-check of %s: logits differ from transformers' own by %.1e of their length, %.1e allowed; "
        "%d calls of attention a step",
        type(model).__name__, error, largest, len(paged.attention_specs),
    )  # fmt: skip


def _guess(paged: TransformersModel) -> str:
    """A likely reason, where there is one."""
    config: Any = paged.model.config
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    num_calls = len(paged.attention_specs)
    if num_layers is not None and num_calls < num_layers:
        return f"; only {num_calls} of its {num_layers} layers attend through transformers' attention interface"
    return "; its layers use more than token, position and cached keys and values"


def _attempt(model: Any, what: str, run: Callable[[], T]) -> T:
    """``run()``, with whatever the model's code raises as a refusal."""
    try:
        return run()
    except _MODEL_ERRORS as error:
        raise refuse(model, f"{what}: {one_line(error)}") from error
