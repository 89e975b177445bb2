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


MODEL = {"model": "NAME"}
CHAT = MODEL | {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
# Routes that a request can name an adapter on: its body, and what answers a key that is bound to another one: 404 as if
# there were none, or 403 where it would be made or changed.
ADAPTER_ROUTES = {
    "/v1/completions": (MODEL | {"prompt": "hi", "max_tokens": 1}, 404),
    "/v1/chat/completions": (CHAT, 404),
    "/generate": ({"lora_adapter": "NAME", "prompt": "hi", "max_tokens": 1}, 404),
    "/v1/messages": (CHAT, 404),
    "/v1/messages/count_tokens": (CHAT, 404),
    "/v1/responses": (MODEL | {"input": "hi", "max_output_tokens": 1}, 404),
    "/v1/responses/input_tokens": (MODEL | {"input": "hi"}, 404),
    "/api/chat": (CHAT, 404),
    "/api/generate": (MODEL | {"prompt": "hi", "stream": False, "options": {"num_predict": 1}}, 404),
    "/api/show": (MODEL, 404),
    "/tokenize": (MODEL | {"prompt": "hi"}, 404),
    "/detokenize": (MODEL | {"tokens": [5]}, 404),
    "/v1/rl/rollout": (MODEL | {"prompts": ["hi"], "n": 2, "max_tokens": 1}, 404),
    "/v1/training/update": ({"adapter": "NAME"}, 404),
    "/training/checkpoint": ({"adapter": "NAME"}, 404),
    "/v1/adapters/pin": ({"name": "NAME", "version": 1}, 404),
    "/v1/adapters/unpin": ({"name": "NAME", "version": 1}, 404),
    "/v1/adapters/rollback": ({"name": "NAME"}, 404),
    "/v1/adapters/load": ({"name": "NAME", "path": "FOLDER"}, 403),
    "/load_adapter": ({"name": "NAME", "path": "FOLDER"}, 403),
    "/v1/load_lora_adapter": ({"lora_name": "NAME", "lora_path": "FOLDER"}, 403),
    "/update_adapter_weights": ({"name": "NAME", "tensors": "AAAA"}, 403),
    "/v1/adapters/unload": ({"name": "NAME"}, 404),
    "/unload_adapter": ({"name": "NAME"}, 404),
    "/v1/unload_lora_adapter": ({"lora_name": "NAME"}, 404),
}
