"""MiniCPM's calls: <function name="…"> with a <param name="…"> for each argument, its value perhaps in CDATA."""

from mlx_parallm.text.parsers.call_blocks import Quoting
from mlx_parallm.text.parsers.notation import Notation
from mlx_parallm.text.parsers.tags import CDATA, QUOTED, QUOTED_KEY, stripped_text, tags

MINICPM = tags(  # its start mark ends before the name
    rf"\A\s{{0,8}}{QUOTED}\s{{0,8}}>",
    rf"<param\s{{1,8}}name\s{{0,8}}=\s{{0,8}}{QUOTED_KEY}\s{{0,8}}>",
    "",
    "</param>",
    stripped_text,
    several=False,
    cdata=True,
)
NOTATIONS = {"minicpm5": Notation(read=MINICPM.read, quoting=Quoting((CDATA,)))}
