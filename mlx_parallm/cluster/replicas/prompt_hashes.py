"""What a request's prompt begins with, as hashes that tell the router which replica has it. No Ray, no MLX.

The text is hashed as it stands in the body: whoever rendered and tokenised it here would do that twice. Hashes are
chained, one at the end of each message and at fixed places within long ones, so that two prompts have a hash in common
if they have all before it in common. They begin with what else decides keys and values: model, adapter, salt and key.
A wrong guess costs a prompt that is computed anew, never a wrong response: replicas look their own caches up by tokens.
"""

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from xxhash import xxh3_64_intdigest

from mlx_parallm.cluster.replicas.affinity import PromptPrefix

MAX_HASHES = 192  # of a prompt; with the steps below, its first 600,000 characters
# Up to this place, a hash each so many characters.
STEPS = ((16_384, 512), (131_072, 2_048), (1 << 62, 8_192))
STICKY = 1 << 50  # characters: more than any load weighs up
FIELDS = ("instructions", "system", "prompt", "text", "input", "input_ids", "messages")


@dataclass(frozen=True, slots=True)
class PromptDigest:
    prefix: PromptPrefix
    adapter: str | None


def prompt_digest(body: bytes, tenant: bytes = b"", everywhere: Collection[str] = ()) -> PromptDigest:
    """Returns the digest of the prompt in a JSON body. One that can't be read has no prompt: the replica says what is
    wrong with it.

    `everywhere`: models that no replica has to load first.
    """
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return PromptDigest(PromptPrefix(), None)
    if not isinstance(fields, dict):
        return PromptDigest(PromptPrefix(), None)
    if session := fields.get("session_id"):  # state that a replica keeps for its client
        return PromptDigest(PromptPrefix([xxh3_64_intdigest(_bytes(session))], [STICKY]), None)
    model = fields.get("model")
    adapter = fields.get("lora_adapter")
    name = next((one for one in (adapter, model) if isinstance(one, str)), None)
    name = None if name in everywhere else name
    seed = orjson.dumps([str(model), str(adapter), str(fields.get("cache_salt")), tenant.decode(errors="replace")])
    return PromptDigest(_chain(_pieces(fields), xxh3_64_intdigest(seed)), name)


def _chain(pieces: Iterator[bytes], seed: int) -> PromptPrefix:
    hashes: list[int] = []
    lengths: list[int] = []
    place = 0
    last = seed
    for piece in pieces:
        start = 0
        while start < len(piece):
            step = next(step for end, step in STEPS if place < end)
            part = piece[start : start + step]
            start = start + step
            place = place + len(part)
            last = xxh3_64_intdigest(part, seed=last)
            hashes.append(last)
            lengths.append(place)
            if len(hashes) == MAX_HASHES:
                return PromptPrefix(hashes, lengths)
    return PromptPrefix(hashes, lengths)


def _pieces(fields: Mapping[str, Any]) -> Iterator[bytes]:
    """The parts of a prompt in the order in which templates write them: tools, instructions, messages or text."""
    if tools := fields.get("tools"):
        yield _bytes(tools)
    for name in FIELDS:
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, list) and value and isinstance(value[0], (str, list)):
            value = value[0]  # of several prompts, the first
        if isinstance(value, list) and value and isinstance(value[0], int):
            yield _tokens(value)
        elif isinstance(value, list):
            yield from map(_bytes, value)
        else:
            yield _bytes(value)


def _bytes(value: Any) -> bytes:
    return (
        value.encode(errors="replace") if isinstance(value, str) else orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    )


def _tokens(ids: Sequence[Any]) -> bytes:
    """Four bytes a token, about as many as its characters."""
    try:
        return array("i", ids).tobytes()
    except (TypeError, OverflowError):
        return b""
