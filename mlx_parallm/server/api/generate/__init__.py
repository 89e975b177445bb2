"""`/generate` for trainers: tokens in, tokens out with their log-probabilities, in our own shape, vLLM's or SGLang's.

A body is told by its fields and answered in its own shape. The token that ends a response is part of it, with its
log-probability, and every response says which adapter version made which tokens.
"""

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Discriminator, Tag
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.server.api.generate.own import GenerateBody, Generated, OwnWriter
from mlx_parallm.server.api.generate.sglang import SglangBody, SglangGenerated, SglangWriter, sglang_call
from mlx_parallm.server.api.generate.vllm import VllmBody, VllmGenerated, VllmWriter
from mlx_parallm.server.api.generate.writer import GenerateWriter
from mlx_parallm.server.api.openai.completions import completion_call
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.generation.preparation import GenerationService, completion_name
from mlx_parallm.server.generation.responses import respond
from mlx_parallm.server.http.request_state import state_of
from mlx_parallm.server.http.route_table import Route
from mlx_parallm.server.http.routing import router_of

SGLANG_FIELDS = ("text", "input_ids", "sampling_params", "input_embeds")
OUR_FIELDS = ("policy_version", "step_id", "request_id")
# Fields that only vLLM's own server has; `stream` and `logprobs` are everybody's.
VLLM_FIELDS = ("n", "best_of", "use_beam_search", "prompt_logprobs", "prompt_token_ids", "detokenize")
GENERATE_TOKENS = 128  # unless a body says how many


def shape_of(body: Any) -> str:
    """Whose body /generate was sent, by the fields that only one of the three dialects has."""
    given = {key for key, value in body.items() if value is not None} if isinstance(body, dict) else set()
    if given.intersection(SGLANG_FIELDS):
        return "sglang"
    if given and isinstance(body["prompt"] if "prompt" in given else None, dict):
        return "vllm"
    if given.intersection(OUR_FIELDS):
        return "own"
    return "vllm" if given.intersection(VLLM_FIELDS) else "own"


GenerateInput = Annotated[
    Annotated[GenerateBody, Tag("own")] | Annotated[VllmBody, Tag("vllm")] | Annotated[SglangBody, Tag("sglang")],
    Discriminator(shape_of),
]

GenerateResponse = Generated | list[Generated] | VllmGenerated | SglangGenerated | list[SglangGenerated]


class Generate:
    def __init__(self, service: GenerationService) -> None:
        self._service = service

    async def generate(self, body: GenerateInput, request: Request) -> Response:
        """Tokens or text in; tokens, text, log-probabilities and adapter versions out. The bodies of vLLM's and
        SGLang's `/generate` are answered in their own shapes."""
        call = sglang_call(body) if isinstance(body, SglangBody) else completion_call(body, GENERATE_TOKENS)
        generation = await self._service.prepare(call, request, completion_name("gen-", request))
        request_id = state_of(request.scope).id
        writer: GenerateWriter
        if isinstance(body, SglangBody):
            writer = SglangWriter(body, generation, request_id)
        elif isinstance(body, VllmBody):
            writer = VllmWriter(body, generation, request_id)
        else:
            writer = OwnWriter(body, generation, request_id)
        return await respond(generation, writer, request)


ROUTES = (Route("/generate", "POST", Generate.generate, GenerateResponse, "Sample from the policy", streams=True),)


def router(context: ServerContext) -> APIRouter:
    return router_of("RL data plane", ROUTES, Generate(context.service))
