"""Compile the Triton kernels for the GPUs of some compute capabilities, which need not be there.

python compile_depthwise.py 80 90: exit status 1 if one does not compile or spills registers.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from carnelian_training.models import depthwise_gpu as kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def main(capability: int) -> None:
    for dtype in ("fp16", "fp32"):
        tiles = {"run": kernels.RUN, "tile_c": kernels.TILE_CHANNELS}
        pointers = {"x": dtype, "taps": "fp32", "out": dtype}
        numbers = ["frames", "channels", "kernel"]
        compile_kernel(kernels._convolve_run, pointers, numbers, tiles, capability)
        pointers = {"x": dtype, "grad": dtype, "sums": "fp32"}
        compile_kernel(kernels._sum_run, pointers, ["batch", *numbers], {"splits": kernels.SPLITS, **tiles}, capability)


def compile_kernel(function, pointers: dict, numbers: list, constants: dict, capability: int) -> None:
    signature = {name: f"*{dtype}" for name, dtype in pointers.items()} | dict.fromkeys(numbers, "i32")
    signature |= dict.fromkeys(constants, "constexpr")
    # As PyTorch's tensors and QuartzNet's channels are, which a launch would find out.
    aligned = [*range(len(pointers)), list(signature).index("channels")]
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": kernels.WARPS})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(compiled.asm["cubin"])
        binary.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", binary.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+).*LOCAL:(\d+)", usage)
    if not found or found.groups() != ("0", "0"):
        sys.exit(f"{signature} on {capability}: registers must not spill, but {usage}")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(int(argument))
