"""How many tokens a response may have, and sampling parameters that the model can take."""

from dataclasses import replace

from mlx_parallm.errors import ContextLengthError
from mlx_parallm.sampling_params import SamplingParams, check_sampling
from mlx_parallm.server.generation.call import GenerationCall
from mlx_parallm.server.model_table import ServedModel


def sampling_for(
    call: GenerationCall, served: ServedModel, prompt_tokens: int, grammar: str | None, default_max_tokens: int | None
) -> SamplingParams:
    """A call's parameters for a prompt of so many tokens. `default_max_tokens`: the server's, before the dialect's."""
    vocab_size = served.model.vocab_size
    top_k = call.sampling.top_k
    max_tokens = completion_length(
        served,
        prompt_tokens,
        asked=call.sampling.max_tokens,
        default=default_max_tokens or call.default_max_tokens,
        prompt="prompt" if call.chat is None else "messages",
        param=call.max_tokens_field,
        fit=call.fit_max_tokens,
    )
    sampling = replace(
        call.sampling, max_tokens=max_tokens, top_k=0 if top_k >= vocab_size else max(top_k, 0), grammar=grammar
    )
    check_sampling(sampling, vocab_size)
    return sampling


def completion_length(
    served: ServedModel,
    prompt_tokens: int,
    *,
    asked: int | None,
    default: int | None,
    prompt: str,
    param: str,
    fit: bool = False,
) -> int | None:
    """The most tokens to generate; None leaves it to the context. What was asked for must fit, as in vLLM, unless `fit`
    has it cut to what does."""
    context = served.context_length
    room = context - prompt_tokens
    if room < 1:
        raise ContextLengthError.of(context, prompt_tokens, param=prompt)
    if asked is not None and fit:
        return min(asked, room)
    if asked is not None and asked > room:
        error = ContextLengthError.of(context, prompt_tokens, asked, param=prompt)
        error.param = param
        raise error
    if asked is not None:
        return asked
    return None if default is None else min(default, room)
