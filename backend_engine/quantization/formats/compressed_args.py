"""``QuantArgs``: how compressed-tensors describes the rounding of one thing, the weights or the inputs of a layer.

Read from a group of the quantization config by ``compressed_tensors.py``. Knows the keys, not what is supported.
"""

from dataclasses import dataclass

from backend_engine.config.hf_config import HfConfig

STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group", "token", "attn_head")
MX_SCALES = "torch.uint8"
NVFP4_SCALES = "torch.float8_e4m3fn"
SCALE_DTYPES = (MX_SCALES, NVFP4_SCALES, "torch.float16", "torch.bfloat16", "torch.float32")
_NOT_NEEDED = ("observer", "observer_kwargs", "zp_dtype")
_ORDERS = {"weight": False, "static": False, "group": True, "dynamic": True}


@dataclass(frozen=True)
class QuantArgs:
    """dynamic: ``no``, ``yes``, or ``local`` (only the scales of groups are). has_order: columns of a group are not
    neighbours (GPTQ's act-order). block: rows and columns that share a scale. scale_dtype: what scales are rounded to.
    """

    config: HfConfig
    num_bits: int
    type: str
    strategy: str
    is_symmetric: bool
    group_size: int | None
    block: tuple[int, int] | None
    dynamic: str
    has_order: bool
    scale_dtype: str | None

    @classmethod
    def read(cls, config: HfConfig) -> "QuantArgs":
        """Raises ``ModelLoadError`` for a value that the format does not have."""
        group_size = _group_size(config)
        found = cls(
            config,
            num_bits=config.integer("num_bits", 8),
            type=config.choice("type", ("int", "float"), "int"),
            strategy=_strategy(config, group_size),
            is_symmetric=config.flag("symmetric", True),
            group_size=None if group_size == -1 else group_size,
            block=_block(config),
            dynamic=_dynamic(config),
            has_order=_has_order(config),
            scale_dtype=config.choice("scale_dtype", SCALE_DTYPES, "") or None,
        )
        if (found.strategy in ("group", "tensor_group")) != (found.group_size is not None):
            raise config.refuse("group_size", f"an integer with strategy group only, which is {found.strategy}")
        if (found.strategy == "block") != (found.block is not None):
            raise config.refuse("block_structure", f"two integers with strategy block only, which is {found.strategy}")
        for key in _NOT_NEEDED:
            config.get(key)
        for key in config.unread():
            raise config.refuse(key, "no such key")
        return found


def _group_size(config: HfConfig) -> int | None:
    size = config.get("group_size")
    if size is None or (size == -1 and not isinstance(size, bool)):
        return size
    return config.integer("group_size")


def _strategy(config: HfConfig, group_size: int | None) -> str:
    inferred = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    return config.choice("strategy", STRATEGIES, inferred)


def _block(config: HfConfig) -> tuple[int, int] | None:
    block = config.get("block_structure")
    if block is None:
        return None
    sizes = block.split("x") if isinstance(block, str) else block
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(_is_size(size) for size in sizes):
        raise config.refuse("block_structure", "two integers of at least 1, rows and columns")
    return int(sizes[0]), int(sizes[1])


def _is_size(size: object) -> bool:
    if isinstance(size, str):
        return size.isdecimal() and int(size) > 0
    return isinstance(size, int) and not isinstance(size, bool) and size > 0


def _dynamic(config: HfConfig) -> str:
    dynamic = config.get("dynamic")
    if dynamic is None or isinstance(dynamic, bool):
        return "yes" if dynamic else "no"
    if dynamic != "local":
        raise config.refuse("dynamic", "true, false or 'local'")
    return "local"


def _has_order(config: HfConfig) -> bool:
    order = config.get("actorder")
    if order is None or isinstance(order, bool):
        return bool(order)
    return _ORDERS[config.choice("actorder", _ORDERS)]
