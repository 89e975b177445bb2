"""Models on the Hugging Face hub: which sources are names there, and the folder that a download leaves."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from mlx_parallm.errors import ModelLoadError

# What serving reads of any kind of model; not the copies of the weights in other formats.
PATTERNS = (
    *("*.json", "*.jsonl", "*.txt", "*.jinja", "*.py", "*.model", "*.tiktoken", "tokenizer*"),
    *("model*.safetensors", "*/model*.safetensors"),  # the latter: dense layers of sentence-transformers
)


def looks_like_a_path(source: str) -> bool:
    """A name on the hub is `name` or `owner/name`."""
    return source.startswith((".", "/", "~")) or source.count("/") > 1 or source.endswith("/") or "\\" in source


def is_hub_id(source: str | None) -> bool:
    """Returns whether it can only be a name on the hub: no file or folder here is called so."""
    if source is None or looks_like_a_path(source) or source.endswith(".gguf"):
        return False
    try:
        return not Path(source).exists()
    except (OSError, ValueError):
        return False


def download(source: str) -> Path:
    """The folder of a model's files, which are fetched unless they are there; ModelLoadError."""
    try:
        return Path(snapshot_download(source, allow_patterns=list(PATTERNS)))
    except Exception as error:  # those of the hub's HTTP library, which it does not export, are among them
        raise load_error(source, error) from error


def load_error(source: str, error: Exception) -> ModelLoadError:
    """Returns what is wrong with a folder, or a name on the hub."""
    if isinstance(error, LocalEntryNotFoundError):
        return ModelLoadError(f"{source} is no local folder, and the model hub can't be reached")
    if isinstance(error, HFValidationError):
        return ModelLoadError(f"there is no folder {source}, and it is no name of a model on the hub either")
    if isinstance(error, HfHubHTTPError):
        reason = str(error).splitlines()[0]
        return ModelLoadError(f"{source} is no local folder, and the model hub has no such model: {reason}")
    if isinstance(error, OSError):
        return ModelLoadError(f"{source} is not a model folder: {error}")
    return ModelLoadError(f"{source} can't be loaded: {error}")
