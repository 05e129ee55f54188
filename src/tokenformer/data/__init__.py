"""What models are trained on: text becomes blocks of token ids, images become pixels and labels. See docs/data.md.

    text/      TextData and what it is made of
    images/    ImageData and what it is made of
    base.py    what training asks of either

Each is imported on its own, `from tokenformer.data.text import TextData`: a run on text loads no code for images.
"""
