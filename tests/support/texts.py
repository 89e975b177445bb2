"""Texts of all lengths, the same everywhere."""

import numpy as np

WORDS = (
    "the a of and to in is that it for was on are with as be at one have this from by hot word but what "
    "some we can out other were all there when up use your how said each she which do their time if will "
    "way about many then them write would like so these her long make thing see him two has look more day "
    "could go come did number sound no most people my over know water than call first who may down side "
    "been now find any new work part take get place made live where after back little only round man year "
    "came show every good me give our under name very through just form sentence great think say help low "
    "line differ turn cause much mean before move right boy old too same tell does set three "
    "embedding-models tokenizer isn't C++ 3.14 2026 naïve Zürich 北京 привет 🙂 e.g. (sic) "
    "http://example.com/a?b=c "
).split()


def sample_texts(count: int, seed: int = 0, shortest: int = 1, longest: int = 400) -> list[str]:
    """As many short ones as long ones, on a scale of lengths that doubles."""
    random = np.random.RandomState(seed)
    sizes = (shortest * (longest / shortest) ** random.random_sample(count)).astype(int)
    return [" ".join(WORDS[index] for index in random.randint(0, len(WORDS), size)) for size in sizes]
