"""The native library as it would be compiled for other processors, for tests of what it computes."""

import ctypes
import subprocess
from pathlib import Path

from backend_engine.ops import native_library
from backend_engine.ops.native_runtime import NativeRuntime

HERE = "for this machine"
# For a processor without any of them, with AVX2 alone, and with wide vectors but no instructions for integers.
_FLAGS = {
    "plain C": ["-mno-avx2"],
    "AVX2 alone": ["-march=native", "-mno-avx512f"],
    "wide vectors": ["-march=native", "-DLANES=16", "-mno-avx512vnni"],
}
VARIANTS = [HERE, *_FLAGS]


def compiled_variant(name: str, folder: Path) -> NativeRuntime:
    """The runtime of a library of ``VARIANTS`` but for the first, compiled into ``folder`` unless it is there."""
    library = folder / f"{name.replace(' ', '_')}_native.so"
    if not library.exists():
        compiler, flags = native_library._find_compiler(), [*native_library._FLAGS, *_FLAGS[name]]
        command = [compiler, *flags, "-O1", "-Wno-psabi", str(native_library.SOURCE), "-o", str(library), "-lm"]
        subprocess.run(command, check=True)
    return NativeRuntime(ctypes.CDLL(str(library)))
