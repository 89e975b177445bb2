"""Every route, with who may call it once there are keys. A new route must be entered here."""

OPEN = {"/health", "/health/", "/metrics"}
USER = {
    "/v1/models", "/models", "/v1/models/{model_id}", "/v1/completions", "/v1/chat/completions", "/generate",
    "/generate/", "/chat/", "/get_world_size/", "/tokenize", "/detokenize", "/v1/adapters", "/is_paused",
    "/get_weight_version", "/server_info", "/get_server_info", "/v1/training/status", "/v1/training/feedback",
    "/v1/rl/rollout", "/v1/rewards/score", "/v1/score", "/score", "/pooling", "/v1/classifications", "/classify",
    "/v1/rerank", "/rerank", "/v2/rerank", "/v1/embeddings", "/v1/predict", "/v1/rl/act",
}  # fmt: skip
ADMIN = {
    "/v1/adapters/load", "/load_adapter", "/v1/adapters/unload", "/unload_adapter", "/v1/adapters/rollback",
    "/v1/adapters/pin", "/v1/adapters/unpin", "/v1/adapters/upload", "/upload_adapter", "/update_adapter_weights",
    "/model/switch-lora", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/pause", "/pause_generation", "/resume",
    "/continue_generation", "/flush_cache", "/reset_prefix_cache", "/reset_prefix_cache/", "/debug/metrics",
    "/debug/training", "/v1/training/update", "/training/checkpoint", "/init_communicator/", "/update_named_param/",
    "/batch_update_named_params/", "/close_communicator/", "/v1/models/load", "/v1/models/unload",
}  # fmt: skip
