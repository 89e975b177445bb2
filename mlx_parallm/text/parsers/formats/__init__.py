"""A file for each way of writing tool calls. Add one: write its file, and name it in `FORMATS`.

A file's `NOTATIONS` are found by the name of the module in mlx_lm.tool_parsers that mlx-lm chooses for a tokenizer.
Formats that mlx-lm does not know (DeepSeek's, Llama's, gpt-oss's) are recognised in `tool_format.py`.
"""

from collections.abc import Mapping

from mlx_parallm.text.parsers.formats import gemma, glm, hermes, kimi, minicpm, minimax, mistral, muse, pythonic, qwen
from mlx_parallm.text.parsers.notation import Notation

FORMATS = (gemma, glm, hermes, kimi, minicpm, minimax, mistral, muse, pythonic, qwen)
NOTATIONS: Mapping[str, Notation] = {name: one for module in FORMATS for name, one in module.NOTATIONS.items()}
