"""``Group``: modules that a compressed-tensors config quantizes alike. Refuses whatever the engine does not compute.

Read for ``compressed_tensors.py``, which finds the group of a module. Looks at no tensors.
"""

from typing import NamedTuple

from backend_engine.config.hf_config import HfConfig
from backend_engine.quantization.formats.compressed_args import MX_SCALES, NVFP4_SCALES, QuantArgs
from backend_engine.quantization.formats.module_patterns import ModulePatterns
from backend_engine.quantization.formats.mxfp4 import BLOCK_SIZE as MX_GROUP_SIZE
from backend_engine.quantization.formats.nvfp4 import GROUP_SIZE as NVFP4_GROUP_SIZE

_SPREADS = ("tensor", "channel", "group")
# Kinds of ``rounding.KINDS`` by what numbers are rounded to.
_KINDS = {("int", 8): "int8_wide", ("int", 4): "int4_wide", ("float", 8): "fp8"}
_PLAIN_SCALES = (None, "torch.float16", "torch.bfloat16", "torch.float32")


class Packing(NamedTuple):
    """What a format of the config can hold: the bits of each type, how scales are spread, columns of a group."""

    bits: dict[str, tuple[int, ...]]
    strategies: tuple[str, ...]
    group_size: int | None = None


_INT_BITS = tuple(range(1, 9))
PACKINGS = {
    "pack-quantized": Packing({"int": _INT_BITS}, _SPREADS),
    "int-quantized": Packing({"int": _INT_BITS}, (*_SPREADS, "block")),
    "naive-quantized": Packing({"int": _INT_BITS, "float": (8,)}, (*_SPREADS, "block")),
    "float-quantized": Packing({"float": (8,)}, (*_SPREADS, "block")),
    "nvfp4-pack-quantized": Packing({"float": (4,)}, ("tensor_group",), NVFP4_GROUP_SIZE),
    "mxfp4-pack-quantized": Packing({"float": (4,)}, ("group",), MX_GROUP_SIZE),
    "mxfp8-quantized": Packing({"float": (8,)}, ("group",), MX_GROUP_SIZE),
}


class InputRounding(NamedTuple):
    """kind: of ``rounding.KINDS``. group_size: columns that share a scale, ``None`` = all. is_static: the checkpoint
    has the scale (of NVFP4, the number beside the scales).
    """

    kind: str
    group_size: int | None = None
    is_static: bool = False
    is_symmetric: bool = True


class Group(NamedTuple):
    """packing: a key of ``PACKINGS``. inputs: ``None`` where they are left alone."""

    targets: ModulePatterns
    packing: str
    weights: QuantArgs
    inputs: InputRounding | None

    @property
    def has_packed_leaf(self) -> bool:
        """Whether the weight's first tensor is not called ``weight``."""
        return "pack" in self.packing


def read_group(config: HfConfig, groups: HfConfig, name: str) -> Group:
    """Group ``name`` of ``groups``, a section of ``config``. Raises ``ModelLoadError``."""
    group = groups.section(name)
    if group is None:
        raise groups.refuse(name, "an object with targets and weights")
    if group.get("targets") is None:
        raise group.refuse("targets", "a list of modules or classes")
    weights = group.section("weights")
    if weights is None:
        raise group.refuse("weights", "an object that tells how they are quantized")
    if group.get("output_activations") is not None:
        raise group.refuse("output_activations", "null: outputs are not rounded")
    source = config if group.get("format") is None else group
    packing = source.choice("format", PACKINGS)
    inputs = group.section("input_activations")
    for key in group.unread():
        raise group.refuse(key, "no such key")
    args = QuantArgs.read(weights)
    _check_weights(args, packing)
    rounding = None if inputs is None else _input_rounding(QuantArgs.read(inputs))
    return Group(ModulePatterns.read(group, "targets"), packing, args, rounding)


