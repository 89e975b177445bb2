"""The grammar that a call's output must follow: its structure, its tools, and what comes before them."""

from mlx_parallm.server.call import ChatTurn, GenerationCall, Structure
from mlx_parallm.server.models import ServedModel
from mlx_parallm.text.grammar import after_thinking, either, in_final_channel, tool_grammar


def grammar_of(call: GenerationCall, served: ServedModel, *, inside_thinking: bool = False) -> Structure | None:
    """None where the output is free. Compiling it is left to the caller."""
    if call.chat is None:
        return call.structure
    found = call.structure
    if found is not None and served.tool_format.kind == "harmony":
        found = Structure(in_final_channel(found.grammar, served.vocabulary), found.param)
    if call.chat.conversation.tools and (call.chat.must_call or found is not None):
        calls = _tool_grammar(call.chat, served)
        # Free to choose, a model may still call a tool instead of answering in the format.
        if call.chat.must_call or found is None:
            found = Structure(calls, "tools")
        else:
            found = Structure(either(found.grammar, calls), found.param)
    if found is None or served.thinking is None:
        return found
    grammar = after_thinking(
        found.grammar, served.thinking, served.vocabulary, "inside" if inside_thinking else "before"
    )
    return Structure(grammar, found.param)


def _tool_grammar(chat: ChatTurn, served: ServedModel) -> str:
    return tool_grammar(
        chat.conversation.tools,
        served.tool_format,
        served.vocabulary,
        name=chat.tool_name,
        parallel=chat.parallel_calls,
    )
