"""The commands, a file each: what `parallm`, `mlx_parallm_serve` and `mlx_parallm_train` do."""