def _check_weights(args: QuantArgs, name: str) -> None:
    packing = PACKINGS[name]
    config = args.config
    with_format = f"with format {name}"
    if args.type not in packing.bits:
        raise config.refuse("type", f"{' or '.join(packing.bits)} {with_format}")
    if args.num_bits not in packing.bits[args.type]:
        bits = packing.bits[args.type]
        raise config.refuse("num_bits", f"{bits[0]}{f' to {bits[-1]}' if len(bits) > 1 else ''} {with_format}")
    if args.strategy not in packing.strategies:
        raise config.refuse("strategy", f"one of {', '.join(packing.strategies)} {with_format}")
    if packing.group_size is not None and args.group_size != packing.group_size:
        raise config.refuse("group_size", f"{packing.group_size} {with_format}")
    if args.type == "float" and not args.is_symmetric:
        raise config.refuse("symmetric", "true for floats")
    if args.dynamic != "no":
        raise config.refuse("dynamic", "false for weights")
    if args.has_order and not (name == "pack-quantized" and args.strategy == "group"):
        raise config.refuse("actorder", "weight, static or null, unless strategy is group and format pack-quantized")


def _input_rounding(args: QuantArgs) -> InputRounding:
    config = args.config
    bits = {"int": (4, 8), "float": (4, 8)}[args.type]
    if args.num_bits not in bits:
        raise config.refuse("num_bits", "4 or 8")
    if args.has_order:
        raise config.refuse("actorder", "null for inputs")
    if args.type == "float" and not args.is_symmetric:
        raise config.refuse("symmetric", "true for floats")
    if args.type == "float" and args.num_bits == 4:
        return _input_in_fp4(args)
    kind = _KINDS[args.type, args.num_bits]
    if args.strategy == "group":
        return _input_in_groups(args, kind)
    _check_scale_dtype(args, _PLAIN_SCALES)
    if args.strategy == "token":
        _check_dynamic(args, "yes", "true with strategy token")
        return InputRounding(kind, is_symmetric=args.is_symmetric)
    if args.strategy == "tensor":
        # One scale for a batch of several requests would let one change what another is answered.
        _check_dynamic(args, "no", "false with strategy tensor: a request would depend on others of its batch")
        return InputRounding(kind, is_static=True, is_symmetric=args.is_symmetric)
    raise config.refuse("strategy", "token, tensor or group")


def _input_in_groups(args: QuantArgs, kind: str) -> InputRounding:
    _check_dynamic(args, "yes", "true with strategy group")
    if not args.is_symmetric:
        raise args.config.refuse("symmetric", "true with strategy group")
    if args.type == "float" and args.group_size == MX_GROUP_SIZE and args.scale_dtype == MX_SCALES:
        return InputRounding("mxfp8", args.group_size)
    _check_scale_dtype(args, _PLAIN_SCALES)
    return InputRounding(kind, args.group_size)


def _input_in_fp4(args: QuantArgs) -> InputRounding:
    if args.strategy == "tensor_group":
        _check_dynamic(args, "local", "'local' with strategy tensor_group")
        _check_scale_dtype(args, (None, NVFP4_SCALES))
        kind, size, is_static = "nvfp4", NVFP4_GROUP_SIZE, True
    elif args.strategy == "group":
        _check_dynamic(args, "yes", "true with strategy group")
        _check_scale_dtype(args, (None, MX_SCALES))
        kind, size, is_static = "mxfp4", MX_GROUP_SIZE, False
    else:
        raise args.config.refuse("strategy", "tensor_group or group for floats of 4 bits")
    if args.group_size != size:
        raise args.config.refuse("group_size", f"{size} with strategy {args.strategy} and floats of 4 bits")
    return InputRounding(kind, size, is_static)


def _check_dynamic(args: QuantArgs, dynamic: str, allowed: str) -> None:
    if args.dynamic != dynamic:
        raise args.config.refuse("dynamic", allowed)


def _check_scale_dtype(args: QuantArgs, allowed: tuple[str | None, ...]) -> None:
    if args.scale_dtype not in allowed:
        raise args.config.refuse("scale_dtype", f"one of {', '.join(name for name in allowed if name)}, or no such key")
