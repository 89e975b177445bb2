"""JSON objects between marks, as Hermes and many after it write calls; also the format that models are taught here."""

from mlx_parallm.text.parsers.notation import Notation

JSON = Notation()
START = "<tool_call>"
END = "</tool_call>"
NOTATIONS = {"json_tools": JSON}
