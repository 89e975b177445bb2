"""MiniMax's calls: <invoke name="…"> with a <parameter name="…"> for each argument."""

from mlx_parallm.text.parsers.notation import Notation
from mlx_parallm.text.parsers.tags import QUOTED, QUOTED_KEY, stripped_text, tags

MINIMAX = tags(
    rf"<invoke name={QUOTED}\s{{0,8}}>",
    rf"<parameter name={QUOTED_KEY}\s{{0,8}}>",
    "</invoke>",
    "</parameter>",
    stripped_text,
)
NOTATIONS = {"minimax_m2": Notation(read=MINIMAX.read)}
