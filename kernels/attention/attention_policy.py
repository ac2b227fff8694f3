"""Launch policy of the attention kernels: a tuned configuration from attention_table.json, or else the rules below.

`vit-fast kernels --tune` writes the table. It is empty as long as no GPU was measured.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations_with_replacement
from pathlib import Path

from ..device import generation, reads_descriptors, starts_early

TABLE_PATH = Path(__file__).with_name("attention_table.json")
MAX_ROW_KEYS = 256
MIN_BLOCK = 16
_SMALL_AMPERE = ("sm_86", "sm_89")  # without maxnreg, ptxas gives some kernels so few registers that they spill
SHORT = 64  # tokens, e.g. a window of Qwen2.5-VL; for up to 64 tokens, tiles of 128 would be at least half empty
# (largest chunk, maximum number of chunks) of the row kernel; the first pair is the default. A tuned entry applies to
# all lengths up to MAX_ROW_KEYS. Therefore, each pair must be able to cover MAX_ROW_KEYS keys.
ROW_CHUNKS = ((128, 3), (128, 2), (256, 1))


@dataclass(frozen=True)
class AttentionConfig:
    """Configuration of an attention kernel."""

    block_m: int  # queries per tile
    block_n: int  # keys per tile; largest chunk of the row kernel
    num_warps: int = 4
    num_stages: int = 2
    tma: bool = False  # use TMA descriptors if the layout allows
    maxnreg: int | None = None
    chunks: int = 0  # maximum number of chunks of the row kernel; 0 for other kernels, which loop over tiles
    tiles: int = 1  # maximum number of query tiles per program of the row kernel
    dependent: bool = False  # forward: use programmatic dependent launch (ptx.py)


@cache
def split_head_dim(head_dim: int) -> tuple[int, int]:
    """Returns the widths (LO, HI) of power-of-two blocks for a head. HI is 0 if a second block would save no columns.

    48 -> (32, 16), 72 and 80 -> (64, 16), 96 -> (64, 32), 112 -> (128, 0). A block has at least 16 columns.
    """
    whole = max(MIN_BLOCK, 1 << (head_dim - 1).bit_length())
    lo = whole // 2
    rest = head_dim - lo
    hi = max(MIN_BLOCK, 1 << (rest - 1).bit_length()) if rest > 0 else 0
    return (whole, 0) if lo < MIN_BLOCK or lo + hi >= whole else (lo, hi)


@cache
def cover(length: int, largest: int, pieces: int) -> tuple[int, ...]:
    """Covers `length` by at most `pieces` non-increasing powers of two from 16 to `largest`, with the least excess.

    Only the last piece may extend past the length: 197 -> (128, 64, 16). Returns () for length 0 or if no cover exists.
    """
    if length <= 0:
        return ()
    sizes = [size for size in (256, 128, 64, 32, MIN_BLOCK) if size <= largest]
    covers = (cover for count in range(1, pieces + 1) for cover in combinations_with_replacement(sizes, count))
    fitting = (cover for cover in covers if sum(cover[:-1]) < length <= sum(cover))
    return min(fitting, key=lambda cover: (sum(cover), len(cover)), default=())


@dataclass(frozen=True)
class Problem:
    """Input of the launch policy.

    `access` is the fastest access that the layout of all tensors allows: "tma" (descriptors), "vector" (aligned 16-byte
    loads) or "scalar" (unaligned rows).
    """

    arch: str
    sm_count: int
    element: str  # the `matmul_kind` of the tensors (device.py): "half" or "tf32"
    head_dim: int
    n_q: int
    n_kv: int
    batch_heads: int
    access: str
    form: str = "fixed"  # or "packed" or "masked" (attention_tiles.py)

    @property
    def of_one_long(self) -> Problem:
        """The same problem with fixed inputs that are too long for the row kernel, which accepts only fixed inputs."""
        longest = MAX_ROW_KEYS + 1
        return replace(self, n_q=max(self.n_q, longest), n_kv=max(self.n_kv, longest), form="fixed")

    @property
    def width(self) -> int:  # columns of a tile, including padding
        return sum(split_head_dim(self.head_dim))

    @property
    def generation(self) -> str:
        return generation(self.arch)

    @property
    def uses_tma(self) -> bool:
        return self.access == "tma" and reads_descriptors(self.arch)

    @property
    def shape_class(self) -> str:
        """The start of the key in the tuned table: architecture, element, width, length and access."""
        length = "short" if self.n_kv <= MAX_ROW_KEYS else "long"
        access = "vector" if self.access == "tma" and not self.uses_tma else self.access
        return f"{self.arch}/{self.element}/{self.width}/{length}/{access}"


def forward_config(problem: Problem) -> AttentionConfig:
    if problem.form != "fixed":
        return _forward_of_sequences(problem, forward_config(problem.of_one_long))
    config = _tuned(problem, "forward") or _forward_rule(problem)
    if config.chunks:
        config = replace(config, tiles=_tiles_per_program(problem, config))
    return with_early_start(problem, config)


def with_early_start(problem: Problem, config: AttentionConfig) -> AttentionConfig:
    early = config.tiles == 1 and problem.element == "half" and starts_early(problem.arch)  # TF32 would spill
    return replace(config, dependent=early)


def dq_config(problem: Problem) -> AttentionConfig:
    if problem.form != "fixed":
        problem = problem.of_one_long
    return _tuned(problem, "dq") or _dq_rule(problem)


def dkdv_config(problem: Problem) -> AttentionConfig:
    if problem.form != "fixed":
        return _dkdv_of_sequences(problem, dkdv_config(problem.of_one_long))
    return _tuned(problem, "dkdv") or _dkdv_rule(problem)


def _forward_of_sequences(problem: Problem, config: AttentionConfig) -> AttentionConfig:
    """Adapts the `config` of fixed inputs to packed or masked inputs: smaller tiles for short sequences, no spills."""
    width, ampere, blackwell = problem.width, problem.generation == "ampere", problem.generation == "blackwell"
    if problem.n_q <= SHORT or (blackwell and width == 128):
        config = replace(config, block_m=min(config.block_m, SHORT))
    if problem.n_kv <= SHORT:
        config = replace(config, block_n=min(config.block_n, SHORT))
    if ampere and width <= 32:
        config = replace(config, block_n=min(config.block_n, 32))
    if blackwell and width == 128 and problem.element != "half":
        config = replace(config, block_m=32)
    if ampere and width >= 80 and problem.form == "masked":
        config = replace(config, block_m=min(config.block_m, 64))
    half_of_128 = problem.element == "half" and width == 128 and problem.access != "scalar"
    if problem.arch in _SMALL_AMPERE and half_of_128 and problem.n_q <= SHORT:
        config = replace(config, maxnreg=255)
    return config


def _dkdv_of_sequences(problem: Problem, config: AttentionConfig) -> AttentionConfig:
    width, half = problem.width, problem.element == "half"
    if width == 128 and not half:
        config = replace(config, block_m=16, num_warps=8)
    if width >= 80 and problem.generation == "ampere" and problem.form == "masked":
        config = replace(config, block_m=16)
    packed_hopper = problem.form == "packed" and problem.generation == "hopper"
    if width == 80 and (problem.arch == "sm_80" if half else problem.arch in _SMALL_AMPERE or packed_hopper):
        config = replace(config, block_m=16)  # tiles of 32 queries spill; in half precision, only with triton 3.6
    if width == 128 and problem.generation == "hopper" and config.tma:
        config = replace(config, block_m=64, num_warps=8)
    return config


def _tiles_per_program(problem: Problem, config: AttentionConfig) -> int:
    """Returns query tiles per program: config.tiles, halved while there are under four programs per multiprocessor."""
    tiles = -(-problem.n_q // config.block_m)
    per_program = config.tiles
    # with a single query tile per program, the row kernel spills on ampere
    fewest = 2 if problem.generation == "ampere" else 1
    while per_program > fewest and problem.batch_heads * -(-tiles // per_program) < 4 * problem.sm_count:
        per_program //= 2
    return per_program


def _forward_rule(problem: Problem) -> AttentionConfig:
    tma, generation, width = problem.uses_tma, problem.generation, problem.width
    if problem.element == "tf32":
        if generation != "ampere" and tma:
            return AttentionConfig(64, 32, num_warps=4 if generation == "hopper" else 8, num_stages=2, tma=True)
        return AttentionConfig(32, 64, num_warps=8, num_stages=2)
    if problem.access == "scalar":
        return AttentionConfig(32, 32, num_warps=4, num_stages=1)
    # with more columns, or with more keys (including padding), the row kernel spills
    most_columns, most_keys = 80 if tma else 64, 208 if generation == "ampere" else MAX_ROW_KEYS
    keys = sum(cover(problem.n_kv, 128, 3))
    # If the row kernel needs over 49 of 100 KB shared memory, only one program fits per multiprocessor. Three programs
    # of the looped kernel fit: one can compute while the other two load.
    alone = problem.arch in ("sm_86", "sm_89", "sm_120") and width * (4 * keys + 128) > 49 * 1024
    if generation == "ampere" and (problem.n_q <= 64 or alone) and 128 < keys <= most_keys and width <= most_columns:
        # up to 64 queries (attention pooling) are a single tile, for which the row kernel spills (_tiles_per_program)
        return AttentionConfig(64, 64, num_warps=4, num_stages=2)
    if width <= most_columns and keys in range(1, most_keys + 1):
        # one query tile per program on blackwell: two would need all tensor memory of the multiprocessor
        tiles = 1 if generation == "blackwell" else 4
        return AttentionConfig(64, 128, num_warps=4, num_stages=1, tma=tma, chunks=3, tiles=tiles)
    if tma and generation == "hopper":
        return AttentionConfig(64, 128 if width < 128 else 64, num_warps=4, num_stages=2, tma=True)
    if tma:
        return AttentionConfig(128, 64, num_warps=4, num_stages=2, tma=True)
    if problem.arch == "sm_120" and width == 128:
        # tiles of 128 queries spill
        return AttentionConfig(64, 64, num_warps=8, num_stages=2)
    if generation == "ampere" and width == 48 and problem.arch != "sm_80":
        # with 168 registers per thread, 3 programs of 4 warps fit on a multiprocessor, or 1 program of 8 warps;
        # 2 programs of 8 warps would need maxnreg=128, and spill
        return AttentionConfig(64, 64, num_warps=4, num_stages=2)
    if generation == "ampere":
        # without maxnreg, ptxas uses 170 registers for 48 columns, and only one program fits per multiprocessor
        return AttentionConfig(128, 64, num_warps=8, num_stages=2, maxnreg=128 if width == 48 else None)
    return AttentionConfig(64, 64, num_warps=8, num_stages=1)


def _dq_rule(problem: Problem) -> AttentionConfig:
    if problem.element != "half" and problem.width > 64:
        # tiles of 32 queries spill on sm_80; without maxnreg, ptxas uses 64 registers and spills
        return AttentionConfig(16, 32, num_warps=8, num_stages=1, maxnreg=128)
    if problem.element != "half" or problem.access == "scalar":
        return AttentionConfig(32, 32, num_warps=8, num_stages=1)
    if problem.generation == "ampere" and problem.width > 80:
        return AttentionConfig(32, 32, num_warps=8, num_stages=2)
    if problem.generation == "ampere":
        return AttentionConfig(64, 32, num_warps=4, num_stages=2)
    if problem.uses_tma:
        return AttentionConfig(64, 64, num_warps=4, num_stages=2, tma=True)
    return AttentionConfig(64, 64, num_warps=4 if problem.width <= 80 else 8, num_stages=1)


def _dkdv_rule(problem: Problem) -> AttentionConfig:
    if problem.element != "half":
        return AttentionConfig(32, 32, num_warps=8 if problem.width <= 80 else 16, num_stages=1)
    if problem.access == "scalar":
        block_m, block_n = (32, 32) if problem.width <= 64 else (16, 32) if problem.width == 80 else (32, 16)
        return AttentionConfig(block_m, block_n, num_warps=8, num_stages=1)
    if problem.generation == "ampere" and problem.width == 128:
        return AttentionConfig(32, 32, num_warps=8, num_stages=2)
    if problem.arch == "sm_120" and problem.width == 96:
        # tiles of 32 queries spill
        return AttentionConfig(16, 64, num_warps=8, num_stages=2)
    if problem.generation == "ampere":
        return AttentionConfig(32, 64, num_warps=4 if problem.width <= 64 else 8, num_stages=2)
    # tiles of 64 queries with 128 columns spill on hopper
    block_m = 32 if problem.generation == "hopper" and problem.width == 128 else 64
    if problem.uses_tma:
        # without maxnreg, ptxas uses 128 registers for 48 columns on blackwell, and spills
        maxnreg = 168 if problem.generation == "blackwell" and problem.width == 48 else None
        return AttentionConfig(block_m, 64, num_warps=4, num_stages=2, tma=True, maxnreg=maxnreg)
    return AttentionConfig(block_m, 64, num_warps=4 if problem.width <= 64 else 8, num_stages=1)


@cache
def tuned_table(path: Path) -> dict[str, AttentionConfig]:
    """Reads the tuned configurations by `shape_class` and kernel. Ignores another version's table, with a warning."""
    try:
        return {key: AttentionConfig(**config) for key, config in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        reason = f"this version of vit-fast cannot read them ({type(error).__name__}: {error})"
        message = f"the tuned tile sizes in {path} are ignored, because {reason}: run vit-fast kernels --tune again"
        warnings.warn(message, stacklevel=2)
        return {}


def _tuned(problem: Problem, kernel: str) -> AttentionConfig | None:
    return tuned_table(TABLE_PATH).get(f"{problem.shape_class}/{kernel}")
