"""One model over several processes, with `mlx.distributed`."""
