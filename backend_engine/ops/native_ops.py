"""``NativeOps``: the operations of ``TorchOps`` by the native library, where it has them.

Chosen by name or by ``auto`` on a CPU. What the library cannot do with (other dtypes, tensors with gaps) is left to the
reference, operation by operation.
"""

import ctypes

import torch
from torch import Tensor

from backend_engine.ops.native_runtime import AddOp, NativeRuntime, OpKind, native_runtime
from backend_engine.ops.torch_ops import TorchOps

_SILU, _GELU_TANH, _GELU, _RELU, _CLAMPED_SWIGLU = range(5)
_GELUS = {"none": _GELU, "tanh": _GELU_TANH}

_number, _address, _float = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class _Rows(ctypes.Structure):
    """``input_rows`` and ``output_rows`` of rows.h."""

    _fields_ = (("data", _address), ("stride", _number), ("inner", _number))


class _RmsNorm(ctypes.Structure):
    _fields_ = (
        ("kind", _number), ("x", _Rows), ("out", _Rows), ("weight", _address), ("per_token", _number),
        ("width", _number), ("eps", _float),
    )  # fmt: skip


class _AddRmsNorm(ctypes.Structure):
    _fields_ = (
        ("kind", _number), ("x", _address), ("residual", _address), ("weight", _address), ("total", _address),
        ("out", _address), ("x_stride", _number), ("residual_stride", _number), ("width", _number), ("eps", _float),
    )  # fmt: skip


class _LayerNorm(ctypes.Structure):
    _fields_ = (
        ("kind", _number), ("x", _Rows), ("out", _Rows), ("weight", _address), ("bias", _address),
        ("per_token", _number), ("width", _number), ("eps", _float),
    )  # fmt: skip


class _Rope(ctypes.Structure):
    _fields_ = (
        ("kind", _number), ("x", _Rows), ("out", _Rows), ("cos", _address), ("sin", _address), ("num_heads", _number),
        ("width", _number), ("dim", _number), ("table_stride", _number),
    )  # fmt: skip


class ActivationOp(ctypes.Structure):
    """``activation_op`` of rows.h."""

    _fields_ = (
        ("kind", _number), ("x", _address), ("out", _address), ("x_stride", _number), ("width", _number),
        ("act", _number), ("gated", _number), ("alpha", _float), ("limit", _float),
    )  # fmt: skip


class _Scale(ctypes.Structure):
    _fields_ = (
        ("kind", _number), ("x", _address), ("out", _address), ("x_stride", _number), ("width", _number),
        ("factor", _float),
    )  # fmt: skip


