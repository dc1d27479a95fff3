"""Compiles the launches of Triton's kernels for a GPU, without a GPU.

`python -m support.compiled [H100, A100 or L4]` compiles the launches of steps instead of launching
them, and prints the shared memory and the tensor-core products of each kernel.
"""

import inspect
import os
import sys
from itertools import product

os.environ.pop("TRITON_INTERPRET", None)  # before torch imports Triton

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from quire.kernels import backend as api
from quire.kernels.backend import AttentionMath, CosSin, MovedSlots
from quire.kernels.gathered import GatheredAttention
from quire.kernels.triton import launch
from quire.kernels.triton.backend import TritonAttention
from quire.kernels.triton.hardware import Hardware
from quire.layout.pages import KEY
from quire.layout.statistics import REDUCTIONS, QueryRing
from quire.policies.windows import POOLINGS, column_sums, window_scores
from support.coded_lanes import coded_twin
from support.lanes import Lanes, ScoredLanes

GPUS = {
    "H100": (90, 227 << 10, Hardware("NVIDIA H100", 132, 2, large_tiles=True, interpreted=False)),
    "A100": (80, 163 << 10, Hardware("NVIDIA A100", 108, 2, large_tiles=False, interpreted=False)),
    "L4": (89, 99 << 10, Hardware("NVIDIA L4", 58, 1, large_tiles=False, interpreted=False)),
}
"""Compute capability, shared memory of a block, and properties."""
CAPABILITY, SHARED_BYTES, HARDWARE = GPUS[sys.argv[1] if len(sys.argv) > 1 else "H100"]
TARGET = GPUTarget("cuda", CAPABILITY, 32)
_TYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16"}
_TYPES |= {torch.bfloat16: "bf16", torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16"}
_TYPES |= {torch.int32: "i32", torch.int64: "i64"}
_done = {}


def compile_launch(function, *args, num_warps=4, num_stages=3, **kwargs):
    """Compile a launch; print its resources the first time."""
    bound = inspect.signature(function.fn).bind(*args, **kwargs).arguments
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(function.params):
        value = bound[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{_TYPES[value.dtype]}"
            if value.data_ptr() % 16 == 0 and not parameter.do_not_specialize_on_alignment:
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    key = (function.fn.__name__, str(signature), str(constants), str(attributes), num_warps)
    if key in _done:
        return
    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    found = triton.compile(source, target=TARGET, options=options)
    assert found.metadata.shared <= SHARED_BYTES, f"{key[0]} needs {found.metadata.shared:,} B"
    ptx = found.asm["ptx"]
    products = sum(ptx.count(name) for name in ("wgmma.mma_async", "mma.sync"))
    _done[key] = found
    operand = str(bound.get("OPERAND", ""))
    shared_bytes = found.metadata.shared
    print(f"{key[0]:15} {operand:4} shared {shared_bytes:7,} B, {products:3} tensor-core products")


def run_steps():
    """Run steps with plain pages and codes, and writes, moves and packing."""
    backend = TritonAttention(torch.device("cpu"), GatheredAttention(torch.device("cpu")), HARDWARE)
    for dims in ((80, 80), (128, 128), (192, 128), (512, 512)):
        attend(backend, None, torch.bfloat16, *dims)
    attend(backend, None, torch.float16, 256, 256)
    attend(backend, None, torch.float32, 64, 32)
    attend(backend, "int8", torch.bfloat16, 192, 128)
    for codec, group in ((None, 16), (None, 128), ("float32/int8", 128)):
        attend_to_latents(backend, codec, group)
    for codec in ("int8", "fp8", "int4", "int3", "int4_outliers"):
        attend(backend, codec, torch.bfloat16, 128, 128)
    attend(backend, "int8", torch.float16, 128, 128)
    for dtype, width in ((torch.float32, 4096), (torch.bfloat16, 4096), (torch.float16, 5120)):
        run_rows(dtype, width)
    run_statistics(backend)
    run_evictions(backend)
    places = (torch.arange(4), torch.arange(4))
    planes = (torch.zeros(4, 2, 8, 64), torch.zeros(4, 2, 8, 64, dtype=torch.int8))
    backend.move(MovedSlots(planes, places, places))
    pages = torch.zeros(4, 4096, dtype=torch.uint8)
    launch.pack_pages(pages, torch.arange(3), pages[:3].clone())
    launch.unpack_pages(pages, torch.arange(3), pages[:3].clone())


def attend(backend, codec, dtype, head_dim, value_dim):
    rows, dims = [[400], [40], [60]], (head_dim, value_dim)
    lanes = Lanes([1, 1, 20], rows, dims, heads=2, dtype=torch.float32 if codec else dtype)
    query = lanes.query(4).to(dtype)
    coded = None
    if codec:
        lanes.pages = coded_twin(lanes, codec)
        coded = lanes.pages.coded
        lanes.fresh = lambda: (query, query)
    options = {"softcap": 30.0, "sinks": torch.zeros(8)} if head_dim == 80 else {}
    lanes.attend_with_sums(backend, query, AttentionMath(scale=head_dim**-0.5, **options))
    view = ScoredLanes(lanes, QueryRing(32), 4, lanes.pages).view(backend)
    column_sums(view, QueryRing(32))
    for pooling, heads in product(POOLINGS, REDUCTIONS):
        window_scores(view, QueryRing(32), api.WindowFinish(32, 5, pooling, heads))
    view.in_pages(KEY).norms()
    view.in_pages(KEY).mean_cosines()
    indices = torch.zeros(3, 1, dtype=torch.int64)
    keys, values = query[:3, :2], query.new_zeros(3, 2, value_dim)
    slots = api.NewSlots(lanes.pages.key, lanes.pages.value, indices, indices, coded)
    if codec not in ("int3", "int4_outliers"):
        backend.write(slots, keys, values)
        turns = torch.ones(3, head_dim // 2)
        for source in (None, torch.arange(3)):
            rope = CosSin(turns, turns)
            assert backend.rotate_and_write(slots, query[:3], keys, values, rope, source)


def attend_to_latents(backend, codec, group):
    """Decode rows of DeepSeek V3's shape."""
    dtype = torch.float32 if codec else torch.bfloat16
    lanes = Lanes([1, 1], [[4000], [40]], (64, 512), dtype=dtype)
    query = lanes.query(group, joined=True).bfloat16()
    if codec:
        lanes.pages = coded_twin(lanes, codec)
        lanes.fresh = lambda: (query, query)
    lanes.attend(backend, query, AttentionMath(scale=192**-0.5, joined=True))


def run_rows(dtype, width):
    """Run the row-wise kernels of decoder layers."""
    rows, norm = torch.zeros(3, width, dtype=dtype), torch.zeros(width, dtype=dtype)
    launch.normed(rows, None, norm, 1e-5)
    launch.normed(rows, rows, norm, 1e-5)
    launch.gated(rows)
    launch.norm_query_and_key(rows, (4, 2), (norm[:64], norm[:64]), 1e-6)
    heads = rows.view(3, -1, 64)
    launch.rotate(heads[:, :4], heads[:, 4:6], CosSin(torch.ones(3, 64), torch.ones(3, 64)))


def run_evictions(backend):
    """Select slots by each kind of score, and move them in planes of several types."""
    lanes, slots = 3, 1000
    number = torch.zeros(lanes, dtype=torch.int32)
    pages = torch.zeros(lanes, slots // 8, dtype=torch.int32)
    held = api.HeldLanes(torch.zeros(4, 8, dtype=torch.int32), pages, number, slots)
    assert backend.order_lanes(held) is not None
    scores = [
        torch.zeros(lanes, slots, dtype=d) for d in (torch.float32, torch.float64, torch.bool)
    ]
    for score in (None, *scores):
        ranking = api.SlotRanking(number, 20, 30, score, newest=number, protected=scores[2])
        backend.select_lanes(held, ranking)
    for after in (None, number):
        numbers = api.StoredNumbers(torch.zeros(4, 1, 8, 1), pages, after)
        found = backend.select_lanes(
            held, api.SlotRanking(number, 20, 30, None, numbers, 4, number)
        )
    arena = torch.zeros(4, 8 * 133, dtype=torch.uint8)
    planes = [arena[:, :1024].view(torch.bfloat16).view(4, 1, 8, 64)]
    planes += [arena[:, 1024 : 1024 + 32].view(torch.int32).view(4, 1, 8, 1)]
    planes += [arena[:, 1024 + 32 :].view(4, 1, 8, 1)]
    for some in (planes, planes[:2]):
        backend.move_lanes(some, pages, found)


def run_statistics(backend):
    """Accumulate each statistic."""
    numbers, table = torch.zeros(8, 2, 16, 1), torch.zeros(4, 1, 2, dtype=torch.int32)
    rows = torch.arange(3)
    slots = rows[:, None].int()
    for count in api.AttentionMeasure:
        for heads in REDUCTIONS:
            backend.tally(
                api.AttentionStatistic(numbers, table, 0, count, heads),
                api.StatisticRows(rows, rows, slots, rows.int(), max_slots=2),
                torch.zeros(3, 8, 32),
            )


def main():
    JITFunction.__getitem__ = lambda function, grid: (
        lambda *args, **kwargs: compile_launch(function, *args, **kwargs)
    )
    run_steps()
    target = f"compute capability {CAPABILITY / 10} by Triton {triton.__version__}"
    print(f"{len(_done)} kernels compiled for {target}")


if __name__ == "__main__":
    main()
