"""``upload``: host arrays to the decoder's device without waiting for it."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """``array`` as a tensor on ``device``; on a CPU they share memory, to CUDA the copy goes through pinned memory."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