class NativeOps(TorchOps):
    """See the module; all of it is the reference's where there is no native library."""

    def __init__(self) -> None:
        self._runtime = native_runtime()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        runtime = self._serving(x, weight)
        if runtime is None or x.ndim not in (2, 3):
            return super().rms_norm(x, weight, eps)
        out = runtime.empty(x.shape[0], x.shape[1:].numel()).view(x.shape)
        per_token = x.shape[1] if x.ndim == 3 else 1
        op = _RmsNorm(OpKind.RMS_NORM, _rows(x), _rows(out), weight.data_ptr(), per_token, x.shape[-1], eps)
        runtime.check_input(x)
        runtime.run(op, x.shape[0], weight)
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        runtime = self._serving(x, weight)
        if runtime is None or x.ndim not in (2, 3):
            return super().layer_norm(x, weight, bias, eps)
        out = runtime.empty(x.shape[0], x.shape[1:].numel()).view(x.shape)
        per_token = x.shape[1] if x.ndim == 3 else 1
        address = None if bias is None else bias.data_ptr()
        op = _LayerNorm(
            OpKind.LAYER_NORM, _rows(x), _rows(out), weight.data_ptr(), address, per_token, x.shape[-1], eps
        )
        runtime.check_input(x)
        runtime.run(op, x.shape[0], (weight, bias))
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        runtime = self._serving(x, weight)
        if runtime is None or x.ndim != 2 or not _is_plain(residual):
            return super().add_rms_norm(x, residual, weight, eps)
        num_tokens, width = x.shape
        total, out = runtime.empty(num_tokens, width), runtime.empty(num_tokens, width)
        op = _AddRmsNorm(
            OpKind.ADD_RMS_NORM, x.data_ptr(), residual.data_ptr(), weight.data_ptr(), total.data_ptr(), out.data_ptr(),
            x.stride(0), residual.stride(0), width, eps,
        )  # fmt: skip
        runtime.check_input(x)
        runtime.check_input(residual)
        runtime.run(op, num_tokens, weight)
        return out, total

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        out = self._activate(gate_up, _SILU, is_gated=True)
        return super().silu_and_mul(gate_up) if out is None else out

    def gelu_and_mul(self, gate_up: Tensor, approximate: str) -> Tensor:
        out = self._activate(gate_up, _GELUS[approximate], is_gated=True)
        return super().gelu_and_mul(gate_up, approximate) if out is None else out

    def relu_and_mul(self, gate_up: Tensor) -> Tensor:
        out = self._activate(gate_up, _RELU, is_gated=True)
        return super().relu_and_mul(gate_up) if out is None else out

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        out = self._activate(gate_up, _CLAMPED_SWIGLU, is_gated=True, alpha=alpha, limit=limit)
        return super().clamped_swiglu(gate_up, alpha, limit) if out is None else out

    def gelu(self, x: Tensor, approximate: str) -> Tensor:
        out = self._activate(x, _GELUS[approximate], is_gated=False)
        return super().gelu(x, approximate) if out is None else out

    def relu(self, x: Tensor) -> Tensor:
        out = self._activate(x, _RELU, is_gated=False)
        return super().relu(x) if out is None else out

    def silu(self, x: Tensor) -> Tensor:
        out = self._activate(x, _SILU, is_gated=False)
        return super().silu(x) if out is None else out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        runtime = self._serving(x, y)
        if runtime is None or x.ndim != 2 or x.shape != y.shape:
            return super().add(x, y)
        num_tokens, width = x.shape
        out = runtime.empty(num_tokens, width)
        runtime.check_input(x)
        runtime.check_input(y)
        op = AddOp(OpKind.ADD, x.data_ptr(), y.data_ptr(), out.data_ptr(), x.stride(0), y.stride(0), width)
        runtime.run(op, num_tokens)
        return out

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        runtime = self._serving(x)
        if runtime is None or x.ndim != 2:
            return super().scaled(x, factor)
        out = runtime.empty(*x.shape)
        runtime.check_input(x)
        runtime.run(_Scale(OpKind.SCALE, x.data_ptr(), out.data_ptr(), x.stride(0), x.shape[1], factor), x.shape[0])
        return out

    def rope_tables(self, positions: Tensor, inverse_frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """In float64 on the way: torch's cosines of float32 differ in their last bit by the place in a tensor."""
        if self._runtime is None or positions.device.type != "cpu":
            return super().rope_tables(positions, inverse_frequencies, scale)
        angles = (positions.to(torch.float32).unsqueeze(-1) * inverse_frequencies).to(torch.float64)
        cos, sin = (table.to(torch.float32) * scale for table in (angles.cos(), angles.sin()))
        return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)

    def apply_rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        runtime = self._serving(x, cos, sin)
        if runtime is None or x.ndim != 3 or cos.shape[-1] % 2:
            return super().apply_rope(x, cos, sin)
        num_tokens, num_heads, width = x.shape
        out = runtime.empty(num_tokens, num_heads * width).view(x.shape)
        op = _Rope(
            OpKind.ROPE,
            _rows(x),
            _rows(out),
            cos.data_ptr(),
            sin.data_ptr(),
            num_heads,
            width,
            cos.shape[-1],
            cos.stride(0),
        )
        for tensor in (x, cos, sin):
            runtime.check_input(tensor)
        runtime.run(op, num_tokens)
        return out

    def _activate(self, x: Tensor, act: int, is_gated: bool, alpha: float = 0.0, limit: float = 0.0) -> Tensor | None:
        runtime = self._serving(x)
        if runtime is None or x.ndim != 2:
            return None
        num_tokens, width = x.shape[0], x.shape[1] // 2 if is_gated else x.shape[1]
        out = runtime.empty(num_tokens, width)
        op = ActivationOp(
            OpKind.ACTIVATION, x.data_ptr(), out.data_ptr(), x.stride(0), width, act, is_gated, alpha, limit
        )
        runtime.check_input(x)
        runtime.run(op, num_tokens)
        return out

    def _serving(self, *tensors: Tensor) -> NativeRuntime | None:
        """The runtime, if it can work with all of them."""
        return self._runtime if self._runtime is not None and all(_is_plain(tensor) for tensor in tensors) else None


def _is_plain(x: Tensor) -> bool:
    """On the CPU, float32, and the numbers of a row side by side."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.stride(-1) == 1


def _rows(x: Tensor) -> _Rows:
    return _Rows(x.data_ptr(), x.stride(0), x.stride(1) if x.ndim == 3 else 0)
