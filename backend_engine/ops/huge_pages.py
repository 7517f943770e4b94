"""``HugePages``: memory for tensors that are read from end to end again and again, in pages of 2 MiB if Linux has them.

Made by whoever packs the weights of a model, so that small weights share such pages too. With pages of 4 KiB reading
waits for addresses as well as for data. Knows nothing of what is stored.
"""

import math
import mmap

import torch
from torch import Tensor

_PAGE_BYTES = 2 << 20
_BLOCK_BYTES = 32 << 20
_ALIGNMENT = 64


class HugePages:
    """Hands out memory and takes none back: a block is freed when no tensor in it is held any more. Pages that are
    not used are not taken from the system, except for the rest of a block's last one.
    """

    def __init__(self) -> None:
        self._block = mmap.mmap(-1, mmap.PAGESIZE)
        self._start = self._stop = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with zeros, at a multiple of 64 bytes."""
        count = math.prod(shape)
        num_bytes = max(count * dtype.itemsize, 1)
        if num_bytes > self._stop - self._start:
            self._map(max(num_bytes, _BLOCK_BYTES))
        tensor = torch.frombuffer(self._block, dtype=dtype, count=max(count, 1), offset=self._start)
        self._start += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return tensor[:count].view(shape)

    def _map(self, num_bytes: int) -> None:
        self._stop = _PAGE_BYTES + -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self._block = mmap.mmap(-1, self._stop, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._block.madvise(mmap.MADV_HUGEPAGE)
        address = torch.frombuffer(self._block, dtype=torch.uint8, count=1).data_ptr()
        self._start = -address % _PAGE_BYTES
