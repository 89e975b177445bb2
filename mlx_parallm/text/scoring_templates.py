"""Chat templates of models that have a plain tokenizer: those that score conversations."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from mlx_parallm.errors import InvalidRequestError


def render_chat(
    template: str | None, messages: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, str], param: str
) -> str:
    """A finished conversation as text; `special_tokens` are the names that templates use, such as `bos_token`."""
    if template is None:
        raise InvalidRequestError("this model has no chat template: send texts, not conversations", param=param)
    try:  # the template is the model's own program: whatever it raises, it could not take these messages
        rendered, _ = render_jinja_template(
            conversations=[[dict(message) for message in messages]], chat_template=template, **special_tokens
        )
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise InvalidRequestError(f"the model's chat template can't render {param}: {reason}", param=param) from error
    return str(rendered[0])
