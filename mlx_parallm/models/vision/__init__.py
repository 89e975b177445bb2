"""Models that read images: a language model in the engine like any other, and an image encoder beside it.

mlx-vlm has their modules and processors (extra `vision`); it is imported when such a model is loaded, and never before.
`load.py` loads one, `language.py` is the module that the engine runs, `encoder.py` turns pixels into features on the
engine thread, `families.py` and `processor.py` turn images and conversations into tokens and arrays on other threads.
"""
