"""Every route, with who may call it once there are keys. A new route must be entered here."""

OPEN = {
    "/health", "/health/", "/metrics", "/dashboard", "/dashboard/login", "/dashboard/logout", "/dashboard/session",
}  # fmt: skip
USER = {
    "/v1/models", "/models", "/v1/models/{model_id}", "/v1/completions", "/v1/chat/completions", "/generate",
    "/generate/", "/chat/", "/get_world_size/", "/tokenize", "/detokenize", "/v1/adapters", "/is_paused",
    "/get_weight_version", "/server_info", "/get_server_info", "/v1/training/status", "/v1/training/feedback",
    "/v1/rl/rollout", "/v1/rewards/score", "/v1/score", "/score", "/pooling", "/v1/pool",
    "/v1/classifications", "/classify",
    "/v1/rerank", "/rerank", "/v2/rerank", "/v1/embeddings", "/v1/predict", "/v1/rl/act", "/v1/messages",
    "/v1/messages/count_tokens", "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/tags",
    "/api/show", "/api/ps", "/api/version",
    "/v1/responses", "/v1/responses/input_tokens", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel",
    "/v1/responses/{response_id}/input_items",
}  # fmt: skip
TRAINER = {
    "/v1/adapters/load", "/load_adapter", "/v1/adapters/unload", "/unload_adapter", "/v1/adapters/rollback",
    "/v1/adapters/pin", "/v1/adapters/unpin", "/v1/adapters/upload", "/upload_adapter", "/update_adapter_weights",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/pause", "/pause_generation", "/resume",
    "/continue_generation", "/flush_cache", "/reset_prefix_cache", "/reset_prefix_cache/", "/debug/training",
    "/v1/training/update", "/training/checkpoint", "/init_communicator/", "/update_named_param/",
    "/batch_update_named_params/", "/close_communicator/",
}  # fmt: skip
ADMIN = {
    "/model/switch-lora", "/debug/metrics", "/v1/models/load", "/v1/models/unload", "/dashboard/events",
    "/dashboard/snapshot", "/dashboard/requests", "/dashboard/rollouts",
}  # fmt: skip
ALL = OPEN | USER | TRAINER | ADMIN


def rights_of(path: str) -> str:
    """The least role that may call a route, or `open`."""
    kinds = {"open": OPEN, "user": USER, "trainer": TRAINER, "admin": ADMIN}
    return next(kind for kind, paths in kinds.items() if path in paths)
