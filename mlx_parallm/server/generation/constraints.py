"""The grammar that a call's output must follow: its structure, its tools, and what comes before them."""

from functools import partial

from mlx_parallm.server.generation.call import GenerationCall
from mlx_parallm.server.generation.tokenizers import TokenizerPool
from mlx_parallm.server.model_table import ServedModel
from mlx_parallm.text.compiled_grammar import CompiledGrammar
from mlx_parallm.text.grammar import CompletionFormat, completion_grammar


async def compiled_grammar(
    call: GenerationCall, served: ServedModel, inside_thinking: bool, pool: TokenizerPool
) -> tuple[str, CompiledGrammar] | None:
    """None where the output is free. It is compiled once here, off the event loop, so that errors are the client's."""
    structure = call.structure
    param = "tools"
    chat = call.chat
    grammar = None if structure is None else structure.grammar
    if chat is not None:
        answers = CompletionFormat(served.tool_format, served.thinking, served.vocabulary, inside_thinking)
        grammar = completion_grammar(
            grammar,
            answers,
            chat.conversation.tools,
            must_call=chat.must_call,
            tool_name=chat.tool_name,
            parallel=chat.parallel_calls,
        )
    if grammar is None:
        return None
    if structure is not None and not (chat is not None and chat.must_call and chat.conversation.tools):
        param = structure.param
    compiled = await pool.compile(partial(served.client.check_grammar, grammar, param, True))
    if compiled is None:
        compiled = await pool.compile_slowly(partial(served.client.check_grammar, grammar, param))
    assert compiled is not None
    return grammar, compiled
