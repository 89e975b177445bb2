"""Adapters over HTTP: what there is, load, upload, unload, pin, roll back, and what the model's own name serves.

vLLM's names and bodies work as well.
"""

from functools import partial

from fastapi import APIRouter

from mlx_parallm.server.api.adapters.bodies import AdapterChanged, AdapterList, Switched, UpdateWeightsBody
from mlx_parallm.server.api.adapters.endpoints import RAW_TYPES, Adapters
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.http.route_table import TENSORS_WANTED, Route, Uploads
from mlx_parallm.server.http.routing import router_of

UPLOAD_TYPES = frozenset({"multipart/form-data", *RAW_TYPES})
UPLOAD_FORM = {
    "type": "object",
    "required": ["name", "weights"],
    "example": {"name": "math", "weights": "adapters.safetensors", "config": "adapter_config.json"},
    "properties": {
        "name": {"type": "string"},
        "version": {"type": "string"},
        "weights": {"type": "string", "format": "binary"},
        "config": {"type": "string", "format": "binary"},
    },
}
WEIGHTS = Uploads(UPLOAD_TYPES, TENSORS_WANTED, large=True)
FILES = Uploads(
    UPLOAD_TYPES,
    "the files must come as a form: curl -F name=NAME -F weights=@FILE -F config=@adapter_config.json",
    reads_json=False,
    large=True,
)
TEXT = {"text/plain": {"example": "Success"}}
UPLOADED = {"multipart/form-data": {"schema": UPLOAD_FORM}}
PUBLISHED = {
    "application/json": {"schema": UpdateWeightsBody.model_json_schema(by_alias=False)},
    RAW_TYPES[0]: {"schema": {"type": "string", "format": "binary"}},
}
trainers = partial(Route, role="trainer")
ROUTES = (
    Route("/v1/adapters", "GET", Adapters.adapters, AdapterList, "The adapters there are"),
    trainers("/v1/adapters/load", "POST", Adapters.load, AdapterChanged, "Load an adapter from a folder"),
    trainers("/load_adapter", "POST", Adapters.load, AdapterChanged, "Load an adapter from a folder"),
    trainers("/v1/adapters/unload", "POST", Adapters.unload, AdapterChanged, "Unload an adapter"),
    trainers("/unload_adapter", "POST", Adapters.unload, AdapterChanged, "Unload an adapter"),
    trainers("/v1/adapters/rollback", "POST", Adapters.rollback, AdapterChanged, "Back to an earlier version"),
    trainers("/v1/adapters/pin", "POST", Adapters.pin, AdapterChanged, "Keep a version"),
    trainers("/v1/adapters/unpin", "POST", Adapters.unpin, AdapterChanged, "Keep a version no longer"),
    Route("/model/switch-lora", "POST", Adapters.switch, Switched, "What the model's own name serves", role="admin"),
    trainers("/v1/load_lora_adapter", "POST", Adapters.vllm_load, str, "Load an adapter, as vLLM does", content=TEXT),
    trainers(
        "/v1/unload_lora_adapter",
        "POST",
        Adapters.vllm_unload,
        str,
        "Unload an adapter, as vLLM does",
        content=TEXT,
    ),
    trainers(
        "/update_adapter_weights",
        "POST",
        Adapters.update,
        AdapterChanged,
        "Publish weights that come in the body",
        uploads=WEIGHTS,
        body=PUBLISHED,
    ),
    *(
        trainers(
            path,
            "POST",
            Adapters.upload,
            AdapterChanged,
            "Publish an adapter from uploaded files",
            uploads=FILES,
            body=UPLOADED,
        )
        for path in ("/v1/adapters/upload", "/upload_adapter")
    ),
)


def router(context: ServerContext) -> APIRouter:
    return router_of("Adapters", ROUTES, Adapters(context))
