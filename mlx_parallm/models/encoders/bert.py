"""BERT, and RoBERTa with its kin, whose positions begin behind that of the padding token."""

from mlx_parallm.models.encoders.encoder_layers import ACTIVATION_NAMES, Embeddings, Encoder, EncoderLayer
from mlx_parallm.models.encoders.encoder_weights import Settings, Weights

MODEL_TYPES = ("bert", "roberta", "xlm-roberta", "camembert")
PREFIXES = ("", "bert.", "roberta.", "camembert.", "model.")
BEHIND_PADDING = ("roberta", "xlm-roberta", "camembert")  # their positions begin there


def build(settings: Settings, weights: Weights) -> Encoder:
    settings.one_of("position_embedding_type", ("absolute",), "absolute")
    settings.one_of("is_decoder", (False,), False)
    family = settings.get("model_type")
    size = settings.size("hidden_size")
    eps = settings.number("layer_norm_eps", default=1e-12)
    positions = settings.size("max_position_embeddings", default=512)
    heads = settings.size("num_attention_heads")
    if size % heads:
        raise settings.wrong("num_attention_heads", heads, f"a divisor of the hidden size {size}")
    padding = int(settings.get("pad_token_id", default=1)) if family in BEHIND_PADDING else None
    embeddings = Embeddings(
        word=weights.take("embeddings.word_embeddings.weight", -1, size),
        norm=weights.norm("embeddings.LayerNorm", size, eps),
        position=weights.take("embeddings.position_embeddings.weight", positions, size),
        types=weights.take("embeddings.token_type_embeddings.weight", -1, size),
        padding=padding,
    )
    return Encoder(
        family=family,
        embeddings=embeddings,
        layers=[
            _layer(settings, weights, index, size, heads, eps) for index in range(settings.size("num_hidden_layers"))
        ],
        max_length=positions if padding is None else positions - padding - 1,
        pooler=weights.dense("pooler.dense", size, size) if "pooler.dense.weight" in weights else None,
    )


def _layer(settings: Settings, weights: Weights, index: int, size: int, heads: int, eps: float) -> EncoderLayer:
    at = f"encoder.layer.{index}"
    inner = settings.size("intermediate_size")
    activation = settings.one_of("hidden_act", list(ACTIVATION_NAMES), "gelu")
    names = [f"{at}.attention.self.{part}" for part in ("query", "key", "value")]
    return EncoderLayer(
        qkv=weights.fused(names, size, size),
        out=weights.dense(f"{at}.attention.output.dense", size, size),
        attention_norm=weights.norm(f"{at}.attention.output.LayerNorm", size, eps),
        up=weights.dense(f"{at}.intermediate.dense", inner, size),
        down=weights.dense(f"{at}.output.dense", size, inner),
        mlp_norm=weights.norm(f"{at}.output.LayerNorm", size, eps),
        heads=heads,
        activation=ACTIVATION_NAMES[activation],
    )
