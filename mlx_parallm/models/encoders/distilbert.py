"""DistilBERT: BERT without token types and pooler, under names of its own."""

from mlx_parallm.models.encoders.encoder_layers import ACTIVATION_NAMES, Embeddings, Encoder, EncoderLayer
from mlx_parallm.models.encoders.encoder_weights import Settings, Weights

MODEL_TYPES = ("distilbert",)
PREFIXES = ("", "distilbert.", "model.")
EPS = 1e-12


def build(settings: Settings, weights: Weights) -> Encoder:
    size = settings.size("dim", "hidden_size")
    heads = settings.size("n_heads", "num_attention_heads")
    positions = settings.size("max_position_embeddings", default=512)
    if size % heads:
        raise settings.wrong("n_heads", heads, f"a divisor of the hidden size {size}")
    embeddings = Embeddings(
        word=weights.take("embeddings.word_embeddings.weight", -1, size),
        norm=weights.norm("embeddings.LayerNorm", size, EPS),
        position=weights.take("embeddings.position_embeddings.weight", positions, size),
    )
    depth = settings.size("n_layers", "num_hidden_layers")
    layers = [_layer(settings, weights, index, size, heads) for index in range(depth)]
    return Encoder(family="distilbert", embeddings=embeddings, layers=layers, max_length=positions)


def _layer(settings: Settings, weights: Weights, index: int, size: int, heads: int) -> EncoderLayer:
    at = f"transformer.layer.{index}"
    inner = settings.size("hidden_dim", "intermediate_size")
    activation = settings.one_of("activation", list(ACTIVATION_NAMES), "gelu")
    names = [f"{at}.attention.{part}_lin" for part in "qkv"]
    return EncoderLayer(
        qkv=weights.fused(names, size, size),
        out=weights.dense(f"{at}.attention.out_lin", size, size),
        attention_norm=weights.norm(f"{at}.sa_layer_norm", size, EPS),
        up=weights.dense(f"{at}.ffn.lin1", inner, size),
        down=weights.dense(f"{at}.ffn.lin2", size, inner),
        mlp_norm=weights.norm(f"{at}.output_layer_norm", size, EPS),
        heads=heads,
        activation=ACTIVATION_NAMES[activation],
    )
