"""Memory for keys and values, the prefix cache, and its tier on SSD."""

from dataclasses import dataclass

from mlx_parallm.config.options import check_at_least, option, parse_bool, parse_bytes
from mlx_parallm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    memory_limit: int | None = option(
        None,
        "most bytes that the process holds, weights included, as 24GiB (default: what the machine has to spare, within "
        "the container's limit)",
        parse=parse_bytes,
    )
    kv_cache_memory: int | None = option(
        None,
        "most bytes of running requests' keys and values, as 8GiB (default: two thirds of what is left of the limit)",
        parse=parse_bytes,
    )
    block_size: int = option(16, "tokens in a block of the prefix cache", parse=int)
    num_blocks: int | None = option(
        None,
        "most blocks of the prefix cache; 0 turns it off (default: half of the memory for keys and values)",
        parse=int,
    )
    kv_bits: int | None = option(
        None, "bits in which cached blocks are held, 8 or 4 (default: the model's own precision)", parse=int
    )
    kv_group_size: int = option(64, "elements that share a scale in blocks held in --kv-bits", parse=int)
    sequence_cache_size: int | None = option(
        None,
        "sequences of the whole context that the prefix cache may hold, in place of --num-blocks (default: by memory)",
        parse=int,
    )
    ssd: bool = option(
        True, "keep cached prompts on SSD too, over restarts", other_keys=("ssd_enabled",), parse=parse_bool
    )
    ssd_cache_dir: str | None = option(
        None, "folder of the cache on SSD, private to the user (default: kv in the user's cache folder)"
    )
    ssd_max_bytes: int = option(20_000_000_000, "most bytes of the cache on SSD, as 20GB", parse=parse_bytes)
    ssd_ttl_days: float = option(7.0, "days after which an unused file of the cache on SSD is removed", parse=float)

    def blocks(self, context_length: int, block_size: int) -> int | None:
        """Most blocks of the prefix cache of a model with such a context; None: as many as the memory has room for."""
        if self.sequence_cache_size is None:
            return self.num_blocks
        return self.sequence_cache_size * -(-context_length // block_size)

    @property
    def by_memory(self) -> bool:
        """Whether the prefix cache holds as much as the memory has room for."""
        return self.num_blocks is None and self.sequence_cache_size is None

    @property
    def off(self) -> bool:
        """Whether there is no prefix cache."""
        return self.num_blocks == 0 or self.sequence_cache_size == 0

    def __post_init__(self) -> None:
        check_at_least(self, 1, "memory_limit", "kv_cache_memory", "block_size")
        check_at_least(self, 0, "num_blocks", "ssd_max_bytes", "ssd_ttl_days", "sequence_cache_size")
        if self.sequence_cache_size is not None and self.num_blocks is not None:
            raise ConfigError("give either num_blocks or sequence_cache_size: both say how large the prefix cache is")
        if self.kv_bits not in (None, 4, 8):
            raise ConfigError(f"kv_bits must be 8 or 4, not {self.kv_bits}")
        if self.kv_group_size not in (32, 64, 128):
            raise ConfigError(f"kv_group_size must be 32, 64 or 128, not {self.kv_group_size}")
